"""Puts an engine's parts together around weights that are loaded.

The engine process does it with a socket, a program that embeds an engine with queues.
"""

import secrets
from dataclasses import dataclass

import torch

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.channel import Inbox, Outbox
from hillstar.engine.config import EngineConfig
from hillstar.engine.intake import Intake
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.kv.manager import BlockManager
from hillstar.engine.loop import EngineLoop
from hillstar.engine.messages import Ready
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.size import kv_groups
from hillstar.engine.models.weights import Weights
from hillstar.engine.runner import TorchRunner
from hillstar.engine.scheduler import Scheduler
from hillstar.engine.spec.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Engine:
    """All belong to the thread that steps `loop`."""

    loop: EngineLoop
    scheduler: Scheduler
    ready: Ready  # what the loop's owner says before its first step


def assemble(
    config: EngineConfig, model: ModelConfig, weights: Weights, *, inbox: Inbox, outbox: Outbox
) -> Engine:
    """Size and allocate the cache, then build every part.

    weights: of `model`, on the configuration's device and of its dtype; not changed, so engines
    may share them. Raises CacheMemoryError when the cache does not fit.
    """
    max_model_len = min(config.max_model_len, model.max_position_embeddings)
    cache = _cache(config, model, weights.embedding.dtype)
    scheduler = Scheduler(
        intake=Intake(
            max_model_len=max_model_len,
            num_blocks=cache.num_blocks,
            block_size=config.block_size,
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
            kv_space=f"{config.model_dir.resolve()}|{config.dtype}|{model!r}".encode(),
        ),
        blocks=BlockManager(cache.num_blocks, config.block_size),
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_waiting=config.max_waiting,
        speculation=Speculation() if _speculates(config) else None,
        inter_token_target_s=config.inter_token_target_s,
    )
    builder = BatchBuilder(
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-max_model_len // config.block_size),
        block_size=config.block_size,
    )
    runner = TorchRunner(
        model,
        weights,
        cache,
        device=config.device,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=model.eos_token_ids,
        max_position=max_model_len,
        deterministic=config.deterministic,
    )
    loop = EngineLoop(
        scheduler=scheduler, builder=builder, runner=runner, inbox=inbox, outbox=outbox
    )
    return Engine(loop, scheduler, _ready(config, model, cache, max_model_len))


def _speculates(config: EngineConfig) -> bool:
    """Not on a GPU yet, where a plan is made while the tokens that a draft goes by are on their
    way; not in deterministic mode, where a token costs as much beside others as alone."""
    return config.speculation and config.device == "cpu" and not config.deterministic


def _cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> KVCache:
    num_blocks = config.num_blocks
    if num_blocks is None:
        assert config.kv_memory_bytes is not None, "a configuration has one of the two"
        [group] = kv_groups(model, config.dtype, config.block_size)
        num_blocks = group.blocks_that_fit(config.kv_memory_bytes)
    return KVCache(
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=config.device,
    )


def _ready(config: EngineConfig, model: ModelConfig, cache: KVCache, max_model_len: int) -> Ready:
    return Ready(
        engine_id=f"engine_{secrets.token_hex(8)}",
        model=config.model_name,
        num_blocks=cache.num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        eos_token_ids=list(model.eos_token_ids),
    )
