"""A small byte-level BPE with a ChatML template: a model folder without a model, made at once."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
{%- if message['role'] == 'assistant' and loop.first -%}
{{ raise_exception('a conversation begins with a user') }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "system user assistant You are a helpful assistant.",
    "a hummingbird flies at full speed all day and sleeps deeply at night",
    "def main(): return 0\n\n    print('hello, world')",
    "Grüße aus Köln, çà et là, 東京 と 大阪, 🐦🐦",
) * 8


def make_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """A byte-level BPE: any text has ids, any byte is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(
    model_dir: Path, *, vocab_size: int = 512, chat_template: str = CHAT_TEMPLATE
) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json` into the folder; returns it."""
    model_dir.mkdir(parents=True, exist_ok=True)
    make_tokenizer(vocab_size).save(str(model_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": chat_template,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model_dir
