"""The pool counts: random references against a dictionary, and the order of eviction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.kv.block import BOUND, CACHED, FREE, IDLE, BlockPool

OPERATIONS = ["allocate", "bind", "unbind", "hold", "drop", "forget"]


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 50), st.booleans())),
)
def test_states_follow_from_references(
    num_blocks: int, operations: list[tuple[str, int, bool]]
) -> None:
    """Whatever happens, a block's state is what its references say, and the counts add up."""
    pool = BlockPool(num_blocks)
    bound: list[int] = []
    idle: list[int] = []
    cached: list[int] = []  # least recently used first

    def settle(block: int, keep: bool) -> None:
        if block not in bound and block not in idle and keep:
            cached.append(block)

    for name, number, keep in operations:
        if name == "allocate":
            block = pool.allocate()
            assert (block is None) == (num_blocks == len({*bound, *idle, *cached}))
            if block is not None:
                bound.append(block)
        elif name in ("bind", "hold"):
            known = sorted({*bound, *idle, *cached})
            if not known:
                continue
            block = known[number % len(known)]
            if block in cached:
                cached.remove(block)
            (pool.bind if name == "bind" else pool.hold)(block)
            (bound if name == "bind" else idle).append(block)
        elif name == "unbind" and bound:
            block = bound.pop(number % len(bound))
            pool.unbind(block, keep=keep)
            settle(block, keep)
        elif name == "drop" and idle:
            block = idle.pop(number % len(idle))
            pool.drop(block, keep=keep)
            settle(block, keep)
        elif name == "forget" and cached:
            pool.forget(cached.pop(number % len(cached)))
        assert pool.oldest_cached() == (cached[0] if cached else None)
        pool.check(_count(bound), _count(idle))
        assert pool.num_available == num_blocks - len(set(bound))
        assert pool.leased_mask().sum() == pool.num_leased == len({*bound, *idle})


def test_a_bound_block_stays_bound_while_a_lease_holds_it_too() -> None:
    """Binding references win over idle ones, idle ones over being cached."""
    pool = BlockPool(2)
    block = pool.allocate()
    assert block is not None and pool.state(block) == BOUND
    pool.hold(block)
    assert pool.state(block) == BOUND
    pool.unbind(block, keep=True)
    assert pool.state(block) == IDLE
    pool.drop(block, keep=True)
    assert pool.state(block) == CACHED
    pool.forget(block)
    assert pool.state(block) == FREE


def test_what_is_not_held_cannot_be_let_go() -> None:
    """Letting go twice is our bug, and says so at once."""
    pool = BlockPool(1)
    with pytest.raises(AssertionError):
        pool.unbind(0, keep=False)
    with pytest.raises(AssertionError):
        pool.drop(0, keep=False)
    with pytest.raises(AssertionError):
        pool.forget(0)


def _count(blocks: list[int]) -> dict[int, int]:
    return {block: blocks.count(block) for block in set(blocks)}
