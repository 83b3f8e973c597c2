"""What OpenAI clients send: bodies to checked requests, or a BadRequest that names the field.

Unknown fields are ignored, as vLLM and its kin do: clients and SDKs send fields of other servers and of
newer APIs in `extra_body`, and refusing them would break working programs. But a *known* field that is
not built here is never ignored: it is refused with code "unsupported_parameter".
"""

from __future__ import annotations

from pydantic import BaseModel

from services.gateway.core.messages import Message


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """What chat and completion requests share. None always means: not given (or null)."""

    model: str
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        raise NotImplementedError

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        raise NotImplementedError

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives wanted at each position: None no log probabilities, 0 only the chosen token's."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """A body of POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, object] = {}  # noqa: RUF012 - pydantic copies it


class CompletionRequest(GenerationRequest):
    """A body of POST /v1/completions. Choice index = prompt index * n + i."""

    prompt: tuple[str | tuple[int, ...], ...]
    """One entry for each prompt: text, or token ids."""
    logprobs: int | None = None
    echo: bool = False
    """Text of the prompt goes before each choice's text (never together with logprobs)."""
    add_special_tokens: bool = True


def parse_chat(body: bytes) -> ChatRequest:
    """The request in a body. Raises BadRequest for whatever is wrong with it, before anything is sent."""
    raise NotImplementedError


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in a body. Raises BadRequest for whatever is wrong with it."""
    raise NotImplementedError
