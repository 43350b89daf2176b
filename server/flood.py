"""Refuses a large frame of very many tiny values, or of huge numbers, before it is decoded.

Sixteen megabytes of `[],[],…` are five million Python objects: gigabytes of memory and seconds of
the event loop for one frame. Long texts are few values, so counting tells them apart, at the
speed of a byte search (JSON) or of skipping from header to header (msgpack).

A decoder is one call that holds the interpreter from its first byte to its last, on whatever
thread. MAX_VALUES and MAX_DIGITS bound that (docs/bench-log.md has figures). JSON is looked
through piece by piece, so that no step of that takes more than some milliseconds.
"""

import re
from collections.abc import Iterator

from hillstar.server.errors import ApiError, invalid

MAX_VALUES = 60_000  # an input of `items.MAX_PARTS` parts has fewer
MAX_DIGITS = 100  # of a number; the decoder's time for an integer grows with their square
_BEFORE_A_VALUE = (b"[", b"{", b",")
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_ALWAYS_FEW_BYTES = MAX_VALUES  # a frame of this size cannot hold enough to matter
_PIECE = 1 << 16


def refuse_json_flood(data: str | bytes) -> None:
    """Raise ApiError if the text holds more than MAX_VALUES values, or a number too long.

    Every value but the first follows one of `[ { ,` outside of strings. Text that is not JSON may
    be miscounted, but only after the place where a decoder stops.
    """
    if len(data) <= _ALWAYS_FEW_BYTES:
        return
    num_values = 0
    for outside in _outside_strings(data):
        num_values += sum(map(outside.count, _BEFORE_A_VALUE))
        if num_values > MAX_VALUES:
            raise _too_many()
        if len(outside) > MAX_DIGITS and _LONG_NUMBER.search(outside):
            raise invalid(
                f"The request holds a number of more than {MAX_DIGITS} digits.", code="too_large"
            )


def _outside_strings(data: str | bytes) -> Iterator[bytes]:
    """What is not inside strings, a piece at a time.

    Without its escapes, a text's quotes alternate between opening and closing a string.
    """
    is_inside = False
    start = 0
    while start < len(data):
        piece = data[start : start + _PIECE]
        start += len(piece)
        if isinstance(piece, str):
            piece = piece.encode("utf-8", "replace")
        if start < len(data) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # it ends in half an escape
            start -= 1
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = bare.split(b'"')
        yield b'"'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def refuse_msgpack_flood(data: bytes) -> None:
    """Raise ApiError if the message holds more than 2 * MAX_VALUES values, keys included.

    Headers follow one another in the order of the values, whatever the nesting.
    """
    if len(data) <= _ALWAYS_FEW_BYTES:
        return
    position = num_values = 0
    while position < len(data):
        num_values += 1
        if num_values > 2 * MAX_VALUES:
            raise _too_many()
        header = data[position]
        position += _FIXED_BYTES[header]
        width = _LENGTH_BYTES.get(header)
        if width is not None:  # the length of the payload stands before it
            position += int.from_bytes(data[position - width : position], "big")
            position += header in _EXTENSIONS


def _too_many() -> ApiError:
    return invalid(f"The request holds too many values; at most {MAX_VALUES}.", code="too_large")


# The length of each kind of bin, ext and str takes so many bytes after the header; the payload of
# an extension has its type, one byte, before it.
_LENGTH_BYTES = {
    0xC4: 1,
    0xC5: 2,
    0xC6: 4,
    0xC7: 1,
    0xC8: 2,
    0xC9: 4,
    0xD9: 1,
    0xDA: 2,
    0xDB: 4,
}
_EXTENSIONS = (0xC7, 0xC8, 0xC9)


def _fixed_bytes(header: int) -> int:
    """The bytes of a value that its header alone determines: all but what a length counts."""
    if 0xA0 <= header <= 0xBF:  # a short str
        return 1 + (header & 0x1F)
    numbers = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
    numbers |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    extensions = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
    containers = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    return 1 + (numbers | extensions | containers | _LENGTH_BYTES).get(header, 0)


_FIXED_BYTES = [_fixed_bytes(header) for header in range(256)]
