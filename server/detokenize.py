"""Token ids to text, one at a time, in constant time and without splitting a character.

A token is first turned into the bytes it stands for, once for the whole vocabulary; the bytes of a
response then run through one incremental UTF-8 decoder. Two kinds of vocabulary exist:

byte level     every character of a token's name stands for one byte (GPT-2, Llama 3, Qwen, SmolLM)
sentencepiece  names are text with U+2581 for a space, and `<0xNN>` for single bytes (Llama 2,
               Mistral); one space at the start of the text may be an artefact to strip

Bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part (Unicode 15, 3.9).
"""

import codecs
import re
from collections.abc import Sequence
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SINGLE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTable:
    """What each token id stands for. Immutable; shared by all decoders of a model.

    texts: the token's text where its bytes are whole characters, else None ("" for a special
    token). encoded: its bytes, b"" for an id that the vocabulary lacks.
    """

    def __init__(
        self, names: Sequence[str | None], special_ids: frozenset[int], decoder: dict[str, Any]
    ) -> None:
        """`names`: the vocabulary by id. `decoder`: that part of `tokenizer.json`.

        Raises ValueError if the decoder is of another kind.
        """
        steps = _steps(decoder)
        self.special_ids = special_ids
        self.num_stripped_spaces = _num_stripped_spaces(steps)
        to_bytes = _byte_level if _is_byte_level(steps) else _sentencepiece
        self.encoded = [b"" if name is None else to_bytes(name) for name in names]
        self.texts = [
            "" if token_id in special_ids else _whole_text(encoded)
            for token_id, encoded in enumerate(self.encoded)
        ]
        self.longest = max(map(len, self.encoded), default=0)  # bytes


class IncrementalDecoder:
    """One response's text as it grows (`events.TextDecoder`)."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._texts = table.texts
        self._num_spaces_to_strip = table.num_stripped_spaces
        self._utf8 = _Utf8Decoder("replace")
        self._is_inside_character = False

    def push(self, token_id: int) -> str:
        """The characters that this token completes; "" for a special or unknown token."""
        try:
            text = self._texts[token_id]
        except IndexError:
            return ""
        if text is None or (self._is_inside_character and text):
            text = self._utf8.decode(self._table.encoded[token_id])
            self._is_inside_character = bool(self._utf8.getstate()[0])
        if self._num_spaces_to_strip and text:
            return self._strip(text)
        return text

    def flush(self) -> str:
        """U+FFFD if the text ends inside a character, else "". Ends the decoder."""
        self._is_inside_character = False
        return self._utf8.decode(b"", final=True)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; a special one: its name."""
        encoded = self._table.encoded
        return encoded[token_id] if token_id < len(encoded) else b""

    def _strip(self, text: str) -> str:
        """Take the leading spaces off the first text; only the very start has any to lose."""
        for _ in range(self._num_spaces_to_strip):
            text = text.removeprefix(" ")
        self._num_spaces_to_strip = 0
        return text


def _whole_text(encoded: bytes) -> str | None:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        return None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder's parts in order. Raises ValueError for one that is not understood."""
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    for step in steps:
        if step.get("type") not in _KNOWN_STEPS:
            raise ValueError(f"the tokenizer's decoder {step.get('type')!r} is not supported")
    return steps


_KNOWN_STEPS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def _is_byte_level(steps: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps)


def _num_stripped_spaces(steps: list[dict[str, Any]]) -> int:
    for step in steps:
        if step["type"] == "Strip" and step.get("content") == " ":
            return int(step.get("start", 0))
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return 1
    return 0


def _byte_of_character() -> dict[str, int]:
    """GPT-2's names of bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return names | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(name: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, name))
    except KeyError:  # an added token is plain text
        return name.encode()


def _sentencepiece(name: str) -> bytes:
    single = _SINGLE_BYTE.fullmatch(name)
    if single is not None:
        return bytes([int(single[1], 16)])
    return name.replace(_SPACE, " ").encode()
