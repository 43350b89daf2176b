"""How many tokens to draft: as many as are likely to pay for their place in the step.

A step of T tokens takes about `fixed + per_token * T` seconds, both learnt from the steps that were
taken. A further draft token that will be accepted with probability p is worth taking while
p / per_token, the tokens a second it would add, is more than the step yields without it. Called by
the planner alone.
"""

from dataclasses import dataclass

MAX_DRAFT = 8
"""Draft tokens of one sequence and step. More would rarely all be accepted: 0.9 ** 8 is 0.43."""

_PRIOR_ACCEPTANCE = 0.5  # of a sequence of which nothing is known …
_PRIOR_WEIGHT = 4.0  # … believed as if that had been seen in so many draft tokens
_DECAY = 0.95  # a draft token ago counts so much less: about the last 20 count
_STEP_DECAY = 0.99
_PRIOR_SHARE = 0.03  # of an unknown step of one token, what a further token would add


class DecodeCost:
    """Seconds of a step that only decodes, against its tokens: a line through the last steps.

    `pace.StepCosts` bounds steps with prompts in them, by more than their tokens and from above;
    how many drafts pay is asked for each sequence and step, and wants the likely time, at once.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, tokens, seconds, tokens squared, tokens * seconds

    def observe(self, num_tokens: int, seconds: float) -> None:
        values = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._sums = [_STEP_DECAY * a + b for a, b in zip(self._sums, values, strict=True)]

    def of(self, num_tokens: int) -> tuple[float, float]:
        """Of a step of so many tokens: its seconds, and those that one more would add."""
        weight, tokens, seconds, squares, products = self._sums
        if not weight:
            return 1.0, _PRIOR_SHARE
        mean_tokens, mean_seconds = tokens / weight, seconds / weight
        # Pulled towards the prior while all steps were of about one size.
        prior = _PRIOR_SHARE * mean_seconds
        spread = squares / weight - mean_tokens**2
        together = products / weight - mean_tokens * mean_seconds
        slope = max(0.0, (together + prior) / (spread + 1))
        total = mean_seconds + slope * (num_tokens - mean_tokens)
        return max(total, 0.1 * mean_seconds), slope


@dataclass(slots=True)
class Acceptance:
    """How often one sequence's draft tokens were right, those behind a wrong one not counted."""

    _right: float = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
    _tried: float = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` tokens the first `num_accepted` were right."""
        num_tried = min(num_drafted, num_accepted + 1)
        decay = _DECAY**num_tried
        self._right = decay * self._right + num_accepted
        self._tried = decay * self._tried + num_tried


def num_worthwhile(
    rate: float, most: int, num_tokens: int, num_expected: float, cost: DecodeCost
) -> int:
    """How many draft tokens a sequence should take, up to `most`.

    rate: its acceptance. num_tokens: in the step so far; num_expected: output tokens it will yield.
    """
    probability = 1.0
    for count in range(min(most, MAX_DRAFT)):
        probability *= rate
        seconds, per_token = cost.of(num_tokens + count)
        if probability * seconds <= num_expected * per_token:
            return count
        num_expected += probability
    return min(most, MAX_DRAFT)
