"""Which models are served and by whom; loads tokenizers, refuses workers whose cards don't fit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.common.cards import Adapter, Instance, ModelCard
from services.common.telemetry.logging import get_logger
from services.gateway.adapters.cards import CardRefused, FilesUnavailable, check_card, files_digest
from services.gateway.adapters.tokenizer import Tokenizer

log = get_logger(__name__)

Load = Callable[[str, ModelCard], Awaitable[Tokenizer]]
"""Address of a worker and its card to a tokenizer; raises FilesUnavailable or CardRefused."""

_RETRY_S = (0.2, 5.0)
_REMEMBERED_S = 300.0
"""How long a name without workers is "no worker now" rather than "no such model"."""
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Served:
    """A name that clients may use, resolved."""

    name: str
    card: ModelCard
    tokenizer: Tokenizer
    adapter: Adapter | None
    refused: frozenset[str]
    """Workers that say they serve it but must not be used."""


@dataclass(slots=True)
class _Model:
    likeness: tuple[object, ...]
    workers: dict[str, Instance] = field(default_factory=dict)
    refused: dict[str, Instance] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    task: asyncio.Task[None] | None = None


def _likeness(card: ModelCard) -> tuple[object, ...]:
    """What the cards of one model's workers must agree on."""
    return (files_digest(card), card.block_size, card.vocab_size, card.eos_token_ids, card.defaults)


def _same(one: ModelCard, other: ModelCard) -> bool:
    return one.model == other.model and _likeness(one) == _likeness(other)


class Models:
    """The models of all workers. Owned by the loop's thread."""

    def __init__(self, load: Load, on_refused: Callable[[str], None]) -> None:
        """`on_refused(reason)` counts refused cards: "card", "disagree" or "files"."""
        self._load = load
        self._on_refused = on_refused
        self._models: dict[str, _Model] = {}
        self._unusable: dict[str, Instance] = {}
        self._left: dict[str, float] = {}
        """When the last worker of a name left, on the loop's clock; oldest first."""

    def update(self, instance: Instance) -> None:
        """A worker's record, new or changed."""
        card = instance.card
        if card is None:
            return
        known = self._worker(instance.id)
        # Another life of it changes nothing here, as long as it serves the same, and as rightly.
        if (
            known is not None
            and known.card is not None
            and _same(known.card, card)
            and (instance.id in self._unusable) == bool(check_card(card))
        ):
            self._replace(instance)
            return
        self.remove(instance.id)
        self._admit(instance, card)

    def remove(self, worker_id: str) -> None:
        """A worker is gone for good."""
        known = self._worker(worker_id)
        self._forget(worker_id)
        if known is None or known.card is None:
            return
        for name in (known.card.model, *(a.name for a in known.card.adapters)):
            if not self._candidates(name):
                self._left.pop(name, None)
                self._left[name] = asyncio.get_running_loop().time()
                if len(self._left) > _REMEMBERED:
                    del self._left[next(iter(self._left))]

    def _forget(self, worker_id: str) -> None:
        self._unusable.pop(worker_id, None)
        for name, model in list(self._models.items()):
            model.refused.pop(worker_id, None)
            if model.workers.pop(worker_id, None) is not None and not model.workers:
                if model.task is not None:
                    model.task.cancel()
                del self._models[name]
                # Those that disagreed with the last of the others are the model now.
                for instance in model.refused.values():
                    if instance.card is not None:
                        self._admit(instance, instance.card)

    def resolve(self, name: str) -> Served | None:
        """The model or adapter of that name, when it can be served now."""
        for model in self._candidates(name):
            cards = [w.card for w in model.workers.values() if w.card is not None]
            fit = [c for c in cards if c.serves(name)]
            if not fit or model.tokenizer is None:
                continue
            card = min(fit, key=lambda c: c.max_model_len)
            adapter = None if name == card.model else card.adapter(name)
            return Served(name, card, model.tokenizer, adapter, self.refused())
        return None

    def loading(self, name: str) -> bool:
        """Whether a model of that name is known but can't be served yet."""
        return any(m.tokenizer is None for m in self._candidates(name))

    def may_return(self, name: str) -> bool:
        """Whether an unknown name is not wrong yet: no model is known, or it was served lately."""
        left = self._left.get(name)
        lately = left is not None and asyncio.get_running_loop().time() - left < _REMEMBERED_S
        return lately or not (self._models or self._unusable)

    async def settled(self, name: str = "") -> None:
        """Waits until the model (or adapter) of that name is loaded; without one, every known."""

        def loading() -> list[asyncio.Task[None]]:
            models = self._candidates(name) if name else self._models.values()
            return [m.task for m in models if m.task is not None and not m.task.done()]

        while tasks := loading():
            await asyncio.wait(tasks)

    def served(self) -> list[Served]:
        """All names that can be served now: models, then their adapters."""
        names: list[str] = []
        for name, model in sorted(self._models.items()):
            names.append(name)
            for worker in model.workers.values():
                if worker.card is not None:
                    names += [a.name for a in worker.card.adapters if a.name not in names]
        return [s for n in names if (s := self.resolve(n)) is not None]

    def workers(self, name: str) -> list[Instance]:
        """Workers that may serve that name, in order of id."""
        found = [
            w
            for model in self._candidates(name)
            for w in model.workers.values()
            if w.card is not None and w.card.serves(name)
        ]
        return sorted(found, key=lambda w: w.id)

    def refused(self) -> frozenset[str]:
        """Ids of workers that must not be used."""
        every = {w for model in self._models.values() for w in model.refused}
        return frozenset(every | self._unusable.keys())

    def close(self) -> None:
        """Stops loading."""
        for model in self._models.values():
            if model.task is not None:
                model.task.cancel()

    def _candidates(self, name: str) -> Sequence[_Model]:
        model = self._models.get(name)
        if model is not None:
            return [model]
        return [
            m
            for m in self._models.values()
            if any(w.card is not None and w.card.serves(name) for w in m.workers.values())
        ]

    def _worker(self, worker_id: str) -> Instance | None:
        for model in self._models.values():
            for group in (model.workers, model.refused):
                if worker_id in group:
                    return group[worker_id]
        return self._unusable.get(worker_id)

    def _replace(self, instance: Instance) -> None:
        for model in self._models.values():
            for group in (model.workers, model.refused):
                if instance.id in group:
                    group[instance.id] = instance
        if instance.id in self._unusable:
            self._unusable[instance.id] = instance

    def _admit(self, instance: Instance, card: ModelCard) -> None:
        if reason := check_card(card):
            self._refuse(instance, reason, "card")
            self._unusable[instance.id] = instance
            return
        model = self._models.get(card.model)
        if model is None:
            model = self._models[card.model] = _Model(_likeness(card))
            model.workers[instance.id] = instance
            name = f"load-{card.model}"
            model.task = asyncio.get_running_loop().create_task(
                self._load_model(card.model, model), name=name
            )
        elif model.likeness == _likeness(card):
            model.workers[instance.id] = instance
        else:
            model.refused[instance.id] = instance
            reason = "its card disagrees with that of the model's other workers"
            self._refuse(instance, reason, "disagree")

    def _refuse(self, instance: Instance, why: str, reason: str) -> None:
        self._on_refused(reason)
        model = instance.card.model if instance.card else ""
        log.error("worker's model card refused", worker=instance.id, model=model, why=why)

    async def _load_model(self, name: str, model: _Model) -> None:
        pause = _RETRY_S[0]
        while True:
            for instance in list(model.workers.values()):
                if instance.card is None:
                    continue
                try:
                    model.tokenizer = await self._load(instance.address, instance.card)
                except FilesUnavailable as exc:
                    log.warning(
                        "model files not available", model=name, worker=instance.id, why=str(exc)
                    )
                except CardRefused as exc:
                    self._refuse(instance, str(exc), "files")
                except Exception as exc:
                    log.error("loading a model failed", model=name, exc_info=exc)
                else:
                    log.info("model loaded", model=name, worker=instance.id)
                    return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _RETRY_S[1])
