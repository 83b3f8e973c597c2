"""Chat templates: messages to the one string that the model was trained to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from services.gateway.core.messages import Message


class ChatTemplate:
    """A model's own Jinja template, rendered as transformers' apply_chat_template does it."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens`: "bos_token", "eos_token" ... to text. Raises ValueError for a bad template."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        now: datetime,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises BadRequest (param messages) when the template refuses the messages.

        `now` is what the template may print as today's date; `kwargs` are `chat_template_kwargs`.
        Encode the result with add_special_tokens=False: templates write their own BOS.
        """
        raise NotImplementedError
