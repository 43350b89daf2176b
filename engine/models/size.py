"""How much memory a model takes: its KV (what `hillstar size` prints), its weights of 4 bits."""

from dataclasses import dataclass
from pathlib import Path

from hillstar.engine.config import DTypeName
from hillstar.engine.models.config import ModelConfig

Q4_FOLDER = "q4"
"""In a model's folder: its 4-bit matrices as they were quantised, see `q4`."""

DTYPE_BYTES: dict[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose KV has one shape and lies in the same blocks."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeName
    block_size: int  # tokens a block
    window: int | None  # a token sees only the last `window` tokens; None: all

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) * layers * KV heads * head dim * bytes of a value."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return values * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_that_fit(self, memory_bytes: int) -> int:
        """Whole blocks in `memory_bytes`."""
        return memory_bytes // self.bytes_per_block

    def tokens_that_fit(self, memory_bytes: int) -> int:
        """Tokens in the whole blocks that fit in `memory_bytes`."""
        return self.blocks_that_fit(memory_bytes) * self.block_size


def kv_groups(config: ModelConfig, dtype: DTypeName, block_size: int) -> tuple[KVGroup, ...]:
    """The model's KV groups; one, as all its layers have one shape."""
    group = KVGroup(
        name="attention",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        block_size=block_size,
        window=config.sliding_window,
    )
    return (group,)


def q4_bytes(model_dir: Path) -> int:
    """What the matrices that a model has in 4 bits as well take, on disk and in memory."""
    return sum(path.stat().st_size for path in model_dir.glob(f"{Q4_FOLDER}/*.safetensors"))
