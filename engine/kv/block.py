"""Which blocks of a tier are in use, and how often: counts only, no tokens, no tensors.

Every block is in exactly one state:

    free      nothing worth keeping
    cached    nobody uses it, its content can be found by the prefix index
    idle      only idle leases hold it: a preference, dropped under pressure
    bound     a running sequence (or a copy that is about to read it) holds it

`leased` = idle + bound, and free + cached + leased == total, always.
"""

from collections import OrderedDict
from itertools import islice

import numpy as np


class BlockPool:
    """Owns reference counts and states of the blocks of one tier. The block manager calls it.

    A reference is of one of two kinds. `bind`/`unbind`: a running sequence's; binding. `hold`/
    `drop`: an idle lease's. When a block's last reference goes, `keep` says whether its content
    can still be found (it becomes cached, as the most recently used) or not (it becomes free).

    Blocks come and go by the table: `blocks` is int32 `[n]` without repetitions, `keep` is bool
    `[n]`. What follows the blocks one by one is only what becomes free or cached, or ceases to be.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._bound_refs = np.zeros(num_blocks, dtype=np.int32)
        self._idle_refs = np.zeros(num_blocks, dtype=np.int32)
        self._num_bound = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_leased(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that no running sequence needs: free, cached, idle."""
        return self.num_blocks - self._num_bound

    def num_refs(self, blocks: np.ndarray) -> np.ndarray:
        """int32 `[n]`."""
        refs: np.ndarray = self._bound_refs[blocks] + self._idle_refs[blocks]
        return refs

    def is_bound(self, blocks: np.ndarray) -> np.ndarray:
        """bool `[n]`."""
        mask: np.ndarray = self._bound_refs[blocks] > 0
        return mask

    def leased_mask(self) -> np.ndarray:
        """bool `[num_blocks]`: idle or bound."""
        return (self._bound_refs + self._idle_refs) > 0

    def allocate(self, num_blocks: int) -> np.ndarray:
        """Bind that many free blocks."""
        assert num_blocks <= len(self._free), f"{num_blocks} of {len(self._free)} free blocks"
        first = len(self._free) - num_blocks
        blocks = np.array(self._free[first:][::-1], dtype=np.int32)
        del self._free[first:]
        self._bound_refs[blocks] = 1
        self._num_bound += num_blocks
        return blocks

    def oldest_cached(self, num_blocks: int) -> np.ndarray:
        """The cached blocks that were used longest ago."""
        assert num_blocks <= len(self._cached), f"{num_blocks} of {len(self._cached)} cached"
        return np.fromiter(islice(self._cached, num_blocks), dtype=np.int32, count=num_blocks)

    def forget(self, blocks: np.ndarray) -> None:
        """The content of cached blocks can no longer be found: they are free."""
        for block in blocks.tolist():
            del self._cached[block]
            self._free.append(block)

    def bind(self, blocks: np.ndarray) -> None:
        refs = self._bound_refs[blocks]
        self._take_up(blocks)
        self._bound_refs[blocks] = refs + 1
        self._num_bound += int(np.count_nonzero(refs == 0))

    def unbind(self, blocks: np.ndarray, keep: np.ndarray) -> None:
        refs = self._bound_refs[blocks] - 1
        assert (refs >= 0).all(), f"{blocks[refs < 0]} are not bound"
        self._bound_refs[blocks] = refs
        self._num_bound -= int(np.count_nonzero(refs == 0))
        self._put_by(blocks, keep)

    def hold(self, blocks: np.ndarray) -> None:
        self._take_up(blocks)
        self._idle_refs[blocks] += 1

    def drop(self, blocks: np.ndarray, keep: np.ndarray) -> None:
        refs = self._idle_refs[blocks] - 1
        assert (refs >= 0).all(), f"{blocks[refs < 0]} are not held"
        self._idle_refs[blocks] = refs
        self._put_by(blocks, keep)

    def check(
        self, bound_refs: dict[int, int], idle_refs: dict[int, int], cached: set[int]
    ) -> None:
        """Assert that counts and lists agree with the references that really exist.

        cached: what nobody holds and can be found.
        """
        for block in range(self.num_blocks):
            assert self._bound_refs[block] == bound_refs.get(block, 0), f"bound refs of {block}"
            assert self._idle_refs[block] == idle_refs.get(block, 0), f"idle refs of {block}"
        leased = {*bound_refs, *idle_refs}
        assert self._num_bound == len(bound_refs), "number of bound blocks"
        assert self.num_leased == len(leased), "number of leased blocks"
        assert self._cached.keys() == cached, "what is cached"
        everything = sorted([*self._free, *cached, *leased])
        assert everything == list(range(self.num_blocks)), "every block is in one state"

    def _take_up(self, blocks: np.ndarray) -> None:
        """These are about to be held: those that nobody holds yet are cached no longer."""
        for block in blocks[self.num_refs(blocks) == 0].tolist():
            del self._cached[block]  # a free block is only taken by `allocate`

    def _put_by(self, blocks: np.ndarray, keep: np.ndarray) -> None:
        """References have gone; what nobody holds any more is cached or free."""
        left = self.num_refs(blocks) == 0
        self._cached.update(dict.fromkeys(blocks[left & keep].tolist()))
        self._free += blocks[left & ~keep].tolist()
