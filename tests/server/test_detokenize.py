"""Tokens to text against whole decoding by the tokenizers library."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from hillstar.server.detokenize import IncrementalDecoder, TokenTable
from support.tokenizers import SPECIAL_TOKENS, make_tokenizer

TOKENIZER = make_tokenizer()
NAMES = [TOKENIZER.id_to_token(i) for i in range(TOKENIZER.get_vocab_size())]
TABLE = TokenTable(NAMES, frozenset(range(len(SPECIAL_TOKENS))), {"type": "ByteLevel"})

SENTENCEPIECE: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
WORDS = ["<s>", "▁", "▁hello", "lo", "▁▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
SENTENCEPIECE_TABLE = TokenTable(WORDS, frozenset({0}), SENTENCEPIECE)


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def decode(table: TokenTable, token_ids: list[int]) -> str:
    decoder = IncrementalDecoder(table)
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


@given(token_ids=st.lists(st.integers(0, len(NAMES) - 1), max_size=60))
def test_byte_level_equals_whole_decoding(token_ids: list[int]) -> None:
    """Any tokens, ill-formed bytes included, give the text of a whole decode."""
    assert decode(TABLE, token_ids) == TOKENIZER.decode(token_ids, skip_special_tokens=True)


@given(text=st.text(max_size=30))
def test_byte_level_round_trip(text: str) -> None:
    """Any text comes back from its ids, one whole character or none at a time."""
    decoder = IncrementalDecoder(TABLE)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    parts = list(map(decoder.push, ids))
    assert decoder.flush() == ""
    if "<|" not in text:
        assert "".join(parts) == text


@given(parts=st.lists(st.sampled_from(["<s>", "▁", "▁hello", "lo", "▁▁", "é", "🐦", "\n"])))
def test_sentencepiece_equals_whole_decoding(parts: list[str]) -> None:
    """Spaces, byte fallback and the leading space come out as the library has them."""
    token_ids: list[int] = []
    for part in parts:
        if part in WORDS:
            token_ids.append(WORDS.index(part))
        else:
            token_ids += [WORDS.index(f"<0x{byte:02X}>") for byte in part.encode()]
    assert decode(SENTENCEPIECE_TABLE, token_ids) == sentencepiece().decode(token_ids)


def test_added_tokens_are_plain_text() -> None:
    """A name that is not made of byte characters stands for itself."""
    table = TokenTable(["<tool call>", "Ġa", None], frozenset(), {"type": "ByteLevel"})
    assert decode(table, [0, 1, 2]) == "<tool call> a"
    assert IncrementalDecoder(table).token_bytes(2) == b""


def test_special_and_unknown_ids_say_nothing() -> None:
    """A special token inside a character does not break it; ids outside the vocabulary are mute."""
    bird = [NAMES.index(name) for name in "ðŁķĬ"]
    assert decode(TABLE, [bird[0], 1, *bird[1:], len(NAMES) + 5]) == "🕊"
    assert IncrementalDecoder(TABLE).token_bytes(1) == b"<|im_start|>"


@pytest.mark.parametrize("decoder", [{"type": "WordPiece"}, {"type": "CTC"}, {}])
def test_unknown_decoders_are_refused(decoder: dict[str, Any]) -> None:
    """A decoder that is not understood is an error that names it, not wrong text."""
    with pytest.raises(ValueError, match="not supported"):
        TokenTable(["a"], frozenset(), decoder)
