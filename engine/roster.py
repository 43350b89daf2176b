"""Who is in the batch, and what each member holds: a row, a block table, promised blocks."""

import bisect

from hillstar.engine.admission import Promises
from hillstar.engine.kv.manager import BlockManager, Match
from hillstar.engine.sequence import BlockTable, Sequence


class Roster:
    """Owns the running sequences, in order of rank, and the rows of the device's state.

    A row is given to another sequence only when every plan that names its old one has resolved.
    """

    def __init__(self, blocks: BlockManager, promises: Promises, max_num_seqs: int) -> None:
        self._blocks = blocks
        self._promises = promises
        self._running: list[Sequence] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._retired_rows: dict[int, list[int]] = {}  # the last step that names them -> rows

    @property
    def running(self) -> list[Sequence]:
        """Not to be changed; the last one gives way first."""
        return self._running

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens that launched plans put into the members' own blocks; uncommitted yet."""
        return sum(s.num_planned - s.table.num_tokens for s in self._running if s.table)

    def enter(self, sequence: Sequence, match: Match) -> int:
        """Give the sequence a row and a table; returns how many tokens' KV it begins with."""
        sequence.table, num_cached = self._blocks.open(match, sequence.resting_id)
        sequence.resting_id = None
        sequence.row = self._free_rows.pop()
        sequence.num_planned = num_cached
        sequence.num_sent_blocks = 0
        bisect.insort(self._running, sequence, key=_rank)
        num_full = len(sequence.tokens) // self._blocks.block_size
        self._promises.make(sequence, len(match.blocks), num_full)
        return num_cached

    def leave(self, sequence: Sequence) -> BlockTable:
        """Take row and table away; the caller says what becomes of the blocks."""
        table = sequence.table
        assert table is not None, f"{sequence.sequence_id} does not run"
        size = self._blocks.block_size
        self._promises.end(sequence, table.num_tokens // size, len(sequence.tokens) // size)
        index = bisect.bisect_left(self._running, sequence.rank, key=_rank)
        assert self._running[index] is sequence, f"{sequence.sequence_id} is not on the roster"
        del self._running[index]
        if sequence.num_in_flight:
            self._retired_rows.setdefault(sequence.last_step, []).append(sequence.row)
        else:
            self._free_rows.append(sequence.row)
        sequence.table = None
        sequence.row = -1
        sequence.num_planned = 0
        return table

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """A plan has resolved: the KV of the sequence's first `num_tokens` tokens is there."""
        assert sequence.table is not None, f"{sequence.sequence_id} does not run"
        size = self._blocks.block_size
        first, end = sequence.table.num_tokens // size, num_tokens // size
        self._blocks.commit(sequence.table, sequence.chain, sequence.tokens, num_tokens)
        if first < end:
            self._promises.end(sequence, first, end)

    def resolved(self, step: int) -> None:
        """No plan up to this step is in flight any more."""
        self._free_rows += self._retired_rows.pop(step, [])

    def check(self) -> None:
        """Assert that members, tables and rows agree."""
        assert self._running == sorted(self._running, key=_rank)
        rows = [sequence.row for sequence in self._running]
        retired = [row for group in self._retired_rows.values() for row in group]
        everything = sorted([*rows, *retired, *self._free_rows])
        assert everything == list(range(len(everything))), "every row is in one place"
        self._blocks.check([s.table for s in self._running if s.table is not None])


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
