"""What OpenAI clients send: bodies to checked requests, or a BadRequest that names the field.

Unknown fields are ignored, as vLLM and its kin do: clients and SDKs send fields of other servers
and of newer APIs, and refusing them would break working programs. But a *known* field that is not
built here is never ignored: it is refused with code "unsupported_parameter" (core/unsupported.py).
A field that is null counts as absent. Numbers are numbers: "4", 4.5 and true are no integers.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from services.gateway.core.jsonbody import child_path, parse_object
from services.gateway.core.messages import Message, parse_messages
from services.gateway.core.unsupported import refuse_unsupported
from services.gateway.errors import BadRequest

MAX_STOPS = 16
"""OpenAI allows 4 stop strings; servers of open models allow more."""
MAX_STOP_CHARS = 1024
"""Longest stop string. Its end may be that far away, so that much text may be held back."""
MAX_PROMPTS = 2048
"""Most prompts in one completion request."""
MAX_CHOICES = 2048
"""Most choices of one request, all prompts together."""
MAX_LOGPROBS = 20
_INT64 = 2**63
_INT32 = 2**31

# Names that a chat template gets from us; a client's chat_template_kwargs may not replace them.
RESERVED_TEMPLATE_NAMES = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "self",
    )
)


def _invalid(param: str, right: str, code: str = "invalid_value") -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {right}.", param=param, code=code)


def _stops(value: object) -> tuple[object, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple):
        raise _invalid("stop", "must be text or a list of texts", "invalid_type")
    if len(stops) > MAX_STOPS:
        raise _invalid("stop", f"at most {MAX_STOPS} stop strings are allowed")
    if any(stop == "" for stop in stops):
        raise _invalid("stop", "a stop string must not be empty")
    if any(isinstance(stop, str) and len(stop) > MAX_STOP_CHARS for stop in stops):
        raise _invalid("stop", f"a stop string has at most {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _invalid("logit_bias", "must be an object of token ids to biases", "invalid_type")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise _invalid("logit_bias", "keys must be token ids")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise _invalid("logit_bias", "biases must be numbers from -100 to 100")
        bias[int(key)] = float(number)
    return bias


def _template_kwargs(value: object) -> dict[str, Any]:
    param = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise _invalid(param, "must be an object", "invalid_type")
    for name in value:
        if name in RESERVED_TEMPLATE_NAMES or not name.isidentifier():
            raise _invalid(param, "a name in it is reserved or no identifier")
        if name.endswith("_token"):
            raise _invalid(param, "special tokens can't be replaced")
    return value


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    wrong = _invalid(
        "prompt", "must be text, a list of texts, token ids, or a list of token id lists"
    )
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong
    if not value:
        raise _invalid("prompt", "must not be empty")
    if type(value[0]) is int:
        return (_token_ids(value, wrong),)
    if len(value) > MAX_PROMPTS:
        raise _invalid("prompt", f"at most {MAX_PROMPTS} prompts are allowed")
    if isinstance(value[0], str):
        if not all(isinstance(item, str) for item in value):
            raise wrong
        return tuple(value)
    return tuple(_token_ids(item, wrong) for item in value)


def _token_ids(value: object, wrong: BadRequest) -> tuple[int, ...]:
    # `type(...) is int` and not isinstance: True is no token id.
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise wrong
    if not value:
        raise _invalid("prompt", "must not be empty")
    return tuple(value)


def _ids(value: object, info: ValidationInfo) -> tuple[int, ...]:
    # Not pydantic's own list of numbers: it writes down what is wrong with each of a million.
    if not isinstance(value, list | tuple):
        raise _invalid(str(info.field_name), "must be a list of token ids", "invalid_type")
    for i, item in enumerate(value):
        if type(item) is not int:
            raise _invalid(f"{info.field_name}[{i}]", "must be a token id", "invalid_type")
        if not 0 <= item < 2**32:
            raise _invalid(f"{info.field_name}[{i}]", "must be a token id")
    return tuple(dict.fromkeys(value))


_Ids = Annotated[tuple[int, ...], PlainValidator(_ids)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


class GenerationRequest(_Strict):
    """What chat and completion requests share. None always means: not given (or null)."""

    model: str = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    stop_token_ids: _Ids = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[int, float] | None, PlainValidator(_logit_bias)] = None
    allowed_token_ids: _Ids | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int = Field(0, gt=-_INT32, lt=_INT32)
    cache_salt: str | None = Field(None, min_length=1, max_length=4096)
    request_id: str | None = Field(None, min_length=1, max_length=256)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of the stream carries the usage so far."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def output_limit(self) -> int | None:
        """Most new tokens the client wants; None: as many as fit."""
        return self.max_tokens

    @property
    def output_limit_param(self) -> str:
        """Name of the field that `output_limit` came from."""
        return "max_tokens"

    @property
    def prompt_param(self) -> str:
        """Name of the field that holds the prompt."""
        return "prompt"

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Alternatives wanted at each position; 0: only the chosen token; None: nothing."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "only allowed when 'stream' is true")
        return self


class ChatRequest(GenerationRequest):
    """A body of POST /v1/chat/completions."""

    messages: Annotated[tuple[Message, ...], PlainValidator(parse_messages)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_template_kwargs)] = Field(
        default_factory=dict
    )
    """For the template; `reasoning_effort`, when given, is among them."""

    @property
    def output_limit(self) -> int | None:
        """`max_completion_tokens`, or else the older `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_param(self) -> str:
        """Name of the field that `output_limit` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def prompt_param(self) -> str:
        """Name of the field that holds the prompt."""
        return "messages"

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives wanted at each position; 0: only the chosen token; None: nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _invalid("top_logprobs", "only allowed when 'logprobs' is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise _invalid(
                "continue_final_message", "can't be true together with 'add_generation_prompt'"
            )
        return self


class CompletionRequest(GenerationRequest):
    """A body of POST /v1/completions. Choice index = prompt index * n + i."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    """One entry for each prompt: text, or token ids."""
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    """Text of the prompt goes before each choice's text (never together with logprobs)."""
    add_special_tokens: bool = True

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives wanted at each position; 0: only the chosen token; None: nothing."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.n * len(self.prompt) > MAX_CHOICES:
            raise _invalid("n", f"at most {MAX_CHOICES} choices of all prompts are allowed")
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "'echo' together with 'logprobs' is not supported yet.",
                param="echo",
                code="unsupported_parameter",
            )
        if self.best_of is not None and self.best_of != self.n:
            raise BadRequest(
                "'best_of' other than 'n' is not supported yet.",
                param="best_of",
                code="unsupported_parameter" if self.best_of > self.n else "invalid_value",
            )
        return self


def parse_chat(body: bytes) -> ChatRequest:
    """The request in a body. Raises BadRequest for whatever is wrong with it."""
    fields = _given(body)
    refuse_unsupported(fields, chat=True)
    if fields.get("continue_final_message") is True:
        fields.setdefault("add_generation_prompt", False)
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise _invalid("reasoning_effort", "must be text", "invalid_type")
        kwargs = fields.get("chat_template_kwargs", {})
        if isinstance(kwargs, dict):
            fields["chat_template_kwargs"] = {"reasoning_effort": effort, **kwargs}
    return _validated(ChatRequest, fields)


def parse_completion(body: bytes) -> CompletionRequest:
    """The request in a body. Raises BadRequest for whatever is wrong with it."""
    fields = _given(body)
    refuse_unsupported(fields, chat=False)
    return _validated(CompletionRequest, fields)


def _given(body: bytes) -> dict[str, Any]:
    return {key: value for key, value in parse_object(body).items() if value is not None}


_Request = TypeVar("_Request", bound=GenerationRequest)


def _validated(cls: type[_Request], fields: dict[str, Any]) -> _Request:
    try:
        return cls.model_validate(fields)
    except ValidationError as exc:
        raise _bad_request(exc) from None


def _bad_request(exc: ValidationError) -> BadRequest:
    """The first error in OpenAI's words: what would be right, never what was sent."""
    error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for step in error["loc"]:
        param = child_path(param, step)
    if error["type"] == "missing":
        return BadRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    right = error["msg"].removeprefix("Input ")
    kind = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    return _invalid(param, right[:1].lower() + right[1:], kind)
