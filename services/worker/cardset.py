"""The model card of a started engine, and the files that go with it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.common.cards import ModelCard
from services.common.errors import NotFound
from services.worker.adapters.files import (
    CardFile,
    DigestCache,
    card_files,
    generation_defaults,
    namespace,
    weights_digest,
)
from services.worker.engines.port import EngineProfile


@dataclass(frozen=True, slots=True)
class CardSet:
    """A card and the contents of its files."""

    card: ModelCard
    files: tuple[CardFile, ...] = ()

    def file(self, name: str) -> CardFile:
        """The file of that name. Raises NotFound."""
        for file in self.files:
            if file.entry.name == name:
                return file
        raise NotFound(f"the model card has no file {name!r}", reason="NO_SUCH_FILE")


def build_cards(name: str, profile: EngineProfile, digests: DigestCache) -> CardSet:
    """Reads and digests the model's files (blocking: seconds for large weights that are new)."""
    folder = profile.model_dir
    files = card_files(folder)
    weights = b"" if profile.simulated else weights_digest(folder, digests)
    card = ModelCard(
        model=name,
        namespace=namespace(weights, profile.identity),
        block_size=profile.block_size,
        max_model_len=profile.max_model_len,
        vocab_size=profile.vocab_size,
        eos_token_ids=profile.eos_token_ids,
        files=tuple(f.entry for f in files),
        defaults=generation_defaults(folder),
        adapters=profile.adapters,
        hash_vector=profile.hash_vector,
        engine=profile.engine,
        created_unix_s=int(time.time()),
        max_logprobs=profile.max_logprobs,
        total_blocks=profile.total_blocks,
    )
    return CardSet(card, files)
