"""The pool counts: random references against a dictionary, and the order of eviction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.kv.block import BlockPool

OPERATIONS = ["allocate", "bind", "unbind", "hold", "drop", "forget"]


@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(
            st.sampled_from(OPERATIONS),
            st.lists(st.integers(0, 7), max_size=5, unique=True),
            st.integers(0, 255),
        )
    ),
)
def test_states_follow_from_references(
    num_blocks: int, operations: list[tuple[str, list[int], int]]
) -> None:
    """Whatever happens, a block's state is what its references say, and the counts add up."""
    pool = BlockPool(num_blocks)
    bound: list[int] = []
    idle: list[int] = []
    cached: list[int] = []  # least recently used first

    def settle(blocks: list[int], keep: np.ndarray) -> None:
        for block, kept in zip(blocks, keep, strict=True):
            if block not in bound and block not in idle and kept:
                cached.append(block)

    for name, wanted, kept in operations:
        if name == "allocate":
            free = set(range(num_blocks)) - {*bound, *idle, *cached}
            blocks = pool.allocate(min(len(wanted), len(free))).tolist()
            assert set(blocks) <= free
            bound += blocks
        elif name in ("bind", "hold"):
            blocks = [block for block in wanted if block in {*bound, *idle, *cached}]
            cached = [block for block in cached if block not in blocks]
            (pool.bind if name == "bind" else pool.hold)(_ids(blocks))
            (bound if name == "bind" else idle).extend(blocks)
        elif name in ("unbind", "drop"):
            refs = bound if name == "unbind" else idle
            blocks = [block for block in wanted if block in refs]
            keep = np.array([bool(kept >> block & 1) for block in blocks], dtype=np.bool_)
            (pool.unbind if name == "unbind" else pool.drop)(_ids(blocks), keep)
            for block in blocks:
                refs.remove(block)
            settle(blocks, keep)
        else:
            blocks = [block for block in wanted if block in cached]
            pool.forget(_ids(blocks))
            cached = [block for block in cached if block not in blocks]
        assert pool.oldest_cached(len(cached)).tolist() == cached
        pool.check(_count(bound), _count(idle), set(cached))
        assert pool.num_available == num_blocks - len(set(bound))
        assert pool.leased_mask().sum() == pool.num_leased == len({*bound, *idle})
        assert pool.is_bound(np.arange(num_blocks)).sum() == len(set(bound))


def test_a_bound_block_stays_bound_while_a_lease_holds_it_too() -> None:
    """Binding references win over idle ones, idle ones over being cached."""
    pool = BlockPool(2)
    keep = np.array([True])
    block = pool.allocate(1)
    pool.hold(block)
    assert pool.num_available == 1
    pool.unbind(block, keep)
    assert (pool.num_available, pool.num_leased, pool.num_cached) == (2, 1, 0)
    pool.drop(block, keep)
    assert (pool.num_leased, pool.num_cached, pool.num_free) == (0, 1, 1)
    pool.forget(block)
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_what_is_not_held_cannot_be_let_go() -> None:
    """Letting go twice is our bug, and says so at once."""
    pool = BlockPool(1)
    block, keep = _ids([0]), np.array([False])
    with pytest.raises(AssertionError):
        pool.unbind(block, keep)
    with pytest.raises(AssertionError):
        pool.drop(block, keep)
    with pytest.raises(KeyError):
        pool.forget(block)


def test_no_more_is_given_out_than_is_free() -> None:
    """Who asks for more than there is has not made room first."""
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.allocate(3)
    assert pool.allocate(2).tolist() == [0, 1]


def _ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def _count(blocks: list[int]) -> dict[int, int]:
    return {block: blocks.count(block) for block in set(blocks)}
