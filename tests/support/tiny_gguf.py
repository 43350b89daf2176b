"""Writes a transformers model as a GGUF file, the way the format lays it out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}"


def byte_vocabulary(vocab_size: int) -> list[str]:
    """Three control tokens, the 256 bytes, "he", and fillers up to `vocab_size`."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens += [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    return tokens + [f"<filler{i}>" for i in range(vocab_size - len(tokens))]


def tokenizer_metadata(vocab_size: int, pre: str = "smollm") -> dict[str, Any]:
    """`tokenizer.*` metadata of a byte-level BPE with a single merge."""
    tokens = byte_vocabulary(vocab_size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 257 + [5] * (len(tokens) - 260),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Save `model` with its matrices quantised as asked.

    metadata replaces entries (None removes one; a leading "." stands for the architecture),
    `without` names tensors to leave out, `extra` adds some; both by their GGUF names.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, arch)
    entries = {
        ".block_count": config.num_hidden_layers,
        ".context_length": config.max_position_embeddings,
        ".embedding_length": config.hidden_size,
        ".feed_forward_length": config.intermediate_size,
        ".attention.head_count": config.num_attention_heads,
        ".attention.head_count_kv": config.num_key_value_heads,
        ".attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        ".attention.key_length": getattr(config, "head_dim", None),
        ".rope.freq_base": config.rope_parameters["rope_theta"],
        **tokenizer_metadata(config.vocab_size),
        **(metadata or {}),
    }
    for name, value in entries.items():
        _add(writer, name if name[0] != "." else arch + name, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            index, _, rest = stem.removeprefix("model.layers.").partition(".")
            stem, prefix = rest, f"blk.{index}."
        else:
            prefix = ""
        value = tensor.numpy()
        if arch == "llama" and _NAMES[stem] in heads:
            value = interleaved(value, heads[_NAMES[stem]])
        gguf_name = f"{prefix}{_NAMES[stem]}.{kind}"
        if gguf_name in without:
            continue
        dtype = quantisation if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, gguf.quants.quantize(value, dtype), raw_dtype=dtype)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (half, pair) of each head -> rows (pair, half), as a llama GGUF stores Q and K."""
    halves = value.reshape(num_heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)
