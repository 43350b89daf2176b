"""Drafts looked up in what a sequence has said and read so far."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.spec.lookup import Lookup
from hillstar.engine.tokens import TokenBuffer


def lookup(*ids: int) -> tuple[Lookup, TokenBuffer]:
    tokens = TokenBuffer(np.array(ids, dtype=np.int32))
    return Lookup(tokens), tokens


def test_what_followed_before_is_proposed() -> None:
    """The tokens behind the last time that the last two were said."""
    found, _ = lookup(1, 2, 3, 4, 5, 1, 2)
    assert found.propose(3).tolist() == [3, 4, 5]
    assert found.propose(1).tolist() == [3]


def test_more_agreement_is_surer() -> None:
    """Four tokens that agree count more than two that agreed later."""
    found, _ = lookup(1, 2, 3, 4, 7, 3, 4, 8, 1, 2, 3, 4)
    assert found.propose(1).tolist() == [7]


def test_the_newest_place_counts() -> None:
    """Of two places that agree as well, the later one."""
    found, _ = lookup(3, 4, 7, 0, 3, 4, 8, 0, 3, 4)
    assert found.propose(1).tolist() == [8]


def test_a_refrain_goes_on() -> None:
    """What has just begun to repeat is taken to go on repeating, for as long as is asked."""
    found, _ = lookup(9, 1, 2, 1, 2)
    assert found.propose(5).tolist() == [1, 2, 1, 2, 1]


def test_nothing_is_proposed_for_what_is_new() -> None:
    """A run that was never followed by anything says nothing, and so does a single token."""
    assert not len(lookup(1, 2, 3, 4)[0].propose(4))
    assert not len(lookup(1)[0].propose(4))


@given(
    first=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    more=st.lists(st.integers(0, 2), max_size=30),
    most=st.integers(1, 6),
)
def test_a_sequence_that_grows_is_as_one_that_was_read_whole(
    first: list[int], more: list[int], most: int
) -> None:
    """Proposals do not depend on when tokens came."""
    grown, tokens = lookup(*first)
    for token in more:
        grown.propose(most)
        tokens.append(token)
    whole, _ = lookup(*first, *more)
    assert grown.propose(most).tolist() == whole.propose(most).tolist()
