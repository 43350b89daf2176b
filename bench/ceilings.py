"""What the machine gives at the moment, in processor time: the ceilings of the server's figures.

On a shared machine they rise and fall, and the server's figures with them.
"""

import socket
import statistics
import time
from collections.abc import Callable

NUM_TURNS, NUM_SENDS = 1_000_000, 1000


def ceilings() -> dict[str, float]:
    """A turn of two Python loops, and a send on loopback, each a segment as the server's are."""
    return {
        "empty_loop_ns": round(_empty_loop_ns(), 1),
        "python_loop_ns": python_loop_ns(),
        "bare_send_us": round(_send_us(), 2),
    }


def python_loop_ns() -> float:
    """A turn of a loop that adds up: what the server's figures are to be read beside."""

    def loop() -> None:
        total = 0
        for number in range(NUM_TURNS):
            total += number

    return round(_cpu_s(loop) * 1e9 / NUM_TURNS, 1)


def _empty_loop_ns() -> float:
    def loop() -> None:
        for _ in range(NUM_TURNS):
            pass

    return _cpu_s(loop) * 1e9 / NUM_TURNS


def _send_us() -> float:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sender,
        listener.accept()[0] as receiver,
    ):
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send() -> None:
            for _ in range(NUM_SENDS):
                sender.send(bytes(40))
            receiver.recv(1 << 20)

        return _cpu_s(send) * 1e6 / NUM_SENDS


def _cpu_s(run: Callable[[], None]) -> float:
    """The median processor time of a run."""
    times = []
    for _ in range(5):
        began_s = time.process_time()
        run()
        times.append(time.process_time() - began_s)
    return statistics.median(times)
