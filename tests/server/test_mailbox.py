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


async def test_a_mailbox_is_clear_while_nothing_precedes() -> None:
    """Not behind a control message, in a pause, or inside a handler; user messages may wait."""
    seen: list[bool] = []
    box: Mailbox[str] = Mailbox(
        RunQueue(asyncio.get_running_loop()), lambda message: seen.append(box.is_clear), max_user=1
    )
    assert box.is_clear
    box.offer("user")
    assert box.is_clear
    box.tell("control")
    assert not box.is_clear
    await asyncio.sleep(0)
    assert (box.is_clear, seen) == (True, [False, False])
    box.pause()
    assert not box.is_clear
    box.resume()
    assert box.is_clear


async def test_a_callback_that_raises_stops_nobody_else() -> None:
    """The loop reports it; what is queued before and behind it runs, and what comes later."""
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    queue, ran, fault = RunQueue(loop), list[str](), ValueError("a fault")

    def broken() -> bool:
        raise fault

    def note(name: str) -> bool:
        ran.append(name)
        return False

    queue.add(lambda: note("before"))
    queue.add(broken)
    queue.add(lambda: note("behind"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    queue.add(lambda: note("later"))
    await asyncio.sleep(0)
    assert (ran, told) == (["before", "behind", "later"], [fault])
