import json
import tracemalloc
from typing import Any

import pytest

from services.gateway.core.messages import Message
from services.gateway.core.openai import ChatRequest, parse_chat, parse_completion
from services.gateway.errors import BadRequest, Unsupported

HI = [{"role": "user", "content": "hi"}]
SECRET = "my-secret-prompt"


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": HI, "max_tokens": 4, **fields}
    return parse_chat(json.dumps(body).encode())


def raw_chat(more: str) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + more.encode() + b"}"


def completion(**fields: Any):
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def refused(call, *args, **fields) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call(*args, **fields)
    error = caught.value
    assert error.status == 400
    assert error.body()["error"]["type"] == "invalid_request_error"
    assert SECRET not in json.dumps(error.body())
    return error


@pytest.mark.parametrize(
    "body",
    [
        f'{{"model": "x", "messages": ["{SECRET}"'.encode(),
        b"",
        b"[]",
        b'"hi"',
        b"null",
        b"1",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"model": "m"}',
        '{"model": "m"}'.encode("utf-16"),
    ],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_cases_1_2_what_is_no_object_is_refused(parse, body: bytes) -> None:
    assert refused(parse, body).code == "invalid_json"


def test_case_3_invalid_utf8() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}'
    assert "UTF-8" in refused(parse_chat, body).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x \ud83d y"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udcf0"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages[0].name"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "\udfff"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"stop": ["a", "\ud83d"], "stream": True}, "stop[1]"),
        ({"stop": "\ude00\ud83d"}, "stop"),
        ({"user": "\ud83d"}, "user"),
        ({"unknown": {"deep": ["\ud83d"]}}, "unknown.deep[0]"),
        ({"chat_template_kwargs": {"\ud83d": 1}}, "chat_template_kwargs"),
        ({"model": "\ud83d"}, "model"),
    ],
)
def test_case_4_a_lone_surrogate_is_refused_and_named(fields, param: str) -> None:
    error = refused(chat, **fields)
    assert error.param == param
    assert "surrogate" in error.message
    error.message.encode()


def test_case_4_in_a_prompt() -> None:
    assert refused(completion, prompt="\udcf0").param == "prompt"
    assert refused(completion, prompt=["a", "\udcf0"]).param == "prompt[1]"


def test_case_4_a_pair_of_surrogates_is_a_character() -> None:
    body = raw_chat('"stop":"\\ud83d\\ude00"')
    assert parse_chat(body).stop == ("😀",)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "unknown"])
def test_case_8_numbers_are_finite(field: str, number: str) -> None:
    assert refused(parse_chat, raw_chat(f'"{field}":{number}')).param == field


@pytest.mark.parametrize("messages", [[], None, "hi", {}, 5])
def test_case_16_messages_must_be_a_list_of_some(messages) -> None:
    assert refused(chat, messages=messages).param == "messages"
    assert refused(parse_chat, b'{"model":"m"}').param == "messages"


def test_case_17_only_an_assistant_message() -> None:
    messages = [{"role": "assistant", "content": "Hello"}]
    assert chat(messages=messages).messages == (Message("assistant", "Hello"),)


def test_case_18_developer_is_a_role() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    assert chat(messages=messages).messages[0] == Message("developer", "Be brief.")


@pytest.mark.parametrize("role", ["banana", "", 5, ["user"], {"a": 1}, None])
def test_case_19_unknown_roles(role) -> None:
    error = refused(chat, messages=[{"role": role, "content": "a"}])
    assert error.param == "messages[0].role"
    assert "banana" not in error.message


def test_case_20_an_assistant_turn_of_tool_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ]
    )
    assert request.messages[1] == Message("assistant", None, tool_calls=(call,))
    assert request.messages[2] == Message("tool", "42", tool_call_id="c1")


def test_an_older_function_call_is_a_tool_call() -> None:
    message = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    (call,) = chat(messages=[*HI, message]).messages[1].tool_calls
    assert call == {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "function", "assistant"])
def test_case_22_null_content(role: str) -> None:
    messages = [*HI, {"role": "assistant", "content": "x"}, {"role": role, "content": None}]
    assert refused(chat, messages=messages).param == "messages[2].content"
    del messages[2]["content"]
    assert refused(chat, messages=messages).param == "messages[2].content"


def test_a_refusal_is_what_the_assistant_said() -> None:
    messages = [*HI, {"role": "assistant", "content": None, "refusal": "No."}]
    assert chat(messages=messages).messages[1].content == "No."


def test_case_24_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].content == ("a", "b")
    assert request.messages[0].text == "a\nb"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([], "messages[0].content"),
        (5, "messages[0].content"),
        ([5], "messages[0].content[0]"),
        ([{"type": "banana"}], "messages[0].content[0].type"),
        ([{"text": "a"}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "text", "text": 5}], "messages[0].content[0].text"),
        ([{"type": ["text"]}], "messages[0].content[0].type"),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            "messages[0].content[1].type",
        ),
    ],
)
def test_case_24_other_content(content, param: str) -> None:
    assert refused(chat, messages=[{"role": "user", "content": content}]).param == param


@pytest.mark.parametrize("value", [0, -1, 4.5, 4.0, "4", True, [], {}])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_case_26_limits_are_positive_integers(field: str, value) -> None:
    assert refused(chat, **{field: value}).param == field


def test_case_27_the_newer_limit_wins() -> None:
    assert chat(max_tokens=8, max_completion_tokens=2).output_limit == 2
    assert chat(max_tokens=8, max_completion_tokens=2).output_limit_param == "max_completion_tokens"
    assert chat(max_tokens=None).output_limit is None
    assert chat(max_tokens=8).output_limit == 8


@pytest.mark.parametrize("value", [0, 129, 1.5, "2", True])
def test_case_29_n(value) -> None:
    assert refused(chat, n=value, stream=True).param == "n"


def test_case_30_n_of_greedy_choices() -> None:
    assert chat(n=2, temperature=0).n == 2


def test_case_35_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    for options in ({"include_usage": False}, {}, None):
        assert not chat(stream=True, stream_options=options).include_usage
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(chat, stream=True, stream_options=[]).param == "stream_options"
    error = refused(chat, stream=True, stream_options={"include_usage": "yes"})
    assert error.param == "stream_options.include_usage"


@pytest.mark.parametrize("value", ["yes", 1, 0, [], {}])
def test_case_41_stream_is_a_boolean(value) -> None:
    assert refused(chat, stream=value).param == "stream"


@pytest.mark.parametrize(
    "bias", [{"-1": 5}, {"abc": 5}, {"1": "5"}, {"1": 101}, {"1": True}, {"1": None}, [1], {"": 1}]
)
def test_case_42_logit_bias(bias) -> None:
    assert refused(chat, logit_bias=bias).param == "logit_bias"


def test_logit_bias_is_of_ids() -> None:
    assert chat(logit_bias={"5": -100, "6": 1.5}).logit_bias == {5: -100.0, 6: 1.5}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", "x"),
        ("min_tokens", -1),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "1"),
        ("logprobs", 5),
        ("top_logprobs", 21),
        ("top_logprobs", 1),
        ("user", 5),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("priority", 2**31),
        ("priority", -(2**31)),  # routers are told the negative of it
        ("model", 5),
        ("model", ""),
        ("model", None),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"add_generation_prompt": False}),
        ("chat_template_kwargs", {"bos_token": "x"}),
        ("chat_template_kwargs", {"a b": 1}),
        ("reasoning_effort", 5),
        ("allowed_token_ids", [True]),
    ],
)
def test_values_out_of_bounds_are_named(field: str, value) -> None:
    error = refused(chat, **{field: value})
    assert error.param is not None
    assert error.param.split("[")[0] == field
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "banana"}),
        ("response_format", "text"),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("structured_outputs", {"choice": ["a"]}),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("best_of", 2),
        ("echo", True),
        ("prompt_logprobs", 1),
        ("bad_words", ["a"]),
        ("use_beam_search", True),
        ("chat_template", "{{ 1 }}"),
        ("documents", [{}]),
        ("truncate_prompt_tokens", 5),
        ("watermarking", True),
        ("regex", "a"),
        ("json_schema", "{}"),
    ],
)
def test_what_is_not_built_is_refused_and_never_ignored(field: str, value) -> None:
    error = refused(chat, **{field: value})
    assert isinstance(error, Unsupported)
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert "not supported yet" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", None),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("parallel_tool_calls", True),
        ("service_tier", "auto"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("no_such_field", {"x": [1, None]}),
        ("guided_json", None),
        ("length_penalty", 1.0),
        ("echo", False),
        ("stop", []),
        ("logprobs", None),
    ],
)
def test_what_asks_for_nothing_is_accepted(field: str, value) -> None:
    assert chat(**{field: value}) == chat()


def test_null_is_absent() -> None:
    names = [n for n in ChatRequest.model_fields if n not in ("model", "messages", "max_tokens")]
    assert chat(**dict.fromkeys(names)) == chat()


def test_continuing_the_final_message() -> None:
    assert not chat(continue_final_message=True).add_generation_prompt
    error = refused(chat, continue_final_message=True, add_generation_prompt=True)
    assert error.param == "continue_final_message"


def test_reasoning_effort_is_for_the_template() -> None:
    request = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert request.chat_template_kwargs == {"reasoning_effort": "low", "enable_thinking": False}


def test_logprobs_of_chat() -> None:
    assert chat().wanted_logprobs is None
    assert chat(logprobs=True).wanted_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).wanted_logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).wanted_logprobs is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts(prompt, prompts) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, [], [[]], 5, {}, [None], ["a", 1], [1, "a"], [1, True], [[1], "a"], [[1.5]]),
        *([True], [1.5], ["a"] * 2049),
    ],
)
def test_bad_prompts(prompt) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_completions_own_fields() -> None:
    assert completion(echo=True).echo
    assert completion(logprobs=0).wanted_logprobs == 0
    assert completion(n=2, best_of=2).n == 2
    assert refused(completion, echo=True, logprobs=1).param == "echo"
    assert refused(completion, best_of=2).param == "best_of"
    assert refused(completion, n=3, best_of=2).param == "best_of"
    assert refused(completion, suffix="x").param == "suffix"
    assert refused(completion, logprobs=21).param == "logprobs"
    assert refused(completion, logprobs=True).param == "logprobs"


def test_lengths_and_products_are_bounded() -> None:
    assert chat(stop="x" * 1024).stop == ("x" * 1024,)
    assert refused(chat, stop=["a", "x" * 1025]).param == "stop"
    assert completion(prompt=["a"] * 16, n=128).n == 128
    assert refused(completion, prompt=["a"] * 17, n=128).param == "n"


def test_one_wrong_entry_of_many_is_told_at_once() -> None:
    # Told one by one, these take half a gigabyte and seconds.
    tracemalloc.start()
    try:
        error = refused(chat, stop_token_ids=["a"] * 100_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.param == "stop_token_ids[0]" and peak < 20 << 20


def test_null_inside_stream_options_is_absent() -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert not chat(stream=True, stream_options=options).include_usage
