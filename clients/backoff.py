"""How long to wait before trying again, and when to stop trying."""

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential back-off with jitter: many clients of one server do not return at once.

    Attempt n waits a time drawn evenly from half of min(max_s, first_s * 2**n) to all of it.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    give_up_s: float = 60.0  # an outage this long is final

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.max_s:
            raise ValueError(f"first_s={self.first_s!r} must be over 0 and at most {self.max_s=!r}")
        if self.give_up_s < 0:
            raise ValueError(f"give_up_s={self.give_up_s!r} must not be negative")

    def delay_s(self, attempt: int, random_source: random.Random) -> float:
        """Seconds to wait before attempt number `attempt`, counted from 0."""
        ceiling = min(self.max_s, self.first_s * 2.0 ** min(attempt, 64))
        return ceiling * random_source.uniform(0.5, 1.0)


@dataclass(slots=True)
class Outage:
    """The time without progress: from the first loss to the next thing learned.

    A connection that opens and closes again is no progress; an event from the server is.
    """

    backoff: Backoff
    random_source: random.Random = field(default_factory=random.Random)
    num_attempts: int = 0
    _began_s: float | None = None

    def failed(self, now_s: float) -> float | None:
        """An attempt failed or a connection was lost: seconds to wait, or None to give up.

        The last wait is cut short so that one attempt is made at the deadline.
        """
        if self._began_s is None:
            self._began_s = now_s
        left_s = self._began_s + self.backoff.give_up_s - now_s
        if left_s <= 0:
            return None
        delay_s = self.backoff.delay_s(self.num_attempts, self.random_source)
        self.num_attempts += 1
        return min(delay_s, left_s)

    def over(self) -> None:
        """Something was learned from the server: the next loss starts afresh."""
        self.num_attempts = 0
        self._began_s = None
