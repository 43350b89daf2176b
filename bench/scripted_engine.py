"""An engine process that computes nothing: it says a script to every sequence, at a set pace.

    python bench/scripted_engine.py --tokens FILE --gather N --pace S --fd FD

It begins to step once N sequences were submitted and steps until all of them have ended; each
step adds one token, the script's next, to every sequence. FILE holds little-endian int32 ids.
"""

import argparse
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hillstar.engine.channel import ChannelClosed, SocketChannel
from hillstar.engine.framing import decode_config
from hillstar.engine.messages import (
    EngineStats,
    Finish,
    Frame,
    Output,
    Ready,
    Shutdown,
    Submit,
    Usage,
    unpack_ids,
)

CONFIG_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Running:
    """A sequence and how much of the script it has heard."""

    submit: Submit
    num_tokens: int = 0


class Scripted:
    """The loop of the process."""

    def __init__(self, channel: SocketChannel, tokens: list[int], gather: int, pace_s: float):
        self._channel = channel
        self._tokens = tokens
        self._gather = gather
        self._pace_s = pace_s
        self._running: list[Running] = []
        self._is_stepping = False
        self._num_steps = 0

    def serve(self) -> None:
        """Until it is told to leave."""
        next_s = 0.0
        while True:
            left_s = max(0.0, next_s - time.monotonic()) if self._is_stepping else None
            if self._channel.wait_readable(left_s):
                for message in self._channel.receive_nowait():
                    if isinstance(message, Shutdown):
                        return
                    if isinstance(message, Submit):
                        self._running.append(Running(message))
            self._is_stepping |= len(self._running) >= self._gather
            if self._is_stepping and time.monotonic() >= next_s:
                next_s = max(next_s + self._pace_s, time.monotonic())
                self._step()

    def _step(self) -> None:
        self._num_steps += 1
        outputs = [self._output(running) for running in self._running]
        stats = EngineStats(running=len(outputs), num_steps_total=self._num_steps)
        self._channel.send(Frame(outputs, stats))
        limit = [running.submit.params.max_tokens for running in self._running]
        self._running = [
            running
            for running, most in zip(self._running, limit, strict=True)
            if running.num_tokens < most
        ]
        self._is_stepping = bool(self._running)

    def _output(self, running: Running) -> Output:
        submit, index = running.submit, running.num_tokens
        running.num_tokens += 1
        finish = None
        if running.num_tokens == submit.params.max_tokens:
            num_prompt = len(unpack_ids(submit.prompt_ids))
            finish = Finish("length", Usage(num_prompt, 0, running.num_tokens))
        token_id = self._tokens[index % len(self._tokens)]
        return Output(submit.sequence_id, index, [token_id], None, finish)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--gather", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds between steps")
    parser.add_argument("--cores", type=int, nargs="+", required=True, help="to run on")
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    channel = SocketChannel(socket.socket(fileno=options.fd))
    config = decode_config(channel.receive_payload(CONFIG_TIMEOUT_S))
    channel.send(
        Ready(
            engine_id="engine_scripted",
            model=config.model_name,
            num_blocks=1,
            block_size=16,
            max_model_len=8192,
            eos_token_ids=[0],
        )
    )
    tokens: list[int] = unpack_ids(options.tokens.read_bytes()).tolist()
    try:
        Scripted(channel, tokens, options.gather, options.pace).serve()
    except ChannelClosed:
        return


if __name__ == "__main__":
    main()
