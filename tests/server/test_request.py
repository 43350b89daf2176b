"""A create's body: what is accepted, what is refused and how."""

from typing import Any

import msgspec
import pytest

from hillstar.server.errors import ApiError
from hillstar.server.items import MAX_PARTS, Message
from hillstar.server.request import CreateResponse, HillstarOptions, Surface, parse_create


def create(surface: Surface = "http", **fields: Any) -> CreateResponse:
    return parse_create({"input": "hi", **fields}, surface=surface)


def refusal(surface: Surface = "http", **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        create(surface, **fields)
    return caught.value


def test_defaults() -> None:
    """A bare input is a user's message, and everything else has OpenAI's defaults."""
    request = create()
    assert request.input == (Message("user", ("hi",)),)
    assert (request.store, request.temperature, request.top_p) == (True, 1.0, 1.0)
    assert request.max_output_tokens is None
    assert request.on_disconnect == "continue"
    assert create(store=False).on_disconnect == "cancel"
    assert create(hillstar={"on_disconnect": "pause"}).on_disconnect == "pause"


def test_null_is_the_default() -> None:
    """A documented field that is null is as good as absent."""
    body = dict.fromkeys(CreateResponse.__struct_fields__)
    del body["generate"]  # a socket's
    request = parse_create({**body, "input": "hi", "tools": None, "text": None}, surface="http")
    assert request == create()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": "a"}, Message("user", ("a",))),
        ({"type": "message", "role": "system", "content": "a"}, Message("system", ("a",))),
        (
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            Message("developer", ("a",)),
        ),
        (
            {
                "id": "msg_1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                    {"type": "output_text", "text": "b"},
                ],
            },
            Message("assistant", ("a", "b")),
        ),
    ],
)
def test_message_shapes(item: dict[str, Any], message: Message) -> None:
    """Messages are taken in every shape that OpenAI's clients send, our own output included."""
    assert create(input=[item]).input == (message,)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": 5}, "invalid_type", "input"),
        ({"input": [5]}, "invalid_type", "input[0]"),
        ({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
        ({"input": [{"content": "a"}]}, "missing_required_parameter", "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "invalid_value", "input[0].role"),
        (
            {"input": [{"role": "user", "content": "a", "colour": 1}]},
            "unknown_parameter",
            "input[0].colour",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]},
            "unsupported_parameter",
            "input[0].type",
        ),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "unsupported_parameter",
            "input[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "missing_required_parameter",
            "input[0].content[0].text",
        ),
        (
            {"input": [{"role": "user", "content": "a"}] * (MAX_PARTS + 1)},
            "invalid_value",
            "input",
        ),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2100}]
                * 2
            },
            "invalid_value",
            "input[1].content",
        ),
        ({"input": None}, "missing_required_parameter", "input"),
        ({"model": 5}, "invalid_type", "model"),
        ({"temperature": 2.5}, "invalid_value", "temperature"),
        ({"temperature": float("nan")}, "invalid_value", "temperature"),
        ({"temperature": True}, "invalid_type", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        (
            {
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 20,
                "max_output_tokens": 1561,
            },
            "invalid_value",
            "max_output_tokens",
        ),
        ({"max_output_tokens": 1 << 80}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": "9"}, "invalid_type", "max_output_tokens"),
        ({"presence_penalty": -3}, "invalid_value", "presence_penalty"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata[...]"),
        ({"metadata": {"k" * 65: "v"}}, "invalid_value", "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "invalid_value", "metadata"),
        ({"text": {"format": {"type": "json_object"}}}, "unsupported_parameter", "text.format"),
        ({"text": {"size": 1}}, "unknown_parameter", "text.size"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"reasoning": {"effort": "low"}}, "unsupported_parameter", "reasoning.effort"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"include": ["reasoning.encrypted_content"]}, "unsupported_parameter", "include"),
        ({"include": ["hillstar.session"]}, "unsupported_parameter", "include"),
        ({"service_tier": "gold"}, "invalid_value", "service_tier"),
        ({"conversation": {"name": "c"}}, "unknown_parameter", "conversation.name"),
        ({"conversation": {}}, "missing_required_parameter", "conversation.id"),
        (
            {"conversation": "c", "previous_response_id": "r"},
            "mutually_exclusive_parameters",
            "previous_response_id",
        ),
        ({"generate": False}, "unknown_parameter", "generate"),
        ({"colour": None}, "unknown_parameter", "colour"),
        ({"hillstar": []}, "invalid_type", "hillstar"),
        ({"hillstar": {"colour": 1}}, "unknown_parameter", "hillstar.colour"),
        ({"hillstar": {"seed": -1}}, "invalid_value", "hillstar.seed"),
        ({"hillstar": {"stop": ["a", ""]}}, "invalid_value", "hillstar.stop[1]"),
        ({"hillstar": {"stop": ["a"] * 17}}, "invalid_value", "hillstar.stop"),
        ({"hillstar": {"on_disconnect": "wait"}}, "invalid_value", "hillstar.on_disconnect"),
        ({"hillstar": {"draft": "eagle"}}, "unsupported_parameter", "hillstar.draft"),
        (
            {"hillstar": {"min_tokens": 5}, "max_output_tokens": 4},
            "invalid_value",
            "hillstar.min_tokens",
        ),
    ],
)
def test_refusals_name_the_parameter(fields: dict[str, Any], code: str, param: str) -> None:
    """Every refusal is a 400 whose code and parameter say what is wrong."""
    error = refusal(**fields)
    assert (error.status, error.code, error.param) == (400, code, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "shown", "allowed"),
    [
        ({"temperature": 2.5}, "2.5", "<= 2.0"),
        ({"hillstar": {"on_disconnect": "wait"}}, "'wait'", "'cancel', 'continue', 'pause'"),
        ({"input": [{"role": "tool", "content": "a"}]}, "'tool'", "'user'"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
    ],
)
def test_refusals_show_the_value_and_the_range(
    fields: dict[str, Any], shown: str, allowed: str
) -> None:
    """A message holds the offending value and what is allowed instead."""
    message = refusal(**fields).message
    assert shown in message
    assert allowed in message


def test_harmless_fields_are_taken() -> None:
    """What OpenAI documents and cannot change the answer is accepted, and kept where it echoes."""
    request = create(
        metadata={"a": "b"},
        safety_identifier="s",
        user="u",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "implicit"},
        service_tier="flex",
        parallel_tool_calls=False,
        max_tool_calls=3,
        stream_options={"include_obfuscation": False},
        tools=[],
        tool_choice="none",
        truncation="disabled",
        reasoning={"effort": None},
        text={"format": {"type": "text"}, "verbosity": "medium"},
    )
    assert (request.metadata, request.user, request.tool_choice) == ({"a": "b"}, "u", "none")
    assert (request.max_tool_calls, request.parallel_tool_calls) == (3, False)


def test_hillstar_options() -> None:
    """The `hillstar` object is validated field by field; one stop string may come bare."""
    options = create(hillstar={"seed": 7, "stop": "END", "top_k": 40, "min_p": None}).hillstar
    assert options == HillstarOptions(seed=7, stop=("END",), top_k=40)


def test_surfaces_differ_only_where_documented() -> None:
    """`generate` is a socket's, `hillstar.session` our subprotocol's, `background` HTTP's."""
    assert create("socket", generate=False).generate is False
    assert create("hillstar", include=["hillstar.session"]).include == ("hillstar.session",)
    assert create("http", background=True).background
    assert refusal("socket", background=True).param == "background"
    assert refusal("socket", include=["hillstar.session"]).param == "include"


def test_a_continuation_needs_no_input() -> None:
    """Only a request that starts a conversation must say something."""
    assert parse_create({"previous_response_id": "resp_1"}, surface="http").input == ()
    assert parse_create({"conversation": {"id": "c"}}, surface="http").conversation == "c"
    with pytest.raises(ApiError, match="input"):
        parse_create({}, surface="http")


def test_a_request_survives_storage() -> None:
    """A request read back from msgpack by type is the same value."""
    request = create(metadata={"a": "b"}, hillstar={"stop": ["x"], "seed": 1}, temperature=0)
    stored = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(stored, type=CreateResponse) == request
