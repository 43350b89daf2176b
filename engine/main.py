"""The engine process: `python -m hillstar.engine.main --fd N`.

N is a connected Unix socket whose other end the server holds. The first frame on it is the
configuration; the engine answers with `Loading` while it loads, then with `Ready` or `Failed`,
then with one `Frame` a step. It lives as long as the socket: when the server is gone, so is it.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import torch
from setproctitle import setproctitle

from hillstar.engine.assembly import Engine, assemble
from hillstar.engine.channel import ChannelClosed, SocketChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.framing import decode_config
from hillstar.engine.loop import FLUSH_S
from hillstar.engine.messages import Failed, Loading
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import begin_loading

log = logging.getLogger(__name__)

CONFIG_TIMEOUT_S = 30.0
PROGRESS_INTERVAL_S = 0.1


def main(argv: list[str] | None = None) -> int:
    """Run the engine until the server says so or is gone. Exit status 1: it could not start."""
    parser = argparse.ArgumentParser(prog="hillstar-engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="a connected Unix socket")
    fd = parser.parse_args(argv).fd
    setproctitle("hillstar-engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the server decides
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    channel = SocketChannel(socket.socket(fileno=fd))
    try:
        return _serve(channel)
    except ChannelClosed:
        log.info("the server is gone")
        return 0
    finally:
        channel.close()


def _serve(channel: SocketChannel) -> int:
    try:
        config = decode_config(channel.receive_payload(CONFIG_TIMEOUT_S))
        engine = _start(config, channel)
    except ChannelClosed:
        raise
    except Exception as error:  # the process boundary: the server is told why, whatever it was
        log.exception("the engine cannot start")
        channel.send(Failed(str(error) or type(error).__name__))
        channel.flush(FLUSH_S)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: channel.stop_receiving())
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not look at it in the middle of a step
    channel.send(engine.ready)
    engine.loop.run()
    return 0


def _start(config: EngineConfig, channel: SocketChannel) -> Engine:
    """Load the model and put the parts together."""
    if config.device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = ModelConfig.from_dir(config.model_dir)
    with begin_loading(
        config.model_dir,
        model,
        dtype=getattr(torch, config.dtype),
        device=config.device,
        progress=_progress(channel),
    ) as loading:
        engine = assemble(config, model, loading.weights, inbox=channel, outbox=channel)
        loading.wait()
    return engine


def _progress(channel: SocketChannel) -> Callable[[int, int], None]:
    """Tells the server how far loading is, a few times a second and at the end. Whichever thread
    calls it has the channel to itself: the engine says nothing before it is loaded."""
    next_s = 0.0

    def report(done: int, total: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s >= next_s or done == total:
            next_s = now_s + PROGRESS_INTERVAL_S
            channel.send(Loading(done, total))

    return report


if __name__ == "__main__":
    sys.exit(main())
