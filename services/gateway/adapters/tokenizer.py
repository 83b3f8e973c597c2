"""A model's tokenizer and chat template, from the files of its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from services.gateway.core.messages import Message


class Tokenizer:
    """Text to token ids and back, equal to transformers' AutoTokenizer on the same directory."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """From a directory with tokenizer.json, and what else there is of tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja. Takes up to a second: call it off the loop.
        Raises ValueError that names the file at fault."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        raise NotImplementedError

    @property
    def has_chat_template(self) -> bool:
        """Whether chat requests can be served."""
        raise NotImplementedError

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
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; for a rendered chat pass add_special_tokens=False."""
        raise NotImplementedError

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As encode; long texts (over 8,000 characters) are encoded off the loop, in few threads."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all the ids at once."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes; None for an id that does not exist."""
        raise NotImplementedError

    def token_text(self, token_id: int) -> str:
        """The token's own text, with U+FFFD where its bytes are no whole characters."""
        raise NotImplementedError

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves it out."""
        raise NotImplementedError
