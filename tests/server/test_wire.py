"""Frames and bodies: what is accepted, what is refused and how, and that nothing else happens."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hillstar.server.errors import ApiError
from hillstar.server.items import MAX_PARTS, Message
from hillstar.server.request import CreateResponse, HillstarOptions, Surface, parse_create
from hillstar.server.validate import decode_object
from hillstar.server.wire import (
    AckEvent,
    CancelEvent,
    CreateEvent,
    FrameError,
    HibernateEvent,
    HintEvent,
    Protocol,
    ResumeEvent,
    SteerEvent,
    WakeEvent,
    parse_client_frame,
)


def create(surface: Surface = "http", **fields: Any) -> CreateResponse:
    return parse_create({"input": "hi", **fields}, surface=surface)


def refusal(surface: Surface = "http", **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        create(surface, **fields)
    return caught.value


def frame_error(data: str | bytes, protocol: Protocol = Protocol.JSON) -> FrameError:
    with pytest.raises(FrameError) as caught:
        parse_client_frame(data, protocol)
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


@pytest.mark.parametrize(
    ("frame", "event"),
    [
        ({"type": "response.cancel", "response_id": "r"}, CancelEvent("r")),
        (
            {"type": "hillstar.resume", "response_id": "r", "starting_after": 4, "stream_id": "a"},
            ResumeEvent("r", 4, "a"),
        ),
        (
            {"type": "hillstar.resume", "response_id": "r", "starting_after": None},
            ResumeEvent("r"),
        ),
        (
            {"type": "hillstar.ack", "response_id": "r", "sequence_number": 9},
            AckEvent("r", 9),
        ),
        (
            {"type": "hillstar.hint", "conversation": "c", "hint": "typing"},
            HintEvent("typing", "c"),
        ),
        ({"type": "hillstar.hibernate", "conversation": "c"}, HibernateEvent("c")),
        ({"type": "hillstar.wake", "conversation": "c"}, WakeEvent("c")),
        (
            {"type": "response.steer", "previous_response_id": "r", "input": "go"},
            SteerEvent("r", (Message("user", ("go",)),)),
        ),
    ],
)
def test_client_events(frame: dict[str, Any], event: object) -> None:
    """Each client event parses to its value, the same from JSON text and from msgpack."""
    assert parse_client_frame(json.dumps(frame), Protocol.JSON) == event
    assert parse_client_frame(msgspec.msgpack.encode(frame), Protocol.MSGPACK) == event


def test_create_event_carries_its_lane() -> None:
    """`response.create` is the HTTP body, flat, with a lane beside it."""
    frame = {"type": "response.create", "stream_id": "a.b-c_1", "input": "hi"}
    event = parse_client_frame(json.dumps(frame), Protocol.OPENAI)
    assert event == CreateEvent("a.b-c_1", create("socket"))


def test_our_events_need_our_subprotocol() -> None:
    """On OpenAI's socket nothing but OpenAI's events exists."""
    frame = json.dumps({"type": "hillstar.wake", "conversation": "c", "stream_id": "a"})
    error = frame_error(frame, Protocol.OPENAI)
    assert (error.code, error.param, error.stream_id) == ("unknown_event", "type", "a")


@pytest.mark.parametrize("lane", ["", "a b", "é", "x" * 257, 5, ["a"], "a\n"])
def test_bad_lanes(lane: object) -> None:
    """A lane is 1 to 256 of A-Z a-z 0-9 _ . - and an error about it goes to no lane."""
    frame = {"type": "response.create", "input": "hi", "stream_id": lane}
    error = frame_error(json.dumps(frame))
    assert (error.code, error.param, error.stream_id) == ("invalid_stream_id", "stream_id", None)


def test_errors_carry_the_lane() -> None:
    """An error in a frame whose lane could be read names that lane."""
    frame = {"type": "response.create", "stream_id": "a", "temperature": 9, "input": "x"}
    error = frame_error(json.dumps(frame))
    assert (error.param, error.stream_id) == ("temperature", "a")


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "[]",
        "null",
        "5",
        "{} {}",
        '{"type": NaN}',
        '{"type": 1e999}',
        '{"type": "\\ud800"}',
        '{"type": "\\ud800\\u0041"}',
        '{"type": "\\udc00"}',
        '{"type": null}',
        '{"type": []}',
        "[" * 200_000,
        '{"a":' * 200_000,
        b"\xff\xfe",
        "9" * 10_000,
    ],
)
def test_malformed_json(data: str | bytes) -> None:
    """Whatever is not a frame is refused as a typed 400."""
    assert frame_error(data).status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\x90\x01",
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xa3\xed\xa0\x80",
        b"\x81\xa4type\xd6\xff\x00\x00\x00\x01",
        b"\x82\x01\x02\xa4type\xafresponse.create",
    ],
)
def test_malformed_msgpack(data: bytes) -> None:
    """The same of msgpack: lying lengths, unhashable keys, timestamps, keys that are no strings."""
    assert frame_error(data, Protocol.MSGPACK).status == 400


def test_msgpack_sockets_take_binary_frames_only() -> None:
    """A text frame on a msgpack socket is refused."""
    assert frame_error("{}", Protocol.MSGPACK).code == "invalid_msgpack"


NAMES = st.sampled_from([*CreateResponse.__struct_fields__, "text", "tools", "reasoning", "type"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(NAMES | st.text(max_size=5), JSON_VALUES, max_size=6) | JSON_VALUES)
@example(body={"input": "\ud800"})
@example(body={"hillstar": {"`$.a`\n": 1}})
@example(body={5: 6})
def test_any_body_is_a_request_or_a_typed_error(body: object) -> None:
    """parse_create raises ApiError and nothing else, whatever the body."""
    for surface in ("http", "socket", "hillstar"):
        try:
            request = parse_create(body, surface=surface)
        except ApiError as error:
            json.dumps(error.body()).encode()
        else:
            assert isinstance(request, CreateResponse)


KINDS = st.sampled_from(
    [
        "response.create",
        "response.cancel",
        "response.steer",
        "hillstar.resume",
        "hillstar.ack",
        "hillstar.hint",
        "hillstar.hibernate",
        "hillstar.wake",
    ]
)
FIELDS = st.sampled_from(
    [
        "response_id",
        "starting_after",
        "stream_id",
        "sequence_number",
        "conversation",
        "hint",
        "input",
    ]
)


@given(
    kind=KINDS, fields=st.dictionaries(FIELDS | NAMES, JSON_VALUES, max_size=5), data=st.binary()
)
def test_any_frame_is_an_event_or_a_typed_error(
    kind: str, fields: dict[str, Any], data: bytes
) -> None:
    """parse_client_frame raises FrameError and nothing else, whatever the bytes."""
    frame = {"type": kind, **fields}
    packed = msgspec.msgpack.encode(frame) if _is_packable(frame) else data
    for given_data, protocol in (
        (data, Protocol.JSON),
        (data, Protocol.MSGPACK),
        (packed, Protocol.MSGPACK),
        (packed[:-1], Protocol.MSGPACK),
        (json.dumps(frame, default=str), Protocol.JSON),
    ):
        try:
            parse_client_frame(given_data, protocol)
        except FrameError as error:
            assert error.status == 400


def _is_packable(frame: object) -> bool:
    try:
        msgspec.msgpack.encode(frame)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@given(data=st.binary() | st.text())
def test_any_http_body_decodes_or_is_a_typed_error(data: str | bytes) -> None:
    """decode_object raises ApiError and nothing else."""
    try:
        assert isinstance(decode_object(data), dict)
    except ApiError as error:
        assert error.status == 400
