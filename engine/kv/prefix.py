"""Which tokens' KV a block holds, and how to find it.

A full block is found by its identity (`engine.tokens`). A block that is not full has none: it is
found among the children of what precedes it, by comparing tokens. So is a full block of which
only the beginning is wanted.
"""

from itertools import pairwise

import numpy as np

from hillstar.engine.tokens import block_hash


class PrefixIndex:
    """Owns what is known about the content of blocks. The block manager calls it.

    fill: int16 `[num_blocks]`, how many tokens of each block have KV, whether the block can be
    found or not; those tokens are in `_tokens`, and never change until the block is cleared.
    is_findable: bool `[num_blocks]`. A full block that can be found has an identity.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.fill = np.zeros(num_blocks, dtype=np.int16)
        self.is_findable = np.zeros(num_blocks, dtype=np.bool_)
        self._parent: list[bytes | None] = [None] * num_blocks  # None: cannot be found
        self._hash = np.full(num_blocks, None, dtype=object)  # bytes of full ones that can be
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}

    def find(self, identity: bytes) -> int | None:
        """The full block with this identity."""
        return self._by_hash.get(identity)

    def known_hashes(self, root: bytes, blocks: np.ndarray, tokens: np.ndarray) -> list[bytes]:
        """The identities of the first of `blocks`, as far as they hold `tokens` and can be found.

        blocks: int32 `[n]`, the first full ones of a table. tokens: int32 `[n * block_size]`, the
        first of a sequence whose chain begins at `root`: the identities are the sequence's too.
        """
        if not len(blocks) or self._parent[blocks[0]] != root:
            return []
        agrees = (self._tokens[blocks] == tokens.reshape(len(blocks), -1)).all(axis=1)
        agrees &= self.is_findable[blocks]
        num_known = len(blocks) if agrees.all() else int(agrees.argmin())
        hashes: list[bytes] = self._hash[blocks[:num_known]].tolist()
        return hashes

    def find_longest(
        self, parent: bytes, tokens: np.ndarray, prefer: int | None
    ) -> tuple[int, int] | None:
        """The child of `parent` that begins with most of `tokens`: (block, how many), or None.

        Of equally good ones `prefer`, if it is among them.
        """
        children = self._children.get(parent)
        if not children or not len(tokens):
            return None
        blocks = np.fromiter(children, dtype=np.int64, count=len(children))
        tokens = tokens[: self._block_size]
        differs = self._tokens[blocks, : len(tokens)] != tokens
        lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), len(tokens))
        np.minimum(lengths, self.fill[blocks], out=lengths)
        best = int(lengths.argmax())
        if prefer is not None and prefer in children:
            preferred = int(np.flatnonzero(blocks == prefer)[0])
            if lengths[preferred] == lengths[best]:
                best = preferred
        return (int(blocks[best]), int(lengths[best])) if lengths[best] else None

    def append(self, block: int, parent: bytes, tokens: np.ndarray) -> None:
        """More tokens of the block have KV; it can be found from its first token on."""
        fill = int(self.fill[block])
        end = fill + len(tokens)
        if fill == 0:
            self._parent[block] = parent
            self.is_findable[block] = True
            self._children.setdefault(parent, {})[block] = None
        self._tokens[block, fill:end] = tokens
        self.fill[block] = end

    def seal(self, block: int, identity: bytes) -> None:
        """The block is full: it can be found by its hash, which no other block may have."""
        assert self.fill[block] == self._block_size, f"block {block} is not full"
        assert identity not in self._by_hash, f"the identity of block {block} is taken"
        self._hash[block] = identity
        self._by_hash[identity] = block

    def hide(self, blocks: np.ndarray) -> None:
        """The blocks can no longer be found. Their content stays known until `clear`."""
        found: list[int] = blocks[self.is_findable[blocks]].tolist()
        for block in found:
            parent, identity = self._parent[block], self._hash[block]
            assert parent is not None, f"block {block} is said to be findable"
            children = self._children[parent]
            del children[block]
            if not children:
                del self._children[parent]
            if identity is not None:
                del self._by_hash[identity]
            self._parent[block] = None
            self._hash[block] = None
            self.is_findable[block] = False

    def clear(self, blocks: np.ndarray) -> None:
        """The blocks are about to get another content."""
        self.hide(blocks)
        self.fill[blocks] = 0

    def check_table(self, blocks: np.ndarray) -> None:
        """Assert that each block follows the one before it, as far as they can be found."""
        for before, after in pairwise(blocks.tolist()):
            identity, parent = self._hash[before], self._parent[after]
            if identity is not None and parent is not None:
                assert identity == parent, f"block {after} does not follow block {before}"

    def check(self) -> None:
        """Assert that every way of finding a block leads to a block that agrees."""
        num_found = num_sealed = 0
        for parent, children in self._children.items():
            assert children, "an empty set of children"
            for block in children:
                assert self.is_findable[block], f"block {block} is found"
                assert self._parent[block] == parent, f"parent of block {block}"
                assert self.fill[block] > 0, f"fill of block {block}"
                if self.fill[block] == self._block_size:
                    identity = block_hash(parent, self._tokens[block].tobytes())
                    assert self._hash[block] == identity, f"hash of block {block}"
                    assert self._by_hash[identity] == block, f"block {block} has a double"
                    num_sealed += 1
                num_found += 1
        assert num_found == np.count_nonzero(self.is_findable)
        assert num_found == sum(parent is not None for parent in self._parent)
        assert num_sealed == len(self._by_hash)
        assert num_sealed == sum(identity is not None for identity in self._hash)
