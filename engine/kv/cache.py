"""The KV tensors of the main tier and their layout.

One pool holds every block of the model; all layers of a block are contiguous, so that moving a
block between tiers is one copy. Which block belongs to whom is `kv.block`'s business: here they
are numbers.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from hillstar.engine.models.config import ModelConfig


class CacheMemoryError(MemoryError):
    """The KV pool does not fit into the device's memory; says how large it would have been."""


def block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return config.kv_bytes_per_token(dtype.itemsize) * block_size


def num_blocks_for(
    config: ModelConfig, dtype: torch.dtype, block_size: int, memory_bytes: int
) -> int:
    """How many blocks fit into `memory_bytes`.

    Raises `CacheMemoryError` when it is fewer than 2, the least a pool can work with.
    """
    size_bytes = block_bytes(config, dtype, block_size)
    num_blocks = memory_bytes // size_bytes
    if num_blocks < 2:
        raise CacheMemoryError(
            f"{memory_bytes} bytes of KV memory hold {num_blocks} blocks of {size_bytes} bytes"
            f" ({block_size} tokens); at least 2 are needed"
        )
    return num_blocks


def _available_bytes(device: torch.device) -> int | None:
    """Memory that an allocation may take; None where the system does not say.

    Asked beforehand on the CPU, where an allocation that is too large succeeds and the process
    is killed once the pages are touched.
    """
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class KVCache:
    """Keys and values of all blocks: `pool`, `[num_blocks, num_layers, 2, num_kv_heads,
    block_size, head_dim]`, index 0 of the third axis for keys and 1 for values.

    Owned by the runner; written by the forward pass and by `copy_blocks`, in order of the plans.
    A slot (`slot_mapping`) is `block * block_size + offset`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates the whole pool at once. Raises `CacheMemoryError` when it does not fit."""
        shape = (
            num_blocks,
            config.num_layers,
            2,
            config.num_kv_heads,
            block_size,
            config.head_dim,
        )
        size_bytes = num_blocks * block_bytes(config, dtype, block_size)
        refusal = (
            f"cannot allocate {num_blocks} KV blocks ({size_bytes / 2**30:.2f} GiB) on {device}"
        )
        available = _available_bytes(torch.device(device))
        if available is not None and size_bytes > available:
            raise CacheMemoryError(f"{refusal}: {available / 2**30:.2f} GiB are available")
        try:
            # Zeroed: unwritten slots are masked out of attention, and 0 * NaN would not be 0.
            self.pool = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            raise CacheMemoryError(f"{refusal}: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self.pool.shape[0]

    @property
    def block_size(self) -> int:
        return self.pool.shape[4]

    def layer(self, index: int) -> torch.Tensor:
        """A layer's view `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, strided."""
        return self.pool[:, index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers: `(source, destination)`.

        Every source is read before any destination is written.
        """
        if not pairs:
            return
        sources, destinations = torch.tensor(pairs, device=self.pool.device).unbind(1)
        self.pool[destinations] = self.pool[sources]
