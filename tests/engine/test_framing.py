"""Messages and the configuration survive the trip through bytes."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.config import EngineConfig
from hillstar.engine.framing import (
    FrameReader,
    FramingError,
    decode_config,
    decode_from_engine,
    decode_to_engine,
    encode_config,
    encode_message,
    frame,
)
from hillstar.engine.messages import (
    Cancel,
    EngineStats,
    Finish,
    Frame,
    FromEngine,
    Output,
    Release,
    SamplingParams,
    Shutdown,
    Submit,
    ToEngine,
    TokenLogprobs,
    Usage,
    pack_ids,
)


def _payload(data: bytes) -> bytes:
    (payload,) = FrameReader().feed(data)
    return payload


@pytest.mark.parametrize(
    "message",
    [
        Submit(
            sequence_id="a",
            prompt_ids=pack_ids([1, 2]),
            params=SamplingParams(max_tokens=3, logit_bias={4: -1.5}, stop_token_ids=(7, 8)),
            salt=b"\x00\xff",
            lease_id="b",
        ),
        Cancel("a", 3),
        Release("a", True),
        Shutdown(),
    ],
)
def test_messages_to_the_engine_come_back_as_they_were(message: ToEngine) -> None:
    """Encoding and decoding is the identity."""
    assert decode_to_engine(_payload(encode_message(message))) == message


def test_a_frame_of_outputs_comes_back_as_it_was() -> None:
    """With logprobs and a finish, as the engine sends it every step."""
    output = Output("a", 3, [5], [TokenLogprobs(-0.5, [(5, -0.5)])], Finish("stop", Usage(1, 2, 3)))
    message: FromEngine = Frame([output], EngineStats(running=1, step_seconds=[0.5]))
    assert decode_from_engine(_payload(encode_message(message))) == message


def test_the_configuration_comes_back_as_it_was() -> None:
    """Paths included."""
    config = EngineConfig(model_dir=Path("/models/x"), model_name="x", num_blocks=9)
    assert decode_config(_payload(encode_config(config))) == config


@pytest.mark.parametrize("changes", [{"block_size": 7}, {"model_dir": 5}, {"num_blocks": None}])
def test_a_configuration_is_validated(changes: dict[str, object]) -> None:
    """What EngineConfig does not allow does not decode."""
    values = {"model_dir": "/models/x", "model_name": "x", "num_blocks": 9, **changes}
    with pytest.raises(msgspec.DecodeError):
        decode_config(msgspec.msgpack.encode(values))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 17))
def test_payloads_are_the_same_however_the_stream_is_cut(payloads: list[bytes], piece: int) -> None:
    """The reader yields every payload once, in order."""
    stream = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader()
    received: list[bytes] = []
    for start in range(0, len(stream), piece):
        received += reader.feed(stream[start : start + piece])
    assert received == payloads


def test_a_length_above_the_limit_is_an_error() -> None:
    """A reader never waits for a frame that it would not take."""
    reader = FrameReader(max_frame_bytes=10)
    assert list(reader.feed(frame(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(FramingError):
        list(reader.feed(frame(b"x" * 11)[:4]))
