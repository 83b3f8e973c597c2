"""A model's tokenizer and chat template, from the files of its card.

Equal to transformers' AutoTokenizer on the same directory (a contract test holds it to that),
without its import of seconds. Only models with a tokenizer.json can be served. A few of
transformers' classes (Llama, GPT-2) build their tokenizer by rules of their own, whatever that
file says: for those the folder must be what save_pretrained makes of it, which holds the tokenizer
as the engine uses it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from services.gateway.adapters.token_bytes import TokenBytes, plan_token_bytes
from services.gateway.adapters.token_reach import TokenReach, measure_reach
from services.gateway.core.messages import Message
from services.gateway.core.template import ChatTemplate
from services.gateway.errors import BadRequest

LONG_TEXT_CHARS = 8_000
"""Texts above this (some 5 ms of work) leave the event loop."""
_THREADS = 2
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        token_bytes: TokenBytes | None,
        reach: TokenReach | None,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, Any],
    ) -> None:
        """Use `load`. `token_bytes` is None where text is not the tokens' own bytes, `reach`
        where nothing bounds how much text a token covers."""
        self._backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_bytes = token_bytes
        self._bytes: dict[int, bytes | None] = {}
        self._template = template
        self.special_tokens = dict(special_tokens)
        self._inline_chars = 0
        self._reach = reach
        # Its queue is bounded by the requests that wait for it, one text each.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """From a directory with tokenizer.json and what else there is of tokenizer_config.json,
        special_tokens_map.json, added_tokens.json, chat_template.jinja, chat_template.json.

        Takes up to a second: call it off the loop. Raises ValueError that names the file at fault.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path.name} is missing; save the model's tokenizer as a fast one "
                "(transformers' save_pretrained writes it)"
            )
        source = path.read_text(encoding="utf-8")
        try:
            backend = tokenizers.Tokenizer.from_str(source)
        except Exception as exc:
            # The library raises bare Exception for whatever it does not like.
            raise ValueError(f"{path.name} can't be read: {exc}") from exc
        backend.no_truncation()
        backend.no_padding()
        config = {
            **_read_json(directory / "special_tokens_map.json"),
            **_read_json(directory / "tokenizer_config.json"),
        }
        special = _special_tokens(config)
        _add_missing_tokens(backend, config, special)
        # add_bos_token and add_eos_token are not looked at, just as transformers does: where there
        # is a tokenizer.json, its post-processor alone says what stands round a text.
        template_source = _template_source(directory, config)
        template = ChatTemplate(template_source, special) if template_source else None
        stored = json.loads(source)
        added = list(backend.get_added_tokens_decoder().values())
        reach = measure_reach(stored, added)
        return cls(backend, plan_token_bytes(stored.get("decoder")), reach, template, special)

    def close(self) -> None:
        """Ends the threads. Encodings under way are finished, later ones fail."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        return self._template is not None

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """As ChatTemplate.render. Raises BadRequest when the model has no template."""
        if self._template is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.",
                param="model",
                code="no_chat_template",
            )
        return self._template.render(
            messages,
            now=now,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; for a rendered chat pass add_special_tokens=False."""
        # The batch form computes no offsets, which nobody reads here.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As encode; long texts are encoded off the loop, in few threads (the GIL is free then).

        Cancelling gives up the wait; a text that is being encoded is finished for nobody.
        """
        if len(text) <= LONG_TEXT_CHARS:
            self._inline_chars += len(text)
            if self._inline_chars > LONG_TEXT_CHARS:
                # Many short texts are as long as a long one: let others run in between.
                self._inline_chars = 0
                await asyncio.sleep(0)
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, lambda: self.encode(text, add_special_tokens=add_special_tokens)
        )

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least.

        Tells a hopelessly long prompt without encoding it, which takes seconds for megabytes.
        """
        return self._reach.least_tokens(text) if self._reach else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all the ids at once."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def byte_exact(self) -> bool:
        """Whether text is the concatenation of the tokens' own bytes, read as UTF-8."""
        return self._token_bytes is not None

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the blank with which a first token begins."""
        return self._token_bytes is not None and self._token_bytes.strips_first_space

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes; None for an id that does not exist."""
        try:
            return self._bytes[token_id]
        except KeyError:
            raw = self._bytes[token_id] = self._read_token_bytes(token_id)
            return raw

    def _read_token_bytes(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._token_bytes is not None:
            return self._token_bytes.of(token)
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves it out."""
        return token_id in self._special_ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path.name} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return value


def _token_content(value: object) -> str | None:
    """A special token's text: stored plainly, or as an object with its matching rules."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """ "bos_token" and its kin to text: what a template sees."""
    special: dict[str, Any] = {
        name: text
        for name in _NAMED_TOKENS
        if (text := _token_content(config.get(name))) is not None
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(extra, dict):
        # Models with images name further tokens this way.
        special |= {k: text for k, v in extra.items() if (text := _token_content(v)) is not None}
    elif isinstance(extra, list):
        special["additional_special_tokens"] = [
            text for item in extra if (text := _token_content(item)) is not None
        ]
    return special


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, Any]
) -> None:
    """Adds what the configuration knows and tokenizer.json does not, or does not call special."""
    known = {t.content: t for t in backend.get_added_tokens_decoder().values()}
    stored = config.get("added_tokens_decoder")
    for _, entry in sorted(_by_id(stored)):
        if entry["content"] not in known:
            token = AddedToken(**{k: entry[k] for k in _TOKEN_RULES if k in entry})
            backend.add_tokens([token])
            known[token.content] = token
    texts = [t for v in special.values() for t in (v if isinstance(v, list) else [v])]
    for text in dict.fromkeys(texts):
        if text not in known or not known[text].special:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


_TOKEN_RULES = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _by_id(stored: object) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(stored, dict):
        return []
    return [
        (int(token_id), entry)
        for token_id, entry in stored.items()
        if str(token_id).isdigit() and isinstance(entry, dict) and "content" in entry
    ]


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own goes before the configuration's."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stored = _read_json(directory / "chat_template.json").get("chat_template")
    if stored is None:
        stored = config.get("chat_template")
    if isinstance(stored, list):
        named = {
            entry["name"]: entry["template"]
            for entry in stored
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
        stored = named.get("default")
    return stored if isinstance(stored, str) else None
