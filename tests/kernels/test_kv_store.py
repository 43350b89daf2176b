"""`store_kv` and `copy_blocks` against their references."""

import pytest
import torch

from hillstar.kernels.kv_store import (
    copy_blocks,
    copy_blocks_reference,
    store_kv,
    store_kv_reference,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "block_size", "head_dim"), [(1, 1, 8, 64), (7, 3, 16, 80)]
)
def test_store_writes_the_slots_and_nothing_else(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
) -> None:
    """Keys and values land in one layer's slots of the pool; every other element stays."""
    shape = (5, 2, 2, num_kv_heads, block_size, head_dim)
    pool = torch.randn(shape, device=device, generator=generator).to(dtype)
    wanted = pool.clone()
    qkv = torch.randn(
        (num_tokens, 4, num_kv_heads, head_dim), device=device, generator=generator
    ).to(dtype)
    k, v = qkv[:, 1], qkv[:, 2]
    slots = torch.randperm(5 * block_size, device=device, generator=generator)[:num_tokens]
    store_kv(k, v, pool[:, 1], slots)
    store_kv_reference(k, v, wanted[:, 1], slots)
    assert torch.equal(pool, wanted)
    assert torch.equal(pool[:, 0], wanted[:, 0])


def test_a_negative_slot_is_skipped(device: torch.device) -> None:
    """A token with slot -1 writes nothing, not even to the last block."""
    kv = torch.zeros((2, 2, 1, 8, 16), device=device)
    ones = torch.ones((2, 1, 16), device=device)
    store_kv(ones, ones, kv, torch.tensor([-1, 9], device=device))
    assert int(kv.count_nonzero()) == 2 * 16
    assert bool((kv[1, :, 0, 1] == 1).all())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 6 GiB of device memory")
def test_offsets_pass_32_bits(device: torch.device, generator: torch.Generator) -> None:
    """In a pool of more than 2^31 elements the last slot is the last slot, for store and copy."""
    pool = torch.zeros((1100, 2**21), dtype=torch.bfloat16, device=device)  # 2.3e9 elements
    kv = pool.view(1100, 32, 2, 8, 32, 128)[:, 31]
    k, v = torch.randn((2, 3, 8, 128), device=device, generator=generator).bfloat16()
    slots = torch.tensor([1099 * 32 + 31, 1060 * 32, 5], device=device)
    store_kv(k, v, kv, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(kv[slot // 32, 0, :, slot % 32], k[i])
        assert torch.equal(kv[slot // 32, 1, :, slot % 32], v[i])
    assert sum(int(part.count_nonzero()) for part in pool.split(100)) == 2 * k.numel()
    copy_blocks(pool, torch.tensor([[1099, 1098], [1060, 0]], device=device))
    assert torch.equal(pool[1098], pool[1099])
    assert torch.equal(pool[0], pool[1060])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("block_elems", [3, 4096, 9001])
def test_copy_moves_whole_blocks(
    device: torch.device, generator: torch.Generator, dtype: torch.dtype, block_elems: int
) -> None:
    """Destinations become their sources and other blocks stay, for any size and dtype."""
    pool = torch.randint(0, 99, (6, block_elems), device=device, generator=generator).to(dtype)
    wanted = pool.clone()
    pairs = torch.tensor([[5, 0], [2, 4]], device=device)
    copy_blocks(pool, pairs)
    copy_blocks_reference(wanted, pairs)
    assert torch.equal(pool, wanted)
    assert torch.equal(pool[0], pool[5])


def test_nothing_to_do_is_no_work(device: torch.device) -> None:
    """No tokens and no pairs leave the pool as it is."""
    kv = torch.zeros((2, 2, 1, 8, 16), device=device)
    none = torch.empty((0, 1, 16), device=device)
    store_kv(none, none, kv, torch.empty(0, dtype=torch.int64, device=device))
    copy_blocks(kv.view(2, -1), torch.empty((0, 2), dtype=torch.int64, device=device))
    assert int(kv.count_nonzero()) == 0


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("kv", torch.zeros((2, 3, 1, 8, 16))),
        ("kv", torch.zeros((2, 2, 1, 12, 16))),
        ("k", torch.zeros((3, 2, 16))),
        ("v", torch.zeros((2, 1, 16))),
        ("v", torch.zeros((3, 1, 16), dtype=torch.float16)),
        ("slot_mapping", torch.zeros(3, dtype=torch.int32)),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_wrong_argument_of_store_is_named(
    device: torch.device, argument: str, bad: torch.Tensor
) -> None:
    """A wrong shape or dtype raises a ValueError that names the argument."""
    arguments = {
        "k": torch.zeros((3, 1, 16)),
        "v": torch.zeros((3, 1, 16)),
        "kv": torch.zeros((2, 2, 1, 8, 16)),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }
    given = {name: value.to(device) for name, value in (arguments | {argument: bad}).items()}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        store_kv(given["k"], given["v"], given["kv"], given["slot_mapping"])


@pytest.mark.parametrize(
    ("argument", "pool", "pairs"),
    [
        ("pool", torch.zeros(4), torch.zeros((1, 2), dtype=torch.int64)),
        ("pool", torch.zeros((4, 4)).T[:2], torch.zeros((1, 2), dtype=torch.int64)),
        ("pairs", torch.zeros((4, 4)), torch.zeros((1, 2), dtype=torch.int32)),
        ("pairs", torch.zeros((4, 4)), torch.zeros((2, 1), dtype=torch.int64)),
    ],
)
def test_a_wrong_argument_of_copy_is_named(
    device: torch.device, argument: str, pool: torch.Tensor, pairs: torch.Tensor
) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    with pytest.raises(ValueError, match=f"^{argument}: "):
        copy_blocks(pool.to(device), pairs.to(device))
