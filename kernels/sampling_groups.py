"""Rows of logits in groups of 32 tokens, for `kernels/sampling.py` and `kernels/logprobs.py`.

A first kernel reads all logits and stores each group's maximum. A second one, a program a row,
finds from the maxima which groups can hold a token that matters, lists them, and reads only those:
* a token above a bound lies in a group whose maximum is;
* the k-th largest maximum is a lower bound of the k-th largest logit, as k groups each hold a
  token that reaches it; it leaves few groups more than k, whatever the distribution.
"""

from typing import Any

import triton.language as tl

from hillstar.kernels.jit import jit
from hillstar.kernels.sampling_race import no_winner, race

GROUP = 32  # tokens: 128 bytes of float32, the unit of memory traffic
CHUNK_GROUPS = 128  # that a program of a first kernel reads
CHUNK = GROUP * CHUNK_GROUPS
SPAN = 128  # groups that a second kernel reads at a time
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of finite float32 values


@jit
def load_logits(row: tl.tensor, tokens: tl.tensor, mask: tl.tensor) -> Any:
    """float32 logits; -inf where masked and for NaN."""
    x = tl.load(row + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@jit
def load_chunk(
    row: tl.tensor, chunk: tl.tensor, vocab: tl.tensor, GROUPS: tl.constexpr, GROUP: tl.constexpr
) -> Any:
    """Logits `[GROUPS, GROUP]` of a chunk, their tokens, and the numbers of its groups."""
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return load_logits(row, tokens, tokens < vocab), tokens, groups


@jit
def weights(x: tl.tensor, highest: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """exp((x - highest) / temperature); 0 for -inf, also where the highest is."""
    return tl.exp((x - tl.maximum(highest, LOWEST)) * inverse)


@jit
def total_weight(
    maxima: tl.tensor, sums: tl.tensor, mask: tl.tensor, highest: tl.tensor, inverse: tl.tensor
) -> Any:
    """A row's sum of weights from its chunks' sums, each relative to the chunk's maximum.

    maxima, sums: pointers. The order of summation depends on the vocabulary alone.
    """
    local = tl.load(maxima, mask=mask, other=float("-inf"))
    return tl.sum(tl.load(sums, mask=mask, other=0.0) * weights(local, highest, inverse), axis=0)


@jit
def _order(bits: tl.tensor) -> tl.tensor:
    """The bits of a float32 as an int32 of the same order, and back: its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _to_order(x: tl.tensor) -> tl.tensor:
    return _order(x.to(tl.int32, bitcast=True)).to(tl.int64)


@jit
def _from_order(order: tl.tensor) -> tl.tensor:
    return _order(order.to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def bound_of_top(
    maxima: tl.tensor, mask: tl.tensor, k: tl.tensor, num_groups: tl.tensor, highest: tl.tensor
) -> tl.tensor:
    """A lower bound of the k-th largest logit that few more than k groups reach.

    maxima: of all groups. Bisects their values until at most k / 8 too many reach the bound;
    -inf where there are fewer groups than k.
    """
    lowest = tl.min(tl.where(mask, maxima, float("inf")), axis=0)
    low = _to_order(tl.where(num_groups < k, float("-inf"), lowest))
    high = _to_order(highest) + 1
    high = tl.where(num_groups < k, low, high)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((mask & (maxima >= _from_order(middle))).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count < k, middle, high)
        high = tl.where((count >= k) & (count <= k + k // 8), low, high)
    return _from_order(low)


@jit
def list_groups(where: tl.tensor, groups: tl.tensor, is_listed: tl.tensor) -> Any:
    """Write the numbers of some groups to `where`; how many there are.

    All threads of the program see what was written.
    """
    place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(where + place, groups, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(is_listed.to(tl.int32), axis=0)


@jit
def load_listed(
    row: tl.tensor,
    listed: tl.tensor,
    start: tl.tensor,
    num_listed: tl.tensor,
    vocab: tl.tensor,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """Logits `[SPAN, GROUP]` of the listed groups from `start` on, their tokens, which exist."""
    place = start + tl.arange(0, SPAN)
    groups = tl.load(listed + place, mask=place < num_listed, other=0)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (place < num_listed)[:, None] & (tokens < vocab)
    return load_logits(row, tokens, exists), tokens, exists


@jit
def kth_largest(
    row: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab: tl.tensor,
    k: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """A threshold that parts the k largest logits, and all that tie with the last, from the rest.

    The groups listed hold them. It lies in `lowest … highest`; `lowest` if fewer than k reach it.
    """
    low, high = _to_order(lowest), _to_order(highest) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        threshold = _from_order(middle)
        counts = tl.zeros([SPAN, GROUP], dtype=tl.int32)
        for start in tl.range(0, num_listed, SPAN):  # pyright: ignore[reportGeneralTypeIssues]
            x, _, exists = load_listed(row, listed, start, num_listed, vocab, SPAN, GROUP)
            counts += (exists & (x >= threshold)).to(tl.int32)
        count = tl.sum(counts, axis=None)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        high = tl.where(count == k, low + 1, high)  # the k wanted: nothing is left to part
    return _from_order(low)


@jit
def _keep(x: tl.tensor, bound: tl.tensor, STRICT: tl.constexpr) -> Any:
    """-inf for what does not reach the bound (STRICT: pass it)."""
    if STRICT:
        return tl.where(x > bound, x, float("-inf"))
    return tl.where(x >= bound, x, float("-inf"))


@jit
def best_above(
    row: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab: tl.tensor,
    bound: tl.tensor,
    temperature: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    STRICT: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The winner of the race among the listed tokens that reach the bound (STRICT: pass it)."""
    score, winner = no_winner()
    for start in tl.range(0, num_listed, SPAN):  # pyright: ignore[reportGeneralTypeIssues]
        x, tokens, _ = load_listed(row, listed, start, num_listed, vocab, SPAN, GROUP)
        x = _keep(x, bound, STRICT)
        score, winner = race(row, x, tokens, temperature, key0, key1, score, winner)
    return winner


@jit
def weight_above(
    row: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab: tl.tensor,
    bound: tl.tensor,
    highest: tl.tensor,
    inverse: tl.tensor,
    STRICT: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """The sum of weights of the listed tokens that reach the bound (STRICT: pass it)."""
    total = tl.zeros([SPAN, GROUP], dtype=tl.float32)
    for start in tl.range(0, num_listed, SPAN):  # pyright: ignore[reportGeneralTypeIssues]
        x, _, _ = load_listed(row, listed, start, num_listed, vocab, SPAN, GROUP)
        total += weights(_keep(x, bound, STRICT), highest, inverse)
    return tl.sum(tl.sum(total, axis=1), axis=0)
