"""A whole server in a process of its own, with any command as its engine.

    python bench/served.py --model DIR --data-dir DIR [--idle-timeout S] [--max-model-len N]
        [ENGINE COMMAND …]

The parts are put together as `server.app` does. It prints its URL once it is ready and leaves
when its standard input ends.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import uvloop

from hillstar.engine.config import EngineConfig
from hillstar.server.app import spare_collections, wait_ready
from hillstar.server.auth import KeyRing
from hillstar.server.bridge import ENGINE_COMMAND, Bridge
from hillstar.server.config import ServerConfig
from hillstar.server.front import Front
from hillstar.server.hub import Hub, HubLimits
from hillstar.server.journal import Journal
from hillstar.server.limits import SocketLimits
from hillstar.server.listener import Server
from hillstar.server.metrics import Metrics
from hillstar.server.text import Tokenizer


async def serve(options: argparse.Namespace) -> None:
    engine = EngineConfig(
        model_dir=options.model,
        model_name="bench",
        dtype="bfloat16",
        num_blocks=512,
        max_num_seqs=8,
        max_model_len=options.max_model_len,
        speculation=False,  # as in `engine_alone`
    )
    config = ServerConfig(data_dir=options.data_dir, port=0)
    metrics = Metrics()
    hub = Hub(
        journal=Journal(config.data_dir, durability=config.durability),
        engine=Bridge(engine, options.engine or ENGINE_COMMAND),
        text=Tokenizer(engine.model_dir),
        observer=metrics,
        model_name=engine.model_name,
        max_model_len=engine.max_model_len,
        limits=HubLimits(idle_timeout_s=options.idle_timeout),
    )
    front = Front(
        config=config,
        model_name=engine.model_name,
        hub=hub,
        keys=KeyRing(config.api_keys),
        metrics=metrics,
        limits=SocketLimits(),
        started_at=int(time.time()),
    )
    listener = Server(front)
    try:
        await hub.start()
        await listener.start()
        spare_collections()
        await wait_ready(hub, lambda done, total: None)
        print(listener.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await listener.close()
        await hub.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--idle-timeout", type=float, default=300.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("engine", nargs=argparse.REMAINDER)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
