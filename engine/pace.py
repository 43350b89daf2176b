"""How many prompt tokens may join a step that carries decoders.

A sequence that generates gets one token a step, so its inter-token latency is the length of a
step, and a prompt beside it is fed in chunks small enough that the step keeps to a target. How
long a step will take is learnt from how long steps took, as

    seconds = fixed + per token + per token of context + per pair of query and key

(weights are read once a step and multiplied once a token; a row's context is read once; in a
prefill each query meets all keys before it, which makes a chunk dearer the later it comes). Called
by the planner alone.
"""

from dataclasses import dataclass

import numpy as np

MIN_CHUNK = 64
"""Prompt tokens that a step may always take, however slow it is: so a prompt is done some day.
About 2 ms of an 8B model on an H200, 40 ms of a small one on two cores (2026-11-29)."""

_NUM_STEPS = 64  # remembered of each kind
_SEEN_FACTOR = 2  # how far beyond what was seen the costs are believed
_SAFETY = 0.9  # the part of the remembered steps that the prediction shall cover
_TOKENS_WEIGHT = 4.0  # beside 1 for each other cost, where the steps leave open which it was
_NUM_ROUNDS = 4  # of reweighting
_EXACT = 0.02  # relative errors below are all alike: weights stay finite
_DEPENDENT = 1e-3  # singular values below this part of the largest: the steps leave it open


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes, as far as its length depends on it."""

    num_tokens: int = 0
    num_context_tokens: int = 0  # whose keys and values are read, row by row
    num_pairs: int = 0  # of a query and a key it may see, in rows that feed several tokens

    def plus(self, start: int, num_tokens: int, *, is_draft: bool = False) -> "Load":
        """With one more row, which feeds `num_tokens` tokens from position `start` on.

        is_draft: all but the first are drafted; few, and read beside each other.
        """
        is_prefill = num_tokens > 1 and not is_draft
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2 if is_prefill else 0
        return Load(
            self.num_tokens + num_tokens,
            self.num_context_tokens + start + num_tokens,
            self.num_pairs + pairs,
        )


class StepCosts:
    """Owns the last steps, with and without prefills in them, and what they say of the costs.

    Least absolute relative errors (by least squares, reweighted), so that neither long steps nor
    stalls outweigh the others; no cost is negative. What the steps leave open is put down to
    tokens: products are most of most steps, and it is the cautious choice for a chunk. Steps
    without prefills are remembered apart: there may be thousands of them between two prompts.
    """

    def __init__(self) -> None:
        self._loads = np.zeros((2, _NUM_STEPS, 4))  # [without or with prefill, step, feature]
        self._seconds = np.zeros((2, _NUM_STEPS))
        self._counts = [0, 0]
        self._costs: np.ndarray | None = np.zeros(4)  # None: to be fitted

    def observe(self, load: Load, seconds: float) -> None:
        """A step took this long."""
        kind = int(load.num_pairs > 0)
        index = self._counts[kind] % _NUM_STEPS
        self._loads[kind, index] = _features(load)
        self._seconds[kind, index] = seconds
        self._counts[kind] += 1
        self._costs = None

    def seconds(self, load: Load) -> float:
        """How long a step would take, with nine in ten of those remembered on the safe side.

        0 while nothing is known.
        """
        return float(_features(load) @ self._fitted())

    def largest_chunk(self, load: Load, start: int, most: int, target_s: float) -> int:
        """How many tokens of a prompt, from position `start` on, may join a step with `load` that
        shall take no longer than `target_s`: 0 to `most`. It grows step by step: twice what was
        seen at most."""
        low, high = 0, max(0, min(most, self._most_tokens() - load.num_tokens))
        costs = self._fitted()
        while low < high:
            middle = (low + high + 1) // 2
            if float(_features(load.plus(start, middle)) @ costs) <= target_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _most_tokens(self) -> int:
        return int(_SEEN_FACTOR * self._loads[1, :, 1].max())

    def _fitted(self) -> np.ndarray:
        """Seconds of each feature; zeros while nothing is known."""
        if self._costs is None:
            counts = [min(count, _NUM_STEPS) for count in self._counts]
            kinds = [
                (self._loads[kind, :count], self._seconds[kind, :count])
                for kind, count in enumerate(counts)
                if count
            ]
            self._costs = _fit(kinds)
            loads, seconds = kinds[-1]  # with prefills, if there were any
            # More than none: a step has a load and takes time.
            ratios = seconds / np.maximum(loads @ self._costs, 1e-9)
            self._costs *= max(1.0, float(np.quantile(ratios, _SAFETY, method="lower")))
        return self._costs


class Pace:
    """Keeps steps that carry decoders to a target; owns what is known of steps' costs."""

    def __init__(self, target_s: float | None) -> None:
        """target_s: how long such a step may take; None: as long as it takes."""
        self._target_s = target_s
        self._costs = StepCosts()

    def observe(self, load: Load, seconds: float) -> None:
        """A step took this long, from the end of the one before it if that was later than its
        launch."""
        if self._target_s is not None:
            self._costs.observe(load, seconds)

    def chunk(self, load: Load, num_prefill_tokens: int, start: int, most: int) -> int:
        """How many of `most` tokens of a prompt, from `start` on, may join a step with decoders.

        load: of the step so far; num_prefill_tokens: prompt tokens in it.
        """
        if self._target_s is None or most <= 1:
            return most
        least = min(most, max(0, MIN_CHUNK - num_prefill_tokens))
        return max(least, self._costs.largest_chunk(load, start, most, self._target_s))


def _features(load: Load) -> np.ndarray:
    return np.array((1.0, load.num_tokens, load.num_context_tokens, load.num_pairs))


def _fit(kinds: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The costs `[4]`, none negative, that explain the steps best.

    kinds: of each kind the loads `[n, 4]` and the seconds `[n]` of its steps.
    """
    # Relative errors; but a step that was seen late leaves a short one behind it.
    weights = np.concatenate([1 / np.maximum(s, np.median(s) / 2) for _, s in kinds])
    targets = weights * np.concatenate([seconds for _, seconds in kinds])
    loads = np.concatenate([loads for loads, _ in kinds])
    # What stays open is shared out by these scales (the smallest solution in them is taken).
    scales = np.array((1.0, _TOKENS_WEIGHT, 1.0, 1.0)) / np.maximum(loads.max(axis=0), 1)
    rows = loads * scales * weights[:, None]
    costs: np.ndarray = np.zeros(4)
    trust: np.ndarray = np.ones(len(targets))
    for _ in range(_NUM_ROUNDS):
        costs = _least_squares(rows * trust[:, None], targets * trust)
        trust = 1 / np.sqrt(np.maximum(np.abs(targets - rows @ costs), _EXACT))
    found: np.ndarray = costs * scales
    return found


def _least_squares(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The smallest solution without negative elements, dropping the worst one at a time."""
    active = np.ones(rows.shape[1], dtype=bool)
    while True:
        found: np.ndarray = np.zeros(len(active))
        found[active] = np.linalg.lstsq(rows[:, active], targets, rcond=_DEPENDENT)[0]
        if found.min() >= 0:
            return found
        active[found.argmin()] = False
