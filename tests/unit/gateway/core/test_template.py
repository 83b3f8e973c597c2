from datetime import datetime

import pytest

from services.gateway.core.messages import Message
from services.gateway.core.template import ChatTemplate, ContentFormat
from services.gateway.errors import BadRequest
from tests.contract import templates

NOW = datetime(2024, 2, 29, 12)
SECRET = "my-secret-prompt"


def render(source: str, *messages: Message, **options) -> str:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, special).render(messages, now=NOW, **options)


USER = Message("user", "hi")
DEVELOPER = Message("developer", "Be brief.")


def test_case_18_developer_is_system_where_the_template_does_not_know_it() -> None:
    assert render(templates.CHATML, DEVELOPER, USER) == render(
        templates.CHATML, Message("system", "Be brief."), USER
    )


def test_case_18_developer_stays_where_the_template_knows_it() -> None:
    text = render(templates.KNOWS_DEVELOPER, DEVELOPER, USER)
    assert text == "# Instructions\nBe brief.\nuser: hi\n"


@pytest.mark.parametrize("source", [templates.LLAMA3, templates.QWEN, templates.MISTRAL])
def test_case_18_developer_is_never_dropped(source: str) -> None:
    system = Message("system", "Be kind.")
    for messages in (
        [system, DEVELOPER, USER],
        [USER, Message("assistant", "yo"), DEVELOPER, USER],
    ):
        text = render(source, *messages)
        assert "Be brief." in text
        assert ("Be kind." in text) == (system in messages)


@pytest.mark.parametrize("source", [templates.NO_SYSTEM, templates.DROPS_SYSTEM])
def test_case_18_a_template_without_place_for_it_says_so(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(source, DEVELOPER, USER)
    assert caught.value.param == "messages"


def test_case_20_an_assistant_turn_without_content_is_kept() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "<ü>"}'}}
    turn = Message("assistant", None, tool_calls=(call,))
    text = render(templates.QWEN, USER, turn, Message("tool", "42"))
    assert '{"name": "f", "arguments": {"a": "<ü>"}}' in text
    assert "42" in text
    assert "<|im_start|>assistant\n<|im_end|>" in render(templates.CHATML, USER, turn)


def test_arguments_that_are_no_object_stay_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{broken"}}
    assert "{broken" in render(templates.QWEN, USER, Message("assistant", None, tool_calls=(call,)))


def test_case_17_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(BadRequest, match="Roles must alternate") as caught:
        render(templates.MISTRAL, Message("assistant", "Hello"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.at_all }}",
        "{{ messages[0].content + 5 }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.x }}",
        "{{ messages[0].content | int(base='x') | tojson(indent=messages) }}",
        "{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.x() }}",
        "{{ ('%' ~ messages[0].content) % () }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault_and_tells_no_text(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(source, Message("user", SECRET))
    assert SECRET not in caught.value.message


def test_the_sandbox_holds() -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{{ strftime_now.__globals__ }}{{ raise_exception.__globals__.x() }}",
    ):
        with pytest.raises(BadRequest):
            render(source, USER)


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(ValueError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_text_in_messages_is_never_template() -> None:
    assert "{{ 7 * 7 }}" in render(templates.CHATML, Message("user", "{{ 7 * 7 }}"))


def test_the_date_is_the_callers() -> None:
    assert "Today: 29 Feb 2024" in render(templates.LLAMA3, USER)
    assert "Today: never" in render(templates.LLAMA3, USER, kwargs={"date_string": "never"})


def test_case_24_parts_and_text() -> None:
    both = Message("user", ("a", "b"))
    assert ">user\na\nb<" in render(templates.CHATML, both)
    assert "<|user|>ab<|end|>" in render(templates.PARTS, both)
    assert render(templates.PARTS, USER) == render(templates.PARTS, Message("user", ("hi",)))


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "text"),
        (
            "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
            "parts",
        ),
        (
            "{% for m in messages[1:] %}{% set x = m['content'] %}"
            "{% for c in x | list %}{{ c }}{% endfor %}{% endfor %}",
            "parts",
        ),
        ("{% for c in messages[0].content %}{{ c.text }}{% endfor %}", "parts"),
        ("{% set first = messages[0] %}{% for c in first.content %}{{ c }}{% endfor %}", "parts"),
        (
            "{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}",
            "text",
        ),
        ("{% for t in tools %}{% for c in t.content %}{{ c }}{% endfor %}{% endfor %}", "text"),
        (
            "{% for m in messages %}"
            "{% for w in m.content.split('x') %}{{ w }}{% endfor %}{% endfor %}",
            "text",
        ),
    ],
)
def test_content_format(source: str, form: str) -> None:
    assert ChatTemplate(source, {}).content_format is ContentFormat(form)


def test_continuing_the_final_message() -> None:
    start = Message("assistant", "The answer is ")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(templates.CHATML, USER, start, **options).endswith("assistant\nThe answer is ")
    # This template trims.
    assert render(templates.LLAMA3, USER, start, **options).endswith("The answer is")
    assert render(templates.PARTS, USER, start, **options).endswith("The answer is ")
    with pytest.raises(BadRequest) as caught:
        render(templates.DROPS_SYSTEM, Message("tool", "x"), **options)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(BadRequest):
        render(templates.PARTS, USER, Message("assistant", None, reasoning_content="x"), **options)
