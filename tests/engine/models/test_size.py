"""How much memory KV takes."""

from hillstar.engine.models.config import ModelConfig, RopeConfig
from hillstar.engine.models.size import kv_groups

LLAMA_8B = ModelConfig(
    architecture="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)


def test_sizes_of_an_8b() -> None:
    """A Llama-3-8B has 128 KiB of bf16 KV a token and 2 MiB a block of 16."""
    [group] = kv_groups(LLAMA_8B, "bfloat16", 16)
    assert group.bytes_per_token == 128 << 10
    assert group.bytes_per_block == 2 << 20
    assert group.num_layers == 32


def test_tokens_come_in_whole_blocks() -> None:
    """Memory holds whole blocks only: a byte less than two blocks is one block's tokens."""
    [group] = kv_groups(LLAMA_8B, "float32", 16)
    assert group.tokens_that_fit(2 * group.bytes_per_block) == 32
    assert group.tokens_that_fit(2 * group.bytes_per_block - 1) == 16
    assert group.blocks_that_fit(0) == 0
