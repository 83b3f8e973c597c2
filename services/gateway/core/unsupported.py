"""Known parameters that are not built here yet: refused, never ignored.

Each has the values under which it asks for nothing; with any other value the answer would not be
what the client asked for, so the client is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.errors import Unsupported

_HARMLESS: dict[str, tuple[object, ...]] = {
    "allowed_tools": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
_CHAT_ONLY: dict[str, tuple[object, ...]] = {"best_of": (1,), "echo": (False,)}


def refuse_unsupported(fields: Mapping[str, Any], *, chat: bool) -> None:
    """Raises Unsupported for the first field that asks for something not built here.

    `fields` are those given and not null. `best_of` and `echo` are completions' own.
    """
    for name, value in fields.items():
        harmless = _HARMLESS.get(name)
        if harmless is None and chat:
            harmless = _CHAT_ONLY.get(name)
        if harmless is None and name.startswith("guided_"):
            harmless = ()
        if harmless is None or any(_same(value, ok) for ok in harmless):
            continue
        # A name with the prefix is the client's own text: not repeated unless we know it.
        known = name if not name.startswith("guided_") or name.isidentifier() else "guided_*"
        raise Unsupported(f"The parameter '{known[:64]}' is not supported yet.", param=known[:64])


def _same(value: object, harmless: object) -> bool:
    # True == 1 in Python, not in JSON.
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
