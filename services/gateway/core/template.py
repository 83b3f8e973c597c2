"""Chat templates: messages to the one string that the model was trained to read.

The environment (sandbox, extensions, filters, globals) is that of transformers'
apply_chat_template, and the rendered text is equal to it (a contract test holds it to that). On
top of it stands what OpenAI's API promises and templates don't know: content as a list of parts,
tool call arguments as JSON text, the role `developer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.core.messages import Message, with_roles
from services.gateway.core.template_format import loops_over_content
from services.gateway.errors import BadRequest

# What a template's own code may raise on messages it was not made for.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ContentFormat(StrEnum):
    """In which form a template wants a message's content."""

    TEXT = "text"
    PARTS = "parts"


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model writes, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare body: it opens a scope, and templates are written to that.
        call = self.call_method("_as_it_is")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class ChatTemplate:
    """A model's own Jinja template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        """`special_tokens` maps "bos_token", "eos_token" ... to text.

        Raises ValueError when the source is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ValueError(f"the chat template is invalid at line {exc.lineno}: {exc}") from exc
        self._special_tokens = dict(special_tokens)
        self._source = source
        self.content_format = (
            ContentFormat.PARTS if loops_over_content(tree) else ContentFormat.TEXT
        )
        self._knows_developer = any(
            node.value == "developer" for node in tree.find_all(jinja2.nodes.Const)
        )

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

        def render(chosen: Sequence[Message]) -> str:
            return self._render(
                chosen, now, add_generation_prompt, continue_final_message, kwargs or {}
            )

        if self._knows_developer or all(m.role != "developer" for m in messages):
            return render(messages)
        return self._render_developer(messages, render)

    def _render_developer(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> str:
        """As system messages; if the template takes those only in front, as one in front."""
        texts = [m.text.strip() for m in messages if m.role == "developer"]
        as_system = with_roles(messages, "developer", "system")
        refusal: BadRequest | None = None
        try:
            prompt = render(as_system)
            if all(text in prompt for text in texts):
                return prompt
        except BadRequest as exc:
            refusal = exc
        merged = "\n\n".join(m.text for m in as_system if m.role == "system")
        front = Message("system", merged)
        prompt = render([front, *(m for m in as_system if m.role != "system")])
        if all(text in prompt for text in texts):
            return prompt
        raise refusal or BadRequest(
            "This model's chat template has no place for developer or system messages.",
            param="messages",
        )

    def _render(
        self,
        messages: Sequence[Message],
        now: datetime,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        conversation = [self._for_template(message) for message in messages]
        final = _mark_end(conversation[-1]) if continue_final_message else ""
        variables = {**self._special_tokens, "tools": None, "documents": None, **kwargs}
        try:
            prompt = self._template.render(
                variables,
                messages=conversation,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
            )
        except _TEMPLATE_FAULTS as exc:
            raise BadRequest(_why(exc), param="messages") from exc
        return _cut_at_mark(prompt, final) if continue_final_message else prompt

    def _for_template(self, message: Message) -> dict[str, Any]:
        shown: dict[str, Any] = {"role": message.role, "content": self._content(message)}
        if message.name is not None:
            shown["name"] = message.name
        if message.tool_calls:
            shown["tool_calls"] = [_parsed_arguments(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            shown["tool_call_id"] = message.tool_call_id
        if message.reasoning_content is not None:
            shown["reasoning_content"] = message.reasoning_content
        return shown

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if self.content_format is ContentFormat.TEXT:
            return message.text
        content = message.content
        parts = (content,) if isinstance(content, str) else content or ()
        return [{"type": "text", "text": text} for text in parts]


def _parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates want arguments as an object; clients send JSON text.

    Text that is no JSON object is what a model once wrote; refusing it would end the conversation,
    so it stays as it is.
    """
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(message: dict[str, Any]) -> str:
    """Puts the tag behind the message's text and returns the text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _TAG
        return content
    if not content:
        raise BadRequest(
            "'continue_final_message' needs a final message with text.",
            param="continue_final_message",
        )
    text: str = content[-1]["text"]
    content[-1] = {"type": "text", "text": text + _TAG}
    return text


def _cut_at_mark(prompt: str, final: str) -> str:
    """The prompt up to the end of the final message, without what the template writes behind it."""
    at = prompt.rfind(_TAG.strip())
    if at < 0 or final.strip() not in prompt:
        raise BadRequest(
            "This model's chat template does not show the final message as it is, so that it "
            "can't be continued.",
            param="continue_final_message",
        )
    cut = prompt[:at]
    # A template that trims the message has trimmed the tag's own blank, and the text's end with it.
    return cut if prompt.startswith(_TAG, at) else cut.rstrip()


def _why(exc: BaseException) -> str:
    # Only raise_exception's own words are for clients; others may quote what the messages held.
    if type(exc) is jinja2.TemplateError and exc.message:
        return f"The model's chat template refuses these messages: {exc.message[:300]}"
    return "The model's chat template can't render these messages."
