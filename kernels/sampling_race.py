"""The winner of Gumbel's argmax among a tile of tokens, for `kernels/sampling.py`.

The noise is that of `kernels.noise`, step for step. Its logarithms cost several times as much as
reading the logits, so a token's score is first bounded from above by a few operations: E >= v
gives gumbel <= -log(v), and the bits of a float32 v, read as an integer, are 2^23 times something
that is at most log2(v) + 127, by 0.09 at worst. Exact scores are computed for the token of the
highest bound, then the next, until no bound passes the best score: seldom more than two, and
mostly none once a race has a good score from other tiles.
"""

from typing import Any

import triton.language as tl

from hillstar.kernels.jit import jit

LN2 = tl.constexpr(0.6931471805599453)


@jit
def _mix(h: tl.tensor) -> tl.tensor:
    """`fmix32` of the noise's definition, on uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def _noise_word(tokens: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """`h` of the definition: uint32."""
    h = tokens.to(tl.uint32) * 0x9E3779B1 + key0.to(tl.uint32, bitcast=True)
    return _mix(_mix(h) ^ key1.to(tl.uint32, bitcast=True))


@jit
def _gumbel(word: tl.tensor) -> tl.tensor:
    """The noise of a word."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    # -log1p(-v): its series where 1 - v would round v away, seven terms to float32's precision.
    tail = 1.0 / 4 + v * (1.0 / 5 + v * (1.0 / 6 + v * (1.0 / 7)))
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * tail)))
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@jit
def _bound(x: tl.tensor, inverse: tl.tensor, word: tl.tensor) -> tl.tensor:
    """At least logit / temperature + gumbel, rounding included; -inf where x is."""
    scaled = tl.maximum(x, -1e30) * inverse
    bits = word.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    gumbel = (127 + 32) * LN2 + 1e-4 - bits * (LN2 / 2**23)
    return tl.where(x > float("-inf"), scaled + tl.abs(scaled) * 1e-6 + gumbel, float("-inf"))


@jit
def race(
    row: tl.tensor,
    x: tl.tensor,
    tokens: tl.tensor,
    temperature: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    score: tl.tensor,
    winner: tl.tensor,
) -> Any:
    """The best logit / temperature + gumbel of a tile and of the race so far, and its token.

    Ties go to the lowest id. x: the tile's logits; -inf never wins. row: where the logits come
    from; a winner's is read again. score, winner: of the race so far, `no_winner()` at its start.
    """
    bounds = _bound(x, 1.0 / temperature, _noise_word(tokens, key0, key1))
    highest = tl.max(bounds, axis=None)
    while highest > score:
        token = tl.min(tl.where(bounds == highest, tokens, 0x7FFFFFFF), axis=None)
        logit = tl.load(row + token).to(tl.float32)
        exact = tl.div_rn(logit, temperature) + _gumbel(_noise_word(token, key0, key1))
        is_better = (exact > score) | ((exact == score) & (token < winner))
        winner = tl.where(is_better, token, winner)
        score = tl.maximum(exact, score)
        bounds = tl.where(tokens == token, float("-inf"), bounds)
        highest = tl.max(bounds, axis=None)
    return score, winner


@jit
def no_winner() -> Any:
    """The state of a race that nobody has entered: score -inf, token 2^31 - 1."""
    return tl.full([], float("-inf"), dtype=tl.float32), tl.full([], 0x7FFFFFFF, dtype=tl.int32)
