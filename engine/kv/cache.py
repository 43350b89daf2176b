"""The KV tensors of the main tier and their layout.

One pool holds every block of the model; all layers of a block are contiguous, so that moving a
block between tiers is one copy. Which block belongs to whom is `kv.block`'s business: here they
are numbers.
"""

import math
from collections.abc import Sequence

import torch

from hillstar.engine.memory import free_memory_bytes
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.pages import zeros


class CacheMemoryError(MemoryError):
    """The KV pool does not fit into the device's memory; says how large it would have been."""


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
        """Allocates the whole pool at once.

        Raises `CacheMemoryError` when it does not fit, and for fewer than 2 blocks, the least a
        pool can work with.
        """
        shape = (
            num_blocks,
            config.num_layers,
            2,
            config.num_kv_heads,
            block_size,
            config.head_dim,
        )
        size_bytes = math.prod(shape) * dtype.itemsize
        refusal = (
            f"cannot allocate {num_blocks} KV blocks ({size_bytes / 2**30:.2f} GiB) on {device}"
        )
        if num_blocks < 2:
            raise CacheMemoryError(
                f"there is room for {num_blocks} KV blocks of {block_size} tokens"
                f" ({math.prod(shape[1:]) * dtype.itemsize} bytes); at least 2 are needed"
            )
        # Asked beforehand on the CPU, where an allocation that is too large succeeds and the
        # process is killed once the pages are touched.
        available = free_memory_bytes() if torch.device(device).type == "cpu" else None
        if available is not None and size_bytes > available:
            raise CacheMemoryError(f"{refusal}: {available / 2**30:.2f} GiB are available")
        try:
            # Zeroed: unwritten slots are masked out of attention, and 0 * NaN would not be 0.
            self.pool = (
                zeros(shape, dtype)
                if torch.device(device).type == "cpu"
                else torch.zeros(shape, dtype=dtype, device=device)
            )
        except (torch.OutOfMemoryError, RuntimeError, MemoryError, OSError) as error:
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
