"""The engine process: `python -m hillstar.engine.main --fd N`.

N is a connected Unix socket whose other end the server holds. The first frame on it is the
configuration; the engine answers with `Loading` while it loads, then with `Ready` or `Failed`,
then with one `Frame` a step. It lives as long as the socket: when the server is gone, so is it.
"""

import argparse
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable

import torch
from setproctitle import setproctitle

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.channel import ChannelClosed, SocketChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.framing import decode_config
from hillstar.engine.intake import Intake
from hillstar.engine.kv.cache import KVCache, num_blocks_for
from hillstar.engine.kv.manager import BlockManager
from hillstar.engine.loop import FLUSH_S, EngineLoop
from hillstar.engine.messages import Failed, Loading, Ready
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import load_weights
from hillstar.engine.runner import TorchRunner
from hillstar.engine.scheduler import Scheduler

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
        loop, ready = _start(config, channel)
    except ChannelClosed:
        raise
    except Exception as error:
        log.exception("the engine cannot start")
        channel.send(Failed(str(error) or type(error).__name__))
        channel.flush(FLUSH_S)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: channel.stop_receiving())
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not look at it in the middle of a step
    channel.send(ready)
    loop.run()
    return 0


def _start(config: EngineConfig, channel: SocketChannel) -> tuple[EngineLoop, Ready]:
    """Load the model, size the cache and put the parts together."""
    if config.device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype: torch.dtype = getattr(torch, config.dtype)
    model = ModelConfig.from_dir(config.model_dir)
    weights = load_weights(
        config.model_dir, model, dtype=dtype, device=config.device, progress=_progress(channel)
    )
    num_blocks = config.num_blocks
    if num_blocks is None:
        assert config.kv_memory_bytes is not None, "a configuration has one of the two"
        num_blocks = num_blocks_for(model, dtype, config.block_size, config.kv_memory_bytes)
    cache = KVCache(
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=config.device,
    )
    max_model_len = min(config.max_model_len, model.max_position_embeddings)
    runner = TorchRunner(
        model,
        weights,
        cache,
        device=config.device,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=model.eos_token_ids,
        max_position=max_model_len,
    )
    intake = Intake(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        kv_space=f"{config.model_dir.resolve()}|{config.dtype}|{model!r}".encode(),
    )
    scheduler = Scheduler(
        intake=intake,
        blocks=BlockManager(num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_waiting=config.max_waiting,
    )
    builder = BatchBuilder(
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-max_model_len // config.block_size),
        block_size=config.block_size,
    )
    ready = Ready(
        engine_id=f"engine_{secrets.token_hex(8)}",
        model=config.model_name,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        eos_token_ids=list(model.eos_token_ids),
        kv_bytes_per_token=model.kv_bytes_per_token(dtype.itemsize),
    )
    loop = EngineLoop(
        scheduler=scheduler, builder=builder, runner=runner, inbox=channel, outbox=channel
    )
    return loop, ready


def _progress(channel: SocketChannel) -> Callable[[int, int], None]:
    """Tells the server how far loading is, a few times a second and at the end."""
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
