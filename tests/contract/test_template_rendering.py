"""Our rendering of chat templates against transformers' apply_chat_template, text and token ids."""

import json
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.gateway.adapters.tokenizer import Tokenizer
from services.gateway.core.messages import parse_messages
from services.gateway.core.template import ChatTemplate, ContentFormat
from services.gateway.errors import BadRequest
from tests.contract import templates, tokenizer_models
from tests.models import default_cache_dir, tiny_model

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": " Hi there! "}],
    "system": [
        {"role": "system", "content": "Be brief & <kind>."},
        {"role": "user", "content": "Grüße 😀"},
        {"role": "assistant", "content": " Hello. \n"},
        {"role": "user", "content": "<|im_end|> {{ 7 * 7 }} {% raw %}"},
    ],
    "only assistant": [{"role": "assistant", "content": "Hello"}],
    "two systems": [
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "hi"},
    ],
    "tools": [
        {"role": "user", "content": "6 * 7?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "c1",
                    "function": {"name": "mul", "arguments": {"a": 6, "b": "sieben <7> ü"}},
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ],
    "reasoning": [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "so", "reasoning_content": "\nhmm\n"},
    ],
}
KINDS: dict[str, Callable[[], str]] = {
    **{name: (lambda text=text: text) for name, text in templates.ALL.items()},
    "smollm2": lambda: (
        tokenizer_models.smollm2(default_cache_dir()) / "chat_template.jinja"
    ).read_text(),
    "tiny": lambda: json.loads(
        (tiny_model(default_cache_dir()) / "tokenizer_config.json").read_text()
    )["chat_template"],
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tokenizer_models.sentencepiece(tmp_path_factory.mktemp("t"))
    (folder / "chat_template.jinja").write_text(KINDS[request.param]())
    ours = Tokenizer.load(folder)
    yield ours, AutoTokenizer.from_pretrained(str(folder))
    ours.close()


def as_clients_send(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With tool call arguments as JSON text."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "kwargs": {"enable_thinking": False, "x": [1]}},
    ],
    ids=["generation", "plain", "continue", "kwargs"],
)
def test_renders_alike(both, name: str, options: dict[str, Any]) -> None:
    ours, theirs = both
    messages = CONVERSATIONS[name]
    options = dict(options)
    kwargs = options.pop("kwargs", {})
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options, **kwargs)
    except Exception:
        expected = None

    def render() -> str:
        return ours.render_chat(
            parse_messages(as_clients_send(messages)),
            now=datetime.now(),
            kwargs=kwargs,
            **options,
        )

    if expected is None:
        with pytest.raises(BadRequest):
            render()
        return
    assert render() == expected
    ids = theirs.apply_chat_template(
        messages, tokenize=True, return_dict=False, **options, **kwargs
    )
    assert ours.encode(expected, add_special_tokens=False) == ids


@pytest.mark.engine
def test_wants_content_in_the_form_that_the_engine_gives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates parts of itself while it is imported
        from vllm.renderers.hf import _detect_content_format
    forms = {"string": ContentFormat.TEXT, "openai": ContentFormat.PARTS}
    for name, source in KINDS.items():
        theirs = _detect_content_format(source(), default="string")
        assert ChatTemplate(source(), {}).content_format is forms[theirs], name


def test_case_24_parts_give_the_token_ids_of_text(both) -> None:
    ours, _ = both

    def ids(content: object) -> list[int]:
        text = ours.render_chat(
            parse_messages([{"role": "user", "content": content}]), now=datetime.now()
        )
        return ours.encode(text, add_special_tokens=False)

    assert ids([{"type": "text", "text": "Hi there"}]) == ids("Hi there")
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    source = ours._template
    assert ids(two) == ids("a\nb" if source.content_format is ContentFormat.TEXT else "ab")


def test_a_folder_without_template_says_so(tmp_path: Path) -> None:
    ours = Tokenizer.load(tokenizer_models.byte_level(tmp_path))
    assert not ours.has_chat_template
    with pytest.raises(BadRequest, match="no chat template"):
        ours.render_chat(parse_messages(CONVERSATIONS["user"]), now=datetime.now())
    ours.close()
