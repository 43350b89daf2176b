"""Drafts looked up in what a sequence has said and read so far.

What followed the last few tokens the time before is likely to follow again: names, quotations,
code, and all repetition (prompt lookup decoding, Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). A guess costs a dictionary look-up.
"""

import numpy as np

from hillstar.engine.tokens import TokenBuffer

_LENGTHS = (4, 2)
"""Tokens that must agree. The longer ones first, as what follows them is surer; two tokens catch
what a sequence has just begun to repeat."""


class Lookup:
    """The positions behind every run of tokens of one sequence, kept up as it grows.

    Each token is indexed once, so that a guess does not cost more the longer the context is.
    """

    def __init__(self, tokens: TokenBuffer) -> None:
        self._tokens = tokens
        self._ends: tuple[dict[bytes, int], ...] = tuple({} for _ in _LENGTHS)
        self._num_indexed = 0

    def propose(self, most: int) -> np.ndarray:
        """Up to `most` tokens that may come next: int32 `[n]`, n = 0 when nothing is known."""
        self._index()
        num_tokens = len(self._tokens)
        for length, ends in zip(_LENGTHS, self._ends, strict=True):
            if num_tokens < length:
                continue
            end = ends.get(self._tokens.slice(num_tokens - length, num_tokens).tobytes())
            if end is not None:
                return self._continued(end, most)
        return np.empty(0, dtype=np.int32)

    def _continued(self, end: int, most: int) -> np.ndarray:
        """What followed position `end`; a run that reaches the last token goes on in a circle."""
        num_tokens = len(self._tokens)
        period = self._tokens.slice(end, min(num_tokens, end + most))
        return np.resize(period, most)

    def _index(self) -> None:
        """Note all runs that something follows: the newest place of each."""
        num_tokens = len(self._tokens)
        base = max(0, self._num_indexed - max(_LENGTHS))
        raw = self._tokens.slice(base, num_tokens).tobytes()
        for length, ends in zip(_LENGTHS, self._ends, strict=True):
            for end in range(max(length, self._num_indexed), num_tokens):
                ends[raw[4 * (end - length - base) : 4 * (end - base)]] = end
        self._num_indexed = num_tokens
