"""The prefix index finds the longest prefix there is, and nothing that is not there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hillstar.engine.kv.prefix import PrefixIndex
from hillstar.engine.tokens import block_hash

SIZE = 4
A, B = b"parent-a", b"parent-b"


def _tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class TestFindLongest:
    @given(
        st.lists(
            st.tuples(st.sampled_from([A, B]), st.lists(st.integers(1, 2), min_size=1, max_size=4)),
            max_size=8,
        ),
        st.lists(st.integers(1, 2), max_size=6),
        st.integers(0, 7),
    )
    def test_is_the_longest_common_prefix_among_the_children(
        self, contents: list[tuple[bytes, list[int]]], wanted: list[int], preferred: int
    ) -> None:
        """By comparison with every child, one after the other."""
        index = PrefixIndex(8, SIZE)
        for block, (parent, ids) in enumerate(contents):
            index.append(block, parent, _tokens(*ids))
            if len(ids) == SIZE:
                identity = _identity(parent, *ids)
                if index.find(identity) is None:
                    index.seal(block, identity)
                else:
                    index.hide(np.array([block]))
        common = {
            block: _common(ids, wanted)
            for block, (parent, ids) in enumerate(contents)
            if parent == A and index.is_findable[block]
        }
        best = max(common.values(), default=0)
        found = index.find_longest(A, _tokens(*wanted), preferred)
        if best == 0:
            assert found is None
        else:
            assert found is not None
            block, length = found
            assert length == best == common[block]
            if common.get(preferred) == best:
                assert block == preferred
        index.check()

    def test_forgets_what_is_hidden(self) -> None:
        """A hidden block is not found by tokens or by hash; its fill is known until cleared."""
        index = PrefixIndex(2, SIZE)
        index.append(0, A, _tokens(1, 2, 3, 4))
        index.seal(0, b"hash")
        assert index.find(b"hash") == 0 and index.is_findable[0]
        index.hide(np.array([0]))
        assert index.find(b"hash") is None and not index.is_findable[0]
        assert index.find_longest(A, _tokens(1, 2), None) is None
        assert index.fill[0] == SIZE
        index.clear(np.array([0]))
        assert index.fill[0] == 0
        index.check()

    def test_sees_tokens_as_they_are_appended(self) -> None:
        """A block that is being filled is found by what it holds already."""
        index = PrefixIndex(1, SIZE)
        index.append(0, A, _tokens(7))
        assert index.find_longest(A, _tokens(7, 8, 9), None) == (0, 1)
        index.append(0, A, _tokens(8, 5))
        assert index.find_longest(A, _tokens(7, 8, 9), None) == (0, 2)


class TestKnownHashes:
    def test_end_where_the_tokens_differ_or_a_block_cannot_be_found(self) -> None:
        """The identities of a table's first blocks, as far as they are those of the tokens."""
        index = PrefixIndex(4, SIZE)
        identities = [A]
        for block in (2, 0, 3):
            ids = (block, 1, 1, 1)
            index.append(block, identities[-1], _tokens(*ids))
            identities.append(_identity(identities[-1], *ids))
            index.seal(block, identities[-1])
        blocks, tokens = np.array([2, 0, 3]), _tokens(2, 1, 1, 1, 0, 1, 1, 1, 3, 1, 1, 1)
        assert index.known_hashes(A, blocks, tokens) == identities[1:]
        assert index.known_hashes(B, blocks, tokens) == []
        assert index.known_hashes(A, blocks[:0], tokens[:0]) == []
        tokens[7] = 2
        assert index.known_hashes(A, blocks, tokens) == identities[1:2]
        tokens[7] = 1
        index.hide(np.array([0]))
        assert index.known_hashes(A, blocks, tokens) == identities[1:2]
        index.check()


def test_an_identity_belongs_to_one_block() -> None:
    """Sealing a second block under a hash that is taken is our bug."""
    index = PrefixIndex(2, SIZE)
    for block in range(2):
        index.append(block, A, _tokens(1, 2, 3, 4))
    index.seal(0, b"hash")
    with pytest.raises(AssertionError):
        index.seal(1, b"hash")


def test_only_full_blocks_have_an_identity() -> None:
    """Sealing a block that is not full is our bug."""
    index = PrefixIndex(1, SIZE)
    index.append(0, A, _tokens(1, 2))
    with pytest.raises(AssertionError):
        index.seal(0, b"hash")


def _identity(parent: bytes, *ids: int) -> bytes:
    return block_hash(parent, _tokens(*ids).tobytes())


def _common(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length
