"""The engine's configuration: one frozen value, validated when it is built.

Built once at the entry point (the CLI or an embedding program) and handed to the engine
process as it is. Nothing below the entry point reads the environment.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

DTypeName = Literal["float32", "bfloat16", "float16"]
DeviceName = Literal["cpu", "cuda"]


class ConfigError(ValueError):
    """A setting has a value outside its range.

    The message is one line that names the field, the value and what is allowed.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}: {value!r} is not allowed; expected {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything one engine replica needs to know.

    Exactly one of `num_blocks` and `kv_memory_bytes` says how large the main KV tier is.
    """

    model_dir: Path  # a Hugging Face folder: config.json, *.safetensors, tokenizer
    model_name: str  # the name clients use
    device: DeviceName = "cpu"
    dtype: DTypeName = "bfloat16"
    block_size: int = 16  # tokens a block
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    max_model_len: int = 8192  # tokens of prompt + output of one sequence
    max_num_seqs: int = 64  # sequences in the batch at once
    max_batched_tokens: int = 1024  # tokens fed in one step (the chunk size of prefill)
    deterministic: bool = False  # a response's tokens do not depend on what runs beside it
    speculation: bool = True  # draft tokens and check them, where that is faster: on a CPU
    inter_token_target_ms: int | None = None  # of running sequences, while prompts are prefilled
    max_waiting: int = 4096  # sequences queued before `server_overloaded`

    def __post_init__(self) -> None:
        def positive(field: str, value: int, low: int = 1, high: int = 1 << 31) -> None:
            if not low <= value <= high:
                raise ConfigError(field, value, f"an integer from {low} to {high}")

        if self.block_size & (self.block_size - 1) or not 8 <= self.block_size <= 256:
            raise ConfigError("block_size", self.block_size, "a power of two from 8 to 256")
        positive("max_model_len", self.max_model_len, 16)
        positive("max_num_seqs", self.max_num_seqs, 1, 4096)
        positive("max_batched_tokens", self.max_batched_tokens, self.block_size)
        positive("max_waiting", self.max_waiting)
        if self.inter_token_target_ms is not None:
            positive("inter_token_target_ms", self.inter_token_target_ms, 1, 60_000)
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_batched_tokens",
                self.max_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs}): every running sequence"
                " needs one token a step",
            )
        if (self.num_blocks is None) == (self.kv_memory_bytes is None):
            raise ConfigError(
                "num_blocks", self.num_blocks, "exactly one of num_blocks and kv_memory_bytes"
            )
        if self.num_blocks is not None:
            positive("num_blocks", self.num_blocks, 2)
        if self.kv_memory_bytes is not None:
            positive("kv_memory_bytes", self.kv_memory_bytes, 1 << 16, 1 << 50)

    @property
    def inter_token_target_s(self) -> float | None:
        """In seconds; None: no target."""
        return None if self.inter_token_target_ms is None else self.inter_token_target_ms / 1e3

    def replace(self, **changes: object) -> Self:
        """A copy with `changes`, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
