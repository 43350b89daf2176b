"""Block tables and leases over one block pool: sharing, copying, growing, giving up.

The scheduler calls it; it alone touches the pool and the prefix index.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain as chained

import numpy as np

from hillstar.engine.kv.block import BlockPool
from hillstar.engine.kv.prefix import PrefixIndex
from hillstar.engine.sequence import BlockTable
from hillstar.engine.tokens import HashChain, TokenBuffer

_NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What is cached of a sequence's tokens: shared full blocks, then part of one more block."""

    blocks: np.ndarray  # int32 [n]
    source: int | None = None  # its first `num_source_tokens` tokens go on after `blocks`
    num_source_tokens: int = 0


class BlockManager:
    """Owns the pool, the prefix index and the idle leases.

    **Why plans in flight are safe.** The device executes plans in the order they were launched,
    and within a plan: block copies, then the forward pass. Let plan n be unresolved while plan
    n + 1 is made.

    1. *A block is found by its tokens only after they were computed.* `commit` is called when a
       plan has resolved, with the tokens that plan fed; nothing else makes content visible.
    2. *A block that is given up may be given out again at once.* Whatever an older plan still
       writes into it (a sequence that was preempted, cancelled, or ended by a token that came
       back late) is written before the plan that reuses it runs; and the new owner reads only
       positions that its own plans wrote or copied.
    3. *What can be found is never overwritten.* A sequence writes at positions from its committed
       length on, in blocks of its own. Those positions lie beyond the fill of every block that
       can be found, and a full block is never written again: a late write after the sequence's
       end touches nothing that the index promises. Who continues in the partial block (only when
       nobody else holds it) starts at that same fill, in a later plan, and overwrites the rest.
    4. *A copy's source outlives the copy.* Copies run before the forward pass of their own plan,
       so the source must not be given out in that plan: it stays bound until `take_copies`. In
       later plans it may change: they run later.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._index = PrefixIndex(num_blocks, block_size)
        self._idle: OrderedDict[str, BlockTable] = OrderedDict()  # least recently used first
        self._parked: OrderedDict[str, BlockTable] = OrderedDict()  # given up after all of _idle
        self._copies: list[tuple[int, int]] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_tokens_used(self) -> int:
        """Tokens with KV in leased blocks; a shared block counts once."""
        return int(self._index.fill[self.pool.leased_mask()].sum())

    # -- finding ------------------------------------------------------------------------------

    def match(
        self, chain: HashChain, tokens: TokenBuffer, limit: int, lease_id: str | None
    ) -> Match:
        """The longest cached prefix of the first `limit` tokens. Changes nothing.

        Blocks that the lease knows are compared with the tokens, all at once; only beyond them
        are identities computed. Among equally good partial blocks the lease's own is taken.
        """
        num_full = limit // self.block_size
        lease = self._lease(lease_id)
        known = self._adopt(chain, tokens, lease, num_full) if lease else _NO_BLOCKS
        found: list[int] = []
        for index in range(len(known), num_full):
            block = self._index.find(chain.of(index))
            if block is None:
                break
            found.append(block)
        blocks = np.concatenate([known, np.array(found, dtype=np.int32)])
        start = len(blocks) * self.block_size
        partial = self._index.find_longest(
            chain.before(len(blocks)),
            tokens.slice(start, min(limit, start + self.block_size)),
            prefer=int(lease.blocks[-1]) if lease else None,
        )
        return Match(blocks, *partial) if partial else Match(blocks)

    def num_bound(self, match: Match) -> int:
        """How many of the match's shared blocks running sequences hold anyway."""
        return int(np.count_nonzero(self.pool.is_bound(match.blocks)))

    # -- a running sequence's table -------------------------------------------------------------

    def open(self, match: Match, lease_id: str | None) -> tuple[BlockTable, int]:
        """A table that begins with the match, and how many tokens' KV it gives.

        The lease, if there is one, has done its duty: it is dissolved. The last, partial block
        is continued in when nobody else holds it, and copied otherwise (`take_copies`). If there
        is no block for the copy, those few tokens are simply computed again.
        """
        self.pool.bind(match.blocks)
        start = len(match.blocks) * self.block_size
        table = BlockTable(match.blocks, start)
        num_cached = start
        if match.source is not None:
            source = _one(match.source)
            self.pool.bind(source)
            if self._is_free_to_continue(match.source, match.num_source_tokens, lease_id):
                table.extend(source)
                table.num_tokens += match.num_source_tokens
                num_cached = table.num_tokens
            elif self.pool.num_available:
                copy = self._allocate(1)
                self._copies.append((match.source, int(copy[0])))
                table.extend(copy)
                num_cached += match.num_source_tokens
            else:
                self._unbind(source)
        if lease_id is not None:
            self.release(lease_id)
        return table, num_cached

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The (source, destination) copies of the plan being made; its sources are let go."""
        copies = tuple(self._copies)
        self._copies.clear()
        for source, _ in copies:  # one by one: two copies may have the same source
            self._unbind(_one(source))
        return copies

    def room(self, table: BlockTable) -> int:
        """How many tokens the table could hold if it got every available block."""
        return (len(table.blocks) + self.pool.num_available) * self.block_size

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table blocks for `num_tokens` tokens in all; False (and nothing done) if the
        available blocks do not suffice."""
        missing = self.num_blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        table.extend(self._allocate(missing))
        return True

    def commit(
        self, table: BlockTable, chain: HashChain, tokens: TokenBuffer, num_tokens: int
    ) -> None:
        """A plan has resolved: the KV of the first `num_tokens` tokens is there, to be found."""
        while table.num_tokens < num_tokens:
            index = table.num_tokens // self.block_size
            end = min(num_tokens, (index + 1) * self.block_size)
            block = int(table.blocks[index])
            known = tokens.slice(table.num_tokens, end)
            self._index.append(block, chain.before(index), known)
            table.num_tokens = end
            if end % self.block_size == 0:
                self._seal(block, chain.of(index))

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Forget the table's tokens from `num_tokens` on, and blocks that hold nothing else."""
        table.num_tokens = min(table.num_tokens, num_tokens)
        self._unbind(table.cut(self.num_blocks_for(table.num_tokens)), erase=True)

    def close(self, table: BlockTable, *, erase: bool = False) -> None:
        """Let all blocks go, the last one first: it is the first to be evicted.

        With `erase`, what nobody else holds can no longer be found.
        """
        self._unbind(table.cut(0), erase=erase)
        table.num_tokens = 0

    # -- leases ---------------------------------------------------------------------------------

    def keep(self, table: BlockTable, lease_id: str, *, parked: bool = False) -> None:
        """Turn a running sequence's table into an idle lease, the most recently used one."""
        self.trim(table, table.num_tokens)
        self.pool.hold(table.blocks)
        self._unbind(table.blocks)
        self.release(lease_id)
        if len(table.blocks):
            (self._parked if parked else self._idle)[lease_id] = table

    def rename(self, lease_id: str, new_lease_id: str) -> None:
        """A parked sequence has ended: what it held becomes an ordinary idle lease."""
        table = self._parked.pop(lease_id, None)
        if table is not None:
            self.release(new_lease_id)
            self._idle[new_lease_id] = table

    def touch(self, lease_id: str) -> None:
        """The lease will be used soon: it is given up last."""
        if lease_id in self._idle:
            self._idle.move_to_end(lease_id)

    def release(self, lease_id: str, *, erase: bool = False) -> None:
        """End an idle lease, if there is one of this name."""
        table = self._idle.pop(lease_id, None) or self._parked.pop(lease_id, None)
        if table is not None:
            self._drop(table.cut(0), erase=erase)

    def erase(self, match: Match) -> None:
        """What was matched and nobody holds can no longer be found."""
        blocks = match.blocks
        if match.source is not None:
            blocks = np.concatenate([blocks, _one(match.source)])
        cached = blocks[self.pool.num_refs(blocks) == 0]
        self._index.clear(cached)
        self.pool.forget(cached)

    # -- checking -------------------------------------------------------------------------------

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Assert every invariant; `tables` are those of all running sequences."""
        pinned = [_one(source) for source, _ in self._copies]
        tables = list(tables)
        leases = [*self._idle.values(), *self._parked.values()]
        bound = Counter(chained.from_iterable(t.blocks.tolist() for t in tables))
        bound.update(chained.from_iterable(source.tolist() for source in pinned))
        idle = Counter(chained.from_iterable(lease.blocks.tolist() for lease in leases))
        findable = set(np.flatnonzero(self._index.is_findable).tolist())
        self.pool.check(bound, idle, findable - bound.keys() - idle.keys())
        self._index.check()
        assert all(len(lease.blocks) for lease in leases), "an empty lease"
        for table in [*tables, *leases]:
            num_full = table.num_tokens // self.block_size
            assert (self._index.fill[table.blocks[:num_full]] == self.block_size).all()
            self._index.check_table(table.blocks)

    # -- inside ---------------------------------------------------------------------------------

    def _lease(self, lease_id: str | None) -> BlockTable | None:
        if lease_id is None:
            return None
        return self._idle.get(lease_id) or self._parked.get(lease_id)

    def _adopt(
        self, chain: HashChain, tokens: TokenBuffer, lease: BlockTable, num_full: int
    ) -> np.ndarray:
        """The lease's own blocks, as far as they hold the first `num_full` blocks of the tokens.

        The chain learns their identities: each of them can be found, so it is the one block with
        its identity, the same that `find` would have given.
        """
        blocks = lease.blocks[: min(num_full, lease.num_tokens // self.block_size)]
        known = tokens.slice(0, len(blocks) * self.block_size)
        hashes = self._index.known_hashes(chain.root, blocks, known)
        chain.adopt(hashes)
        return blocks[: len(hashes)]

    def _is_free_to_continue(self, block: int, num_tokens: int, lease_id: str | None) -> bool:
        """Whether a sequence that has just bound the block may write behind its tokens."""
        lease = self._lease(lease_id)
        num_own_refs = 2 if lease and lease.blocks[-1] == block else 1
        fill = self._index.fill[block]
        return bool(
            num_tokens == fill < self.block_size
            and self.pool.num_refs(_one(block))[0] == num_own_refs
        )

    def _allocate(self, num_blocks: int) -> np.ndarray:
        """Available blocks for new content: free, else cached, else idle leases'."""
        while (missing := num_blocks - self.pool.num_free - self.pool.num_cached) > 0:
            self._shrink_a_lease(missing)
        if num_blocks > self.pool.num_free:
            self.pool.forget(self.pool.oldest_cached(num_blocks - self.pool.num_free))
        blocks = self.pool.allocate(num_blocks)
        self._index.clear(blocks)
        return blocks

    def _shrink_a_lease(self, num_blocks: int) -> None:
        """Take up to so many blocks from the end of the lease that was used longest ago."""
        leases = self._idle or self._parked
        assert leases, "no lease has any of the available blocks"
        lease_id, table = next(iter(leases.items()))
        self._drop(table.cut(max(0, len(table.blocks) - num_blocks)))
        table.num_tokens = min(table.num_tokens, len(table.blocks) * self.block_size)
        if not len(table.blocks):
            del leases[lease_id]

    def _seal(self, block: int, identity: bytes) -> None:
        """The block is full. If another has the same identity, the one in use stays."""
        other = self._index.find(identity)
        if other is not None:
            if self.pool.num_refs(_one(other))[0]:
                self._index.hide(_one(block))
                return
            self._index.clear(_one(other))
            self.pool.forget(_one(other))
        self._index.seal(block, identity)

    def _unbind(self, blocks: np.ndarray, *, erase: bool = False) -> None:
        self._hide_last(blocks, erase)
        self.pool.unbind(blocks, self._index.is_findable[blocks])

    def _drop(self, blocks: np.ndarray, *, erase: bool = False) -> None:
        self._hide_last(blocks, erase)
        self.pool.drop(blocks, self._index.is_findable[blocks])

    def _hide_last(self, blocks: np.ndarray, erase: bool) -> None:
        if erase:
            self._index.hide(blocks[self.pool.num_refs(blocks) == 1])


def _one(block: int) -> np.ndarray:
    return np.array([block], dtype=np.int32)
