"""An engine process without a model, for tests of the bridge: `python stub_engine.py MODE --fd N`.

MODE: `talk` answers each Submit with a token and a line on stderr; `fail` says Failed and exits;
`silent` exits before Ready; `killed` dies by signal 9 while it loads, for as long as a file of
that name is in the model's folder, where it adds a line each time; `garbage` sends what is no
frame; `deaf` ignores Shutdown; `hang` stops for ever at a Submit, without dying; `parent` starts
a process that has its stderr, and says its id there.
"""

import os
import signal
import socket
import subprocess
import sys

from hillstar.engine.channel import ChannelClosed, SocketChannel
from hillstar.engine.framing import decode_config
from hillstar.engine.messages import (
    EngineStats,
    Failed,
    Frame,
    Loading,
    Output,
    Ready,
    Shutdown,
    Submit,
)


def main() -> None:
    mode, fd = sys.argv[1], int(sys.argv[3])
    sock = socket.socket(fileno=fd)
    channel = SocketChannel(sock)
    config = decode_config(channel.receive_payload(30))
    channel.send(Loading(1, 2))
    if mode == "silent":
        sys.exit(3)
    wound = config.model_dir / "killed"
    if mode == "killed" and wound.exists():
        with wound.open("a") as lines:
            lines.write("once more\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "fail":
        channel.send(Failed("no such tensor"))
        channel.flush(5)
        sys.exit(1)
    if mode == "parent":
        child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        print(f"child {child.pid}", file=sys.stderr, flush=True)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send(
        Ready(
            engine_id=f"engine_{os.getpid()}",
            model=config.model_name,
            num_blocks=1,
            block_size=16,
            max_model_len=64,
            eos_token_ids=[0],
        )
    )
    if mode == "garbage":
        channel.flush(5)
        sock.setblocking(True)
        sock.sendall(b"\0\0\0\4nope")
    try:
        serve(channel, mode)
    except ChannelClosed:
        return


def serve(channel: SocketChannel, mode: str) -> None:
    while True:
        channel.wait_readable(None)
        for message in channel.receive_nowait():
            if isinstance(message, Submit):
                if mode == "hang":
                    signal.pause()
                print(f"asked for {message.sequence_id}", file=sys.stderr, flush=True)
                channel.send(Frame([Output(message.sequence_id, 0, [7])], EngineStats()))
            elif isinstance(message, Shutdown) and mode != "deaf":
                return


main()
