"""Block tables over one pool: what is shared, copied, continued, kept and given up."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hillstar.engine.kv.manager import BlockManager
from hillstar.engine.sequence import BlockTable
from hillstar.engine.tokens import HashChain, TokenBuffer, root_hash

SIZE = 4
ids = st.integers(1, 2)


class _Owner:
    """A sequence as the manager sees it; computes at once."""

    def __init__(self, blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> None:
        self.blocks = blocks
        self.tokens = TokenBuffer(np.array(tokens, dtype=np.int32))
        self.chain = HashChain(root_hash(b"", salt), self.tokens, SIZE)
        self.table = BlockTable()
        self.num_cached = 0

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self.tokens.slice(0, len(self.tokens))]

    @property
    def held(self) -> list[int]:
        blocks: list[int] = self.table.blocks.tolist()
        return blocks

    def num_matching(self, lease_id: str | None = None) -> int:
        match = self.blocks.match(self.chain, self.tokens, len(self.tokens) - 1, lease_id)
        return len(match.blocks) * SIZE + match.num_source_tokens

    def open(self, lease_id: str | None = None) -> tuple[tuple[int, int], ...]:
        match = self.blocks.match(self.chain, self.tokens, len(self.tokens) - 1, lease_id)
        self.table, self.num_cached = self.blocks.open(match, lease_id)
        return self.blocks.take_copies()

    def fill(self) -> bool:
        if not self.blocks.grow(self.table, len(self.tokens)):
            return False
        self.blocks.commit(self.table, self.chain, self.tokens, len(self.tokens))
        return True

    def say(self, *new: int) -> bool:
        for token in new:
            self.tokens.append(token)
        return self.fill()


def _run(blocks: BlockManager, tokens: list[int], salt: bytes = b"") -> _Owner:
    owner = _Owner(blocks, tokens, salt)
    owner.open()
    assert owner.fill()
    return owner


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    """A fork in the middle of a block shares what is before it and copies that one block."""
    blocks = BlockManager(8, SIZE)
    first = _run(blocks, [1, 2, 3, 4, 5, 6, 7])
    fork = _Owner(blocks, [1, 2, 3, 4, 5, 6, 9, 9])
    copies = fork.open()
    assert fork.num_cached == 6
    assert fork.table.blocks[0] == first.table.blocks[0]
    assert copies == ((first.held[1], fork.held[1]),)
    assert fork.fill()
    blocks.check([first.table, fork.table])


def test_a_full_block_can_be_the_source_of_a_copy() -> None:
    """Forking inside a block that is full shares its beginning too."""
    blocks = BlockManager(8, SIZE)
    first = _run(blocks, [1, 2, 3, 4, 5])
    fork = _Owner(blocks, [1, 2, 9])
    assert fork.open() == ((first.held[0], fork.held[0]),)
    assert fork.num_cached == 2


def test_the_last_token_is_always_computed_again() -> None:
    """Logits are needed: of a prompt that is cached as a whole, all but one token is found."""
    blocks = BlockManager(8, SIZE)
    first = _run(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    again = _Owner(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    again.open()
    assert again.num_cached == 7
    blocks.check([first.table, again.table])


def test_a_lease_goes_on_in_its_own_partial_block() -> None:
    """The next turn of a session continues where it was, without a copy."""
    blocks = BlockManager(8, SIZE)
    turn = _run(blocks, [1, 2, 3, 4, 5, 6])
    held = turn.held
    blocks.keep(turn.table, "chat")
    following = _Owner(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert following.open("chat") == ()
    assert following.num_cached == 6
    assert following.held == held
    blocks.check([following.table])


def test_a_next_turn_hashes_only_what_its_lease_does_not_know() -> None:
    """Blocks of the lease are known by their tokens: only identities of new blocks are computed."""
    blocks = BlockManager(40, SIZE)
    context = [index % 7 + 1 for index in range(100)]
    turn = _run(blocks, context)
    assert turn.chain.num_hashed == 25
    blocks.keep(turn.table, "chat")
    following = _Owner(blocks, [*context, 1, 2, 3, 4, 5, 6])
    following.open("chat")
    assert (following.num_cached, following.chain.num_hashed) == (100, 1)  # the first new block
    assert following.fill()
    assert following.chain.num_hashed == 1
    following.say(7, 8)
    assert following.chain.num_hashed == 2
    same = _Owner(blocks, following.ids)
    assert following.chain.between(0, 27) == same.chain.between(0, 27)
    blocks.check([following.table])


def test_a_lease_says_nothing_about_what_follows_a_difference() -> None:
    """A prompt that leaves its lease's tokens is found by identity from there on, as any other."""
    blocks = BlockManager(40, SIZE)
    context = [index % 7 + 1 for index in range(40)]
    turn = _run(blocks, context)
    other = _run(blocks, [*context[:17], 9, *context[18:]])
    blocks.keep(turn.table, "chat")
    edited = _Owner(blocks, [*other.ids, 1])
    edited.open("chat")
    assert edited.held[:10] == other.held
    assert (edited.num_cached, edited.chain.num_hashed) == (40, 10 - 4)
    blocks.check([other.table, edited.table])


def test_a_lease_of_another_salt_is_not_taken_up() -> None:
    """Equal tokens of a lease that another tenant's chain leads to are computed again."""
    blocks = BlockManager(40, SIZE)
    turn = _run(blocks, [1, 2, 3, 4, 5, 6, 7, 8], salt=b"a")
    blocks.keep(turn.table, "chat")
    other = _Owner(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9], salt=b"b")
    other.open("chat")
    assert other.num_cached == 0
    blocks.check([other.table])


def test_a_lease_keeps_no_block_that_was_only_allocated_ahead() -> None:
    """Blocks for steps that will not come are free again when the sequence becomes a lease."""
    blocks = BlockManager(8, SIZE)
    turn = _run(blocks, [1, 2, 3, 4])
    assert blocks.grow(turn.table, 9)
    blocks.keep(turn.table, "chat")
    assert (blocks.pool.num_leased, blocks.pool.num_free) == (1, 7)


def test_a_partial_block_that_a_lease_holds_is_copied_for_others() -> None:
    """Somebody else's next turn never writes into the lease's block."""
    blocks = BlockManager(8, SIZE)
    turn = _run(blocks, [1, 2, 3, 4, 5, 6])
    last = turn.held[-1]
    blocks.keep(turn.table, "chat")
    other = _Owner(blocks, [1, 2, 3, 4, 5, 6, 7])
    assert other.open("another") == ((last, other.held[-1]),)
    blocks.check([other.table])


def test_a_source_stays_until_the_copy_is_planned() -> None:
    """The only other block is the source: it is not given out in the plan that copies it."""
    blocks = BlockManager(2, SIZE)
    first = _run(blocks, [1, 2, 3, 4])
    source = first.held[0]
    blocks.close(first.table)
    fork = _Owner(blocks, [1, 2, 9, 9, 9])
    match = blocks.match(fork.chain, fork.tokens, 4, None)
    fork.table, _ = blocks.open(match, None)
    assert not blocks.grow(fork.table, 5)
    assert blocks.take_copies() == ((source, fork.held[0]),)
    assert blocks.grow(fork.table, 5)
    assert fork.held[1] == source


def test_without_a_block_for_the_copy_the_tokens_are_computed_again() -> None:
    """A copy is a convenience: where it does not fit, its source is simply let go."""
    blocks = BlockManager(1, SIZE)
    first = _run(blocks, [1, 2, 3, 4])
    blocks.close(first.table)
    fork = _Owner(blocks, [1, 2, 9])
    assert fork.open() == ()
    assert fork.num_cached == 0
    assert fork.fill()
    blocks.check([fork.table])


def test_unleased_blocks_go_before_leases_and_old_leases_before_new_ones() -> None:
    """Eviction: cached blocks, then idle leases from the oldest, each from its leaf."""
    blocks = BlockManager(5, SIZE)
    for name, first in (("old", 1), ("new", 2)):
        owner = _run(blocks, [first, 5, 5, 5, 6, 6, 6, 6])
        blocks.keep(owner.table, name)
    loose = _run(blocks, [3, 5, 5, 5])
    blocks.close(loose.table)

    def found(first: int) -> int:
        return _Owner(blocks, [first, 5, 5, 5, 6, 6, 6, 6, 9]).num_matching()

    eater = _Owner(blocks, [9] * 20)
    eater.open()
    lengths = []
    for num_tokens in (4, 8, 12, 16, 20):
        assert blocks.grow(eater.table, num_tokens)
        lengths.append((found(3), found(1), found(2)))
        blocks.check([eater.table])
    assert lengths == [(0, 8, 8), (0, 4, 8), (0, 0, 8), (0, 0, 4), (0, 0, 0)]
    assert not blocks.grow(eater.table, 21)


def test_parked_blocks_go_last() -> None:
    """A parked sequence's blocks are given up after those of all idle leases."""
    blocks = BlockManager(2, SIZE)
    parked = _run(blocks, [1, 1, 1, 1])
    blocks.keep(parked.table, "parked", parked=True)
    idle = _run(blocks, [2, 2, 2, 2])
    blocks.keep(idle.table, "idle")
    eater = _Owner(blocks, [9, 9, 9])
    eater.open()
    assert eater.fill()
    assert _Owner(blocks, [2] * 5).num_matching() == 0
    assert _Owner(blocks, [1] * 5).num_matching() == 4


def test_what_is_erased_is_not_found_unless_others_hold_it() -> None:
    """Erasing a lease hides its own blocks and leaves shared ones to those who share them."""
    blocks = BlockManager(8, SIZE)
    first = _run(blocks, [1, 2, 3, 4, 5, 5, 5, 5])
    second = _run(blocks, [1, 2, 3, 4, 6, 6])
    blocks.keep(first.table, "first")
    blocks.release("first", erase=True)
    assert _Owner(blocks, [1, 2, 3, 4, 5, 5, 5, 5, 9]).num_matching() == 4
    assert _Owner(blocks, [1, 2, 3, 4, 6, 6, 9]).num_matching() == 6
    blocks.check([second.table])


def test_salts_never_meet() -> None:
    """The same tokens under another salt are another prefix, whole blocks or not."""
    blocks = BlockManager(8, SIZE)
    _run(blocks, [1, 2, 3, 4, 5, 6], salt=b"a")
    assert _Owner(blocks, [1, 2, 3, 4, 5, 6, 7], salt=b"a").num_matching() == 6
    assert _Owner(blocks, [1, 2, 3, 4, 5, 6, 7], salt=b"b").num_matching() == 0


def test_a_shared_block_counts_once() -> None:
    """`num_tokens_used` is tokens in blocks, not in tables."""
    blocks = BlockManager(8, SIZE)
    _run(blocks, [1, 2, 3, 4, 5])
    _run(blocks, [1, 2, 3, 4, 6, 7])
    assert blocks.num_tokens_used == 4 + 1 + 2


class ManagerMachine(RuleBasedStateMachine):
    """Random tables and leases against a plain set of everything that was ever computed."""

    @initialize(num_blocks=st.integers(2, 10))
    def build(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.owners: list[_Owner] = []
        self.computed: set[tuple[int, ...]] = set()
        self.content: dict[int, list[int]] = {}

    @rule(tokens=st.lists(ids, min_size=1, max_size=14), lease=st.sampled_from([None, "x", "y"]))
    def open(self, tokens: list[int], lease: str | None) -> None:
        """What is found was computed before, and lies in the blocks it is said to lie in.

        A lease saves hashing: it changes neither the blocks that are found nor the identities.
        """
        owner, plain = _Owner(self.blocks, tokens), _Owner(self.blocks, tokens)
        match = self.blocks.match(owner.chain, owner.tokens, len(tokens) - 1, lease)
        by_hash = self.blocks.match(plain.chain, plain.tokens, len(tokens) - 1, None)
        assert match.blocks.tolist() == by_hash.blocks.tolist()
        num_full = len(tokens) // SIZE
        assert owner.chain.between(0, num_full) == plain.chain.between(0, num_full)
        owner.table, owner.num_cached = self.blocks.open(match, lease)
        copies = self.blocks.take_copies()
        for source, destination in copies:
            self.content[destination] = list(self.content[source])
        prefix = tokens[: owner.num_cached]
        assert not prefix or tuple(prefix) in self.computed
        stored = [token for block in owner.held for token in self.content[block]]
        assert stored[: len(prefix)] == prefix
        if self.blocks.grow(owner.table, len(tokens)):
            self._write(owner, owner.num_cached)
            self.owners.append(owner)
        else:
            self.blocks.close(owner.table)

    @precondition(lambda self: bool(self.owners))
    @rule(which=st.integers(0, 9), new=st.lists(ids, min_size=1, max_size=5))
    def say(self, which: int, new: list[int]) -> None:
        owner = self.owners[which % len(self.owners)]
        start = len(owner.tokens)
        if self.blocks.grow(owner.table, start + len(new)):
            for token in new:
                owner.tokens.append(token)
            self._write(owner, start)

    @precondition(lambda self: bool(self.owners))
    @rule(which=st.integers(0, 9), lease=st.sampled_from("xy"), keep=st.integers(0, 20))
    def keep(self, which: int, lease: str, keep: int) -> None:
        owner = self.owners.pop(which % len(self.owners))
        self.blocks.trim(owner.table, keep)
        self.blocks.keep(owner.table, lease)

    @precondition(lambda self: bool(self.owners))
    @rule(which=st.integers(0, 9), erase=st.booleans())
    def close(self, which: int, erase: bool) -> None:
        self.blocks.close(self.owners.pop(which % len(self.owners)).table, erase=erase)

    @rule(lease=st.sampled_from("xy"), erase=st.booleans())
    def release(self, lease: str, erase: bool) -> None:
        self.blocks.release(lease, erase=erase)

    def _write(self, owner: _Owner, start: int) -> None:
        """What a step does: write KV from `start` on, then commit."""
        all_ids = owner.ids
        for position in range(start, len(all_ids)):
            block, offset = owner.held[position // SIZE], position % SIZE
            content = self.content.setdefault(block, [])
            del content[offset:]
            content.append(all_ids[position])
            self.computed.add(tuple(all_ids[: position + 1]))
        self.blocks.commit(owner.table, owner.chain, owner.tokens, len(all_ids))

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check(owner.table for owner in self.owners)
        for owner in self.owners:  # nobody has written over what another one reads
            stored = [t for block in owner.held for t in self.content[block]]
            assert stored[: len(owner.tokens)] == owner.ids


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=150, stateful_step_count=30)
