"""What waits for a peer: merging, bounds, and who is too slow. No network."""

import asyncio

import pytest

from hillstar.server.events import Part, TextDelta
from hillstar.server.limits import SocketLimits
from hillstar.server.outbox import MAX_LEAVING, MAX_MERGED_CHARS, Outbox
from hillstar.server.runqueue import RunQueue
from support.wait import until


class Pipe:
    """A sink that takes frames, each of which ends with a line feed, while it is open."""

    def __init__(self) -> None:
        self.writes: list[list[str]] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.is_broken = False

    @property
    def frames(self) -> list[str]:
        return [frame for frames in self.writes for frame in frames]

    @property
    def is_full(self) -> bool:
        return not self.writable.is_set()

    def send(self, frames: bytes) -> None:
        if self.is_broken:
            raise ConnectionResetError
        self.writes.append(frames.decode().splitlines())

    async def wait_writable(self) -> None:
        await self.writable.wait()


class Shown:
    """A response whose frames can be read."""

    def frame(self, delta: TextDelta) -> bytes:
        cover = f"{delta.first_token}+{delta.num_tokens}"
        name = f"{delta.part.item_id}{delta.sequence_number}"
        return f"{name}:{delta.delta}:{cover}\n".encode()


R, A, B = Shown(), Shown(), Shown()


def delta(number: int, text: str = "x", item: str = "i") -> TextDelta:
    return TextDelta(number, Part(item, 0, 0), text, number, 1)


def outbox(pipe: Pipe, **bounds: float) -> Outbox:
    departures = RunQueue(asyncio.get_running_loop())
    return Outbox(pipe, SocketLimits(**bounds), departures)  # type: ignore[arg-type]


async def test_a_reading_peer_gets_each_delta_alone() -> None:
    """While the transport takes frames nothing merges, however many were put at once."""
    pipe = Pipe()
    box = outbox(pipe)
    for number in range(100):
        box.put_delta(delta(number), R)
    box.put(b"end\n")
    box.finish()
    assert await box.run()
    assert pipe.frames == [f"i{n}:x:{n}+1" for n in range(100)] + ["end"]
    assert box.num_bytes == 0


async def test_deltas_merge_while_the_transport_is_full() -> None:
    """A lagging peer gets adjacent deltas as one, with the last number and all the tokens."""
    pipe = Pipe()
    box = outbox(pipe)
    pipe.writable.clear()
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    for number in range(4):
        box.put_delta(delta(number, item="a"), A)
        box.put_delta(delta(number, item="b"), B)
    box.put(b"error\n")
    box.put(b"done-a\n", A)
    box.put_delta(delta(4, item="a"), A)
    box.put_delta(delta(4, item="b"), B)
    pipe.writable.set()
    box.finish()
    assert await running
    assert pipe.frames == ["a3:xxxx:0+4", "b4:xxxxx:0+5", "error", "done-a", "a4:x:4+1"]
    assert box.num_progress == 1


async def test_a_delta_on_its_way_is_not_merged_into() -> None:
    """What has left is final: the next delta is a frame of its own."""
    pipe = Pipe()
    box = outbox(pipe)
    running = asyncio.create_task(box.run())
    box.put_delta(delta(0), R)
    await until(lambda: len(pipe.frames) == 1)
    pipe.writable.clear()  # by the frame that follows
    box.put_delta(delta(1), R)
    await asyncio.sleep(0)
    for number in range(2, 4):
        box.put_delta(delta(number), R)
    assert pipe.frames == ["i0:x:0+1", "i1:x:1+1"]
    pipe.writable.set()
    box.finish()
    assert await running
    assert pipe.frames == ["i0:x:0+1", "i1:x:1+1", "i3:xx:2+2"]


async def test_what_one_turn_of_the_loop_puts_leaves_in_one_write() -> None:
    """While the writer sleeps, frames of any kind leave together, in order, each as it was put."""
    pipe = Pipe()
    box = outbox(pipe)
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    for _ in range(2):
        box.put(b"first\n")
        box.put_delta(delta(0), A)
        box.put_delta(delta(1), A)
        box.put(b"last\n", B)
        await asyncio.sleep(0)
    assert pipe.writes == [["first", "i0:x:0+1", "i1:x:1+1", "last"]] * 2
    assert box.num_bytes == 0
    box.put(b"end\n")
    box.finish()
    assert await running
    assert pipe.frames[-1] == "end"


async def test_a_long_replay_leaves_in_pieces() -> None:
    """What is encoded and not sent is bounded, however much is put in one turn of the loop."""
    pipe = Pipe()
    box = outbox(pipe)
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    for number in range(10 * MAX_LEAVING):
        box.put_delta(delta(number), R)
    assert [len(frames) for frames in pipe.writes] == [MAX_LEAVING] * 10
    box.finish()
    assert await running


async def test_a_transport_that_the_last_frame_filled_is_watched() -> None:
    """The stall timeout also runs when nothing more is put."""
    pipe = Pipe()
    box = outbox(pipe, stall_timeout_s=0.01)
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    pipe.writable.clear()
    box.put(b"fills it\n")
    assert not await running


async def test_a_peer_that_leaves_while_the_writer_sleeps_ends_it() -> None:
    """What is put for a broken connection ends `run` without blame, and raises nothing."""
    pipe = Pipe()
    box = outbox(pipe)
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    pipe.is_broken = True
    box.put(b"x\n")
    await asyncio.sleep(0)
    box.put_delta(delta(0), R)
    assert await running


async def test_a_long_replay_merges_above_the_mark() -> None:
    """Much put at once merges beyond `merge_bytes`, in pieces of bounded size, losing nothing."""
    pipe = Pipe()
    box = outbox(pipe, merge_bytes=2000, max_outbox_bytes=1 << 20)
    for number in range(20_000):
        box.put_delta(delta(number), R)
    assert box.num_bytes < 60_000
    box.finish()
    assert await box.run()
    texts = [frame.split(":")[1] for frame in pipe.frames]
    assert "".join(texts) == "x" * 20_000
    assert max(map(len, texts)) <= MAX_MERGED_CHARS
    assert len(pipe.frames) < 50


async def test_an_overflow_cuts_the_peer_at_once() -> None:
    """More than the bound for a peer that does not read: `run` says too slow, memory is freed."""
    pipe = Pipe()
    box = outbox(pipe, max_outbox_bytes=1000)
    pipe.writable.clear()
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    for _ in range(20):
        box.put(b"x" * 100)
    assert not await running
    assert (pipe.frames, box.num_bytes) == ([], 0)
    box.put(b"late\n")
    box.put_delta(delta(0), R)
    assert box.num_bytes == 0


async def test_the_bound_does_not_cut_a_peer_that_reads() -> None:
    """A burst above the bound is sent whole while the transport takes it."""
    pipe = Pipe()
    box = outbox(pipe, max_outbox_bytes=1000)
    for number in range(50):
        box.put(b"%d" % number * 100 + b"\n")
    box.finish()
    assert await box.run()
    assert len(pipe.frames) == 50


async def test_a_stalled_transport_times_out() -> None:
    """A full transport without progress for the stall timeout is too slow."""
    pipe = Pipe()
    box = outbox(pipe, stall_timeout_s=0.01)
    pipe.writable.clear()
    box.put(b"never\n")
    assert not await box.run()
    assert pipe.frames == []


@pytest.mark.parametrize("full", [False, True])
async def test_stop_ends_the_writer_at_once(full: bool) -> None:
    """`stop` forgets what is queued and ends `run`, also while the transport is full."""
    pipe = Pipe()
    box = outbox(pipe)
    if full:
        pipe.writable.clear()
    running = asyncio.create_task(box.run())
    await asyncio.sleep(0)
    if full:
        box.put(b"lost\n")
    box.stop()
    box.stop()
    assert await running
    assert pipe.frames == []


async def test_a_peer_that_left_ends_the_writer() -> None:
    """A broken connection ends `run` without blame."""
    pipe = Pipe()
    pipe.is_broken = True
    box = outbox(pipe)
    box.put(b"x\n")
    box.put(b"y\n")
    assert await box.run()
    assert box.num_bytes == 0
