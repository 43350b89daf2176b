"""Rates, connection counts and lanes."""

import pytest

from hillstar.server.errors import ApiError
from hillstar.server.lanes import Lanes
from hillstar.server.limits import ConnectionLimit, CreateRate, SocketLimits


def test_connections_are_counted_and_refused() -> None:
    """The connection too many is refused as retryable; one that ends makes room."""
    limit = ConnectionLimit(1)
    with limit:
        assert limit.num_open == 1
        with pytest.raises(ApiError) as refusal, limit:
            pass
        assert refusal.value.code == "websocket_connection_limit_reached"
        assert refusal.value.retryable
    assert limit.num_open == 0
    with limit:
        assert limit.num_open == 1


def test_a_tenants_rate_refills_evenly() -> None:
    """A tenant may burst its minute's share, then waits as long as the refusal says."""
    now = 0.0
    rate = CreateRate(6, clock=lambda: now)
    for _ in range(6):
        rate.take("acme")
    with pytest.raises(ApiError) as refusal:
        rate.take("acme")
    assert refusal.value.code == "rate_limit_exceeded"
    assert refusal.value.retry_after_s == pytest.approx(10)
    rate.take("other")
    now = 10.0
    rate.take("acme")
    with pytest.raises(ApiError):
        rate.take("acme")


def test_no_rate_means_no_limit() -> None:
    """Without a rate nothing is refused."""
    rate = CreateRate(None, clock=lambda: 0.0)
    for _ in range(1000):
        rate.take("acme")


def lanes(**bounds: int) -> Lanes[str]:
    return Lanes(SocketLimits(**bounds))  # type: ignore[arg-type]


def started(state: Lanes[str]) -> list[tuple[str | None, str]]:
    found = []
    while (item := state.start_next()) is not None:
        found.append(item)
    return found


def test_a_lane_is_fifo_and_never_overlaps() -> None:
    """One item of a lane runs at a time, in order of arrival; other lanes do not wait for it."""
    state = lanes()
    for item in ("a1", "a2", "a3"):
        state.submit("a", item)
    state.submit(None, "d1")
    state.submit("b", "b1")
    assert started(state) == [("a", "a1"), (None, "d1"), ("b", "b1")]
    state.release("b")
    assert started(state) == []
    state.release("a")
    assert started(state) == [("a", "a2")]
    state.release("a")
    assert started(state) == [("a", "a3")]


def test_no_more_than_the_bound_run_at_once() -> None:
    """Beyond `max_in_flight` free lanes wait, and go on in the order they came."""
    state = lanes(max_in_flight=2)
    for lane in "abcd":
        state.submit(lane, lane)
    assert [lane for lane, _ in started(state)] == ["a", "b"]
    state.release("b")
    assert [lane for lane, _ in started(state)] == ["c"]
    assert (state.num_busy, state.num_waiting) == (2, 1)


def test_distinct_names_are_bounded() -> None:
    """A connection may use `max_lanes` names in its life; known ones and the default go on."""
    state = lanes(max_lanes=2)
    for lane in ("a", "b", "a", None):
        state.submit(lane, "x")
    with pytest.raises(ApiError) as refusal:
        state.submit("c", "x")
    assert refusal.value.code == "websocket_stream_limit_reached"
    started(state)
    state.release("a")
    with pytest.raises(ApiError):
        state.occupy("c")


def test_the_waiting_are_bounded() -> None:
    """What cannot start at once counts against `max_queued`; then creates are refused."""
    state = lanes(max_queued=2)
    state.submit("a", "a1")
    started(state)
    state.submit("a", "a2")
    state.submit("a", "a3")
    with pytest.raises(ApiError) as refusal:
        state.submit("a", "a4")
    assert refusal.value.code == "rate_limit_exceeded"
    state.submit("b", "b1")
    assert started(state) == [("b", "b1")]


def test_a_resume_needs_an_idle_lane() -> None:
    """`occupy` takes a lane without work and answers 409 on any other."""
    state = lanes()
    state.occupy("a")
    for lane in ("a",):
        with pytest.raises(ApiError) as refusal:
            state.occupy(lane)
        assert (refusal.value.status, refusal.value.code) == (409, "stream_busy")
    state.submit("a", "a1")
    assert started(state) == []
    state.release("a")
    with pytest.raises(ApiError):
        state.occupy("a")
    assert started(state) == [("a", "a1")]
    state.release("zzz")
