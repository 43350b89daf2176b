"""Mailboxes: order, bounds, fairness."""

import asyncio

from hillstar.server.mailbox import MAX_RUN, Mailbox
from hillstar.server.runqueue import RunQueue


def boxes(num: int, max_user: int = 4) -> tuple[list[Mailbox[str]], list[tuple[int, str]]]:
    """Mailboxes on one queue, and the log of what they handled."""
    queue = RunQueue(asyncio.get_running_loop())
    log: list[tuple[int, str]] = []

    def handler(i: int) -> "Mailbox[str]":
        return Mailbox(queue, lambda message: log.append((i, message)), max_user=max_user)

    return [handler(i) for i in range(num)], log


async def test_control_goes_before_user_messages() -> None:
    """Within a lane messages keep their order; the control lane is emptied first."""
    [box], log = boxes(1)
    box.offer("user 1")
    box.offer("user 2")
    box.tell("control 1")
    box.tell("control 2")
    assert log == []  # nothing is handled inside the sender
    await asyncio.sleep(0)
    assert [message for _, message in log] == ["control 1", "control 2", "user 1", "user 2"]


async def test_the_user_lane_refuses_when_full_and_control_does_not() -> None:
    """A full user lane changes nothing for tokens, commits and cancels."""
    [box], log = boxes(1, max_user=2)
    assert [box.offer("u") for _ in range(3)] == [True, True, False]
    for _ in range(100):
        box.tell("c")
    assert len(box) == 102
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(log) == 102 and box.offer("u")


async def test_messages_gather_while_paused() -> None:
    """A pause holds everything back, also from inside a handler, and loses nothing."""
    [box], log = boxes(1)
    box.pause()
    box.tell("a")
    await asyncio.sleep(0)
    assert log == []
    box.resume()
    await asyncio.sleep(0)
    assert log == [(0, "a")]
    box.pause()
    box.tell("b")
    assert box.clear() == ["b"]
    box.resume()
    await asyncio.sleep(0)
    assert log == [(0, "a")]


async def test_a_busy_mailbox_does_not_hold_up_the_others() -> None:
    """After MAX_RUN messages of one actor the next one has its turn."""
    [busy, other], log = boxes(2)
    for _ in range(10 * MAX_RUN):
        busy.tell("x")
    other.tell("y")
    await asyncio.sleep(0)
    assert log.index((1, "y")) == MAX_RUN


async def test_what_nothing_precedes_is_handled_at_once() -> None:
    """`tell_now` handles before it returns, unless that would overtake something."""
    [box], log = boxes(1)
    box.offer("user")
    box.tell_now("token 1")
    assert log == [(0, "token 1")]
    box.tell("commit")
    box.tell_now("token 2")
    assert log == [(0, "token 1")]
    await asyncio.sleep(0)
    box.pause()
    box.tell_now("token 3")
    box.resume()
    await asyncio.sleep(0)
    assert [message for _, message in log] == ["token 1", "commit", "token 2", "user", "token 3"]


async def test_a_handler_is_never_entered_twice() -> None:
    """What a handler tells its own mailbox comes after it, however it was called."""
    log: list[str] = []

    def handle(message: str) -> None:
        log.append(f"{message} begins")
        if message == "outer":
            box.tell_now("inner")
        log.append(f"{message} ends")

    box = Mailbox(RunQueue(asyncio.get_running_loop()), handle, max_user=1)
    for start in (box.tell_now, box.tell):
        log.clear()
        start("outer")
        await asyncio.sleep(0)
        assert log == ["outer begins", "outer ends", "inner begins", "inner ends"]
