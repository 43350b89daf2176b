"""Tokenizers from GGUF metadata."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.gguf_file import Metadata
from hillstar.engine.models.tokenizer import build_tokenizer, eos_token_ids, tokenizer_config
from support.tiny_gguf import tokenizer_metadata

ODD_STRINGS = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\n\t x\r\n",
    "naïve café, Ωμέγα, 日本語, اللغة",
    "👩‍👩‍👧 🇫🇷 🦙",
    "\u0000\u0007\u200b\ufeff",
    "don't we'LL I've",
    "x=1000000.25e-10; ½ ² ٣ Ⅷ",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 vs \u00e9",
]


def byte_bpe(pre: str, **changes: Any) -> Tokenizer:
    metadata = tokenizer_metadata(320, pre)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return build_tokenizer(Metadata(metadata, "test.gguf"))


def words(pre: str, text: str) -> list[str]:
    """The pieces of `text` before BPE, spaces shown as GPT-2 shows them."""
    pre_tokenizer = byte_bpe(pre).pre_tokenizer
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ12345", "x"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "x"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5", "x"]),
        ("llama-bpe", ["a", "Ġ", "123", "45", "x"]),
    ],
)
def test_digits(pre: str, pieces: list[str]) -> None:
    """Digits stay whole, stand alone or group by three, as each model was trained."""
    assert words(pre, "a 12345x") == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Don", "'t", "Ġ(", "stop", ")!", "Ċ", "Ċ", "WE", "'", "LL"]),
        ("smollm", ["Don", "'t", "Ġ(", "stop", ")!", "Ċ", "Ċ", "WE", "'", "LL"]),
        ("qwen2", ["Don", "'t", "Ġ(", "stop", ")!ĊĊ", "WE", "'LL"]),
        ("llama-bpe", ["Don", "'t", "Ġ(", "stop", ")!ĊĊ", "WE", "'LL"]),
    ],
)
def test_words_and_punctuation(pre: str, pieces: list[str]) -> None:
    """Contractions, brackets and line ends split as each model was trained."""
    assert words(pre, "Don't (stop)!\n\nWE'LL") == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_round_trip(pre: str) -> None:
    """Any text decodes to itself (Qwen composes accents first)."""
    tokenizer = byte_bpe(pre)
    rng = random.Random(7)
    pool = "".join(ODD_STRINGS)
    texts = ODD_STRINGS + ["".join(rng.choices(pool, k=40)) for _ in range(200)]
    for text in texts:
        expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_only_qwen_normalises() -> None:
    """Qwen composes accents (NFC), the others keep what was written."""
    assert byte_bpe("qwen2").encode("e\u0301").ids == byte_bpe("qwen2").encode("\u00e9").ids
    assert byte_bpe("smollm").encode("e\u0301").ids != byte_bpe("smollm").encode("\u00e9").ids


def test_control_tokens_are_special() -> None:
    """A control token in the text is one id, and is skipped when decoding."""
    tokenizer = byte_bpe("smollm")
    ids = tokenizer.encode("<|im_start|>he<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "he"


def test_bos_is_added_only_where_the_model_wants_it() -> None:
    """`add_bos_token` puts the first token before a text, and only when special ones are asked."""
    assert byte_bpe("llama-bpe").encode("he").ids[0] != 1
    tokenizer = byte_bpe("llama-bpe", add_bos_token=True)
    assert tokenizer.encode("he").ids[0] == 1
    assert tokenizer.encode("he", add_special_tokens=False).ids[0] != 1


def test_llama3_takes_whole_words() -> None:
    """Llama 3 uses a word of its vocabulary although no merge builds it; the others do not."""
    tokens = list(tokenizer_metadata(320)["tokenizer.ggml.tokens"])
    tokens[300] = "xyz"
    assert byte_bpe("llama-bpe", tokens=tokens).encode("xyz").ids == [300]
    assert len(byte_bpe("qwen2", tokens=tokens).encode("xyz").ids) == 3


def sentencepiece(**changes: Any) -> Tokenizer:
    """A SentencePiece BPE that knows "▁hello" by two ways, of which "he" scores best."""
    pieces = {"▁": -9, "h": -10, "e": -11, "l": -12, "o": -13, "▁h": -4, "he": -1, "ll": -2}
    pieces |= {"hell": -3, "hello": -5, "▁hello": -6, "▁he": -7}
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "<tool>"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [float(score) for score in pieces.values()] + [0.0],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    entries = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    return build_tokenizer(Metadata(entries, "test.gguf"))


def test_sentencepiece_merges_by_score() -> None:
    """The pair whose union scores highest merges first."""
    tokenizer = sentencepiece()
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode("he").tokens == ["<s>", "▁he"]
    assert tokenizer.encode("ho").tokens == ["<s>", "▁h", "o"]


def test_sentencepiece_falls_back_to_bytes() -> None:
    """A character outside the vocabulary is its UTF-8 bytes, and decodes back."""
    tokenizer = sentencepiece()
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ODD_STRINGS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentencepiece_space_prefix() -> None:
    """The space before a text is added and removed only where the model has it."""
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert tokenizer.encode("hello").tokens == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


def test_user_defined_tokens_are_whole_and_kept() -> None:
    """A user-defined token is one id and stays in decoded text."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode("<tool>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "<tool>"]
    assert tokenizer.decode(ids) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"pre": "default"}, "'default' is not supported; supported: gpt-2, smollm"),
        ({"merges": None}, r"'tokenizer\.ggml\.merges' is missing"),
        ({"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokens": "abc"}, r"'tokenizer\.ggml\.tokens' is 'abc'; expected a list"),
        ({"merges": [1]}, r"'tokenizer\.ggml\.merges' is 1; expected str"),
        ({"bos_token_id": 320}, "bos_token_id is 320, of 320 tokens"),
        ({"tokens": ["a", "a"]}, "names a token twice"),
        ({"token_type": [1]}, "320 tokens, but 1 token types"),
        ({"merges": ["x nothere"]}, "merge 'x nothere' needs"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    """Unknown kinds, missing and contradictory metadata are refused by name."""
    with pytest.raises(ModelError, match=message):
        byte_bpe(changes.pop("pre", "smollm"), **changes)


def test_settings() -> None:
    """tokenizer_config.json names the special tokens, the length and the template."""
    settings = tokenizer_config(Metadata(tokenizer_metadata(320), "test.gguf"), 512)
    assert settings["bos_token"] == "<|im_start|>"
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["model_max_length"] == 512
    assert "unk_token" not in settings


def test_eos_ids_are_all_ends_of_a_turn() -> None:
    """End of sequence, of turn and of message all end a turn, each id once."""
    key = "tokenizer.ggml.{}_token_id".format
    ids = {key("eos"): 9, key("eot"): 7, key("eom"): 9}
    assert eos_token_ids(Metadata(ids, "test.gguf")) == [7, 9]
    assert eos_token_ids(Metadata({}, "test.gguf")) == []
