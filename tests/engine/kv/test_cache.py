"""The KV pool: its layout, its size, copying blocks."""

import pytest
import torch

from hillstar.engine.kv import cache as cache_module
from hillstar.engine.kv.cache import CacheMemoryError, KVCache
from hillstar.engine.models.config import ModelConfig, RopeConfig
from hillstar.engine.models.size import kv_groups

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=128,
    tie_word_embeddings=False,
)


def make(num_blocks: int = 6) -> KVCache:
    return KVCache(CONFIG, num_blocks=num_blocks, block_size=16, dtype=torch.bfloat16)


def test_all_layers_of_a_block_are_contiguous() -> None:
    """One block is one run of memory, so that moving it is one copy."""
    cache = make()
    assert cache.pool.shape == (6, 3, 2, 2, 16, 8)
    assert cache.pool[1].is_contiguous()
    [group] = kv_groups(CONFIG, "bfloat16", 16)
    assert cache.pool[1].nbytes == group.bytes_per_block
    assert (cache.num_blocks, cache.block_size) == (6, 16)


def test_a_layer_is_a_view() -> None:
    """What is written through a layer's view is in the pool, in that layer alone."""
    cache = make()
    cache.layer(1)[4, 0, 1, 5] = 7
    assert int((cache.pool != 0).sum()) == CONFIG.head_dim
    assert bool((cache.pool[4, 1, 0, 1, 5] == 7).all())


def test_copies_read_before_they_write() -> None:
    """A block that is copied from and to in one plan gives what it held before the plan."""
    cache = make()
    for block in range(6):
        cache.pool[block] = block
    cache.copy_blocks([(1, 2), (2, 3), (0, 5)])
    assert cache.pool[:, 0, 0, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 0]
    before = cache.pool.clone()
    cache.copy_blocks([])
    assert torch.equal(cache.pool, before)


def test_too_large_a_pool_is_refused_with_its_size() -> None:
    """A pool larger than the machine's memory is an error that says how large it would be."""
    with pytest.raises(CacheMemoryError, match=r"cannot allocate 17179869184 KV blocks .* GiB"):
        make(num_blocks=1 << 34)


def test_a_pool_keeps_to_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the container may still take is the bound, however much the machine has."""
    monkeypatch.setattr(cache_module, "free_memory_bytes", lambda: 1 << 10)
    with pytest.raises(CacheMemoryError, match="are available"):
        make()


def test_a_pool_has_two_blocks_at_least() -> None:
    """Where less fits, the error says what a block takes."""
    with pytest.raises(CacheMemoryError, match=r"1 KV blocks of 16 tokens \(3072 bytes\)"):
        make(num_blocks=1)
    assert make(num_blocks=2).num_blocks == 2
