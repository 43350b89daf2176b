"""How long is waited, and when it is enough."""

import random

import pytest

from hillstar.clients.backoff import Backoff, Outage

BACKOFF = Backoff(first_s=1.0, max_s=8.0, give_up_s=60.0)


def test_waits_double_up_to_the_limit_with_jitter() -> None:
    """Attempt n waits between half and all of min(max_s, first_s * 2**n)."""
    source = random.Random(0)
    for attempt, ceiling in enumerate([1, 2, 4, 8, 8, 8]):
        delays = [BACKOFF.delay_s(attempt, source) for _ in range(200)]
        assert ceiling / 2 <= min(delays) < max(delays) <= ceiling
        assert len(set(delays)) > 100


def test_the_wait_stays_finite_after_any_number_of_attempts() -> None:
    """The exponent is bounded."""
    assert BACKOFF.delay_s(10**6, random.Random(0)) <= 8.0


def test_an_outage_ends_at_its_deadline() -> None:
    """The last wait ends at the deadline; after it the outage is final."""
    outage = Outage(BACKOFF, random.Random(0))
    assert outage.failed(100.0) is not None
    assert outage.failed(159.9) == pytest.approx(0.1)
    assert outage.failed(160.0) is None


def test_progress_ends_an_outage() -> None:
    """After something was learned, the next loss has all its time and short waits again."""
    outage = Outage(BACKOFF, random.Random(0))
    for second in range(5):
        outage.failed(float(second))
    outage.over()
    delay_s = outage.failed(1000.0)
    assert delay_s is not None
    assert delay_s <= 1.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"first_s": 0.0}, "first_s"), ({"max_s": 0.01}, "max_s"), ({"give_up_s": -1.0}, "give_up_s")],
)
def test_impossible_values_are_refused(wrong: dict[str, float], field: str) -> None:
    """A back-off that cannot be is a ValueError naming the field."""
    with pytest.raises(ValueError, match=field):
        Backoff(**wrong)
