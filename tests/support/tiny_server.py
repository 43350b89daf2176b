"""A servable model folder that loads in an instant: random weights, a real tokenizer."""

from pathlib import Path

from support.tiny_models import save_tiny
from support.tokenizers import write_tokenizer

VOCAB_SIZE = 512


def write_tiny_model(folder: Path) -> Path:
    """A two-layer Llama of 512 tokens with a ChatML template; returns the folder."""
    save_tiny("llama", folder, vocab_size=VOCAB_SIZE)
    return write_tokenizer(folder, vocab_size=VOCAB_SIZE)
