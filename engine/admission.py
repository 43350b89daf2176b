"""May a sequence enter the batch? What can ever fit, what fits now, what is being computed."""

from hillstar.engine.kv.manager import BlockManager, Match
from hillstar.engine.sequence import Sequence

PRIOR_OUTPUT_TOKENS = 128.0  # before anything was learned
_LEARNING_RATE = 1 / 16


class OutputLengths:
    """Learns how many tokens a tenant's outputs have: a moving average, and one over all."""

    def __init__(self) -> None:
        self._of_tenant: dict[str, float] = {}
        self._of_all = PRIOR_OUTPUT_TOKENS

    def observe(self, tenant: str, num_output_tokens: int) -> None:
        """An output ended by itself."""
        old = self.expected(tenant)
        self._of_tenant[tenant] = old + _LEARNING_RATE * (num_output_tokens - old)
        self._of_all += _LEARNING_RATE * (num_output_tokens - self._of_all)

    def expected(self, tenant: str) -> float:
        return self._of_tenant.get(tenant, self._of_all)


class Admission:
    """Decides whether a sequence fits, from what it needs now and how far all will grow.

    A watermark of 1 % of the pool stays out of the calculation: estimates err, and giving way
    costs more than waiting.
    """

    def __init__(self, blocks: BlockManager, lengths: OutputLengths) -> None:
        self._blocks = blocks
        self._lengths = lengths
        self._watermark = max(1, blocks.pool.num_blocks // 100)

    def expected_tokens(self, sequence: Sequence) -> int:
        """Tokens whose KV it will hold at its end, as far as one can tell.

        One that has outlived its expectation is given half as much again.
        """
        num_output = sequence.num_output_tokens
        expected = max(self._lengths.expected(sequence.tenant), 1.5 * num_output)
        return sequence.num_prompt_tokens + min(int(expected), sequence.max_output_tokens)

    def outstanding(self, running: list[Sequence]) -> int:
        """Blocks that the running sequences are expected to ask for yet."""
        total = 0
        for sequence in running:
            assert sequence.table is not None
            expected = self._blocks.num_blocks_for(self.expected_tokens(sequence))
            total += max(0, expected - len(sequence.table.blocks))
        return total

    def fits(self, sequence: Sequence, match: Match, outstanding: int) -> bool:
        """Whether the sequence may enter beside running ones that will ask for `outstanding`."""
        needed = self._blocks.num_blocks_for(self.expected_tokens(sequence))
        needed -= self._blocks.num_bound(match)
        return needed + outstanding + self._watermark <= self._blocks.pool.num_available


class Promises:
    """Which full blocks running sequences are about to compute, by identity.

    Whoever waits for the same prefix is held back until it is there: so a prefix that many
    sequences share is computed once.
    """

    def __init__(self) -> None:
        self._owner: dict[bytes, Sequence] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._owner

    def make(self, sequence: Sequence, first: int, end: int) -> None:
        """The sequence will compute its full blocks `first` to `end` (exclusive)."""
        for identity in sequence.chain.between(first, end):
            self._owner.setdefault(identity, sequence)

    def end(self, sequence: Sequence, first: int, end: int) -> None:
        """Those blocks are there now, or will not be computed."""
        for identity in sequence.chain.between(first, end):
            if self._owner.get(identity) is sequence:
                del self._owner[identity]
