"""Which blocks of a tier are in use, and how often: counts only, no tokens, no tensors.

Every block is in exactly one state:

    free      nothing worth keeping
    cached    nobody uses it, its content can be found by the prefix index
    idle      only idle leases hold it: a preference, dropped under pressure
    bound     a running sequence (or a copy that is about to read it) holds it

`leased` = idle + bound, and free + cached + leased == total, always.
"""

from array import array
from collections import OrderedDict

import numpy as np

FREE, CACHED, IDLE, BOUND = range(4)


class BlockPool:
    """Owns reference counts and states of the blocks of one tier. The block manager calls it.

    A reference is of one of two kinds. `bind`/`unbind`: a running sequence's; binding. `hold`/
    `drop`: an idle lease's. When the last reference goes, `keep` says whether the block's content
    can still be found (it becomes cached, as the most recently used) or not (it becomes free).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._bound_refs = array("i", [0]) * num_blocks
        self._idle_refs = array("i", [0]) * num_blocks
        self._state = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._counts = [num_blocks, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    @property
    def num_cached(self) -> int:
        return self._counts[CACHED]

    @property
    def num_leased(self) -> int:
        return self._counts[IDLE] + self._counts[BOUND]

    @property
    def num_available(self) -> int:
        """Blocks that no running sequence needs: free, cached, idle."""
        return self.num_blocks - self._counts[BOUND]

    def state(self, block: int) -> int:
        return self._state[block]

    def is_bound(self, block: int) -> bool:
        return self._state[block] == BOUND

    def num_refs(self, block: int) -> int:
        return self._bound_refs[block] + self._idle_refs[block]

    def leased_mask(self) -> np.ndarray:
        """bool `[num_blocks]`: idle or bound."""
        return np.frombuffer(self._state, dtype=np.uint8) >= IDLE

    def allocate(self) -> int | None:
        """Bind a free block; None when there is none."""
        if not self._free:
            return None
        block = self._free[-1]
        self.bind(block)
        return block

    def oldest_cached(self) -> int | None:
        """The cached block that was used longest ago."""
        return next(iter(self._cached), None)

    def forget(self, block: int) -> None:
        """A cached block's content can no longer be found: it is free."""
        assert self._state[block] == CACHED, f"block {block} is not cached"
        self._move(block, FREE)

    def bind(self, block: int) -> None:
        self._bound_refs[block] += 1
        self._settle(block, keep=True)

    def unbind(self, block: int, *, keep: bool) -> None:
        assert self._bound_refs[block] > 0, f"block {block} is not bound"
        self._bound_refs[block] -= 1
        self._settle(block, keep=keep)

    def hold(self, block: int) -> None:
        self._idle_refs[block] += 1
        self._settle(block, keep=True)

    def drop(self, block: int, *, keep: bool) -> None:
        assert self._idle_refs[block] > 0, f"block {block} is not held"
        self._idle_refs[block] -= 1
        self._settle(block, keep=keep)

    def check(self, bound_refs: dict[int, int], idle_refs: dict[int, int]) -> None:
        """Assert that states, counts and lists agree with the references that really exist."""
        for block in range(self.num_blocks):
            assert self._bound_refs[block] == bound_refs.get(block, 0), f"bound refs of {block}"
            assert self._idle_refs[block] == idle_refs.get(block, 0), f"idle refs of {block}"
            if self._bound_refs[block]:
                assert self._state[block] == BOUND, f"state of {block}"
            elif self._idle_refs[block]:
                assert self._state[block] == IDLE, f"state of {block}"
            else:
                assert self._state[block] in (FREE, CACHED), f"state of {block}"
        for state in (FREE, CACHED, IDLE, BOUND):
            assert self._counts[state] == self._state.count(state), f"count of state {state}"
        assert sorted(self._free) == [b for b, s in enumerate(self._state) if s == FREE]
        assert sorted(self._cached) == [b for b, s in enumerate(self._state) if s == CACHED]
        assert self.num_free + self.num_cached + self.num_leased == self.num_blocks

    def _settle(self, block: int, *, keep: bool) -> None:
        if self._bound_refs[block]:
            state = BOUND
        elif self._idle_refs[block]:
            state = IDLE
        else:
            state = CACHED if keep else FREE
        if state != self._state[block]:
            self._move(block, state)

    def _move(self, block: int, state: int) -> None:
        old = self._state[block]
        if old == FREE:
            popped = self._free.pop()
            assert popped == block, "a free block is only taken by allocate"
        elif old == CACHED:
            del self._cached[block]
        if state == FREE:
            self._free.append(block)
        elif state == CACHED:
            self._cached[block] = None
        self._counts[old] -= 1
        self._counts[state] += 1
        self._state[block] = state
