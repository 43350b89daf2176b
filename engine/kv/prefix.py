"""Which tokens' KV a block holds, and how to find it.

A full block is found by its identity (`engine.tokens`). A block that is not full has none: it is
found among the children of what precedes it, by comparing tokens. So is a full block of which
only the beginning is wanted.
"""

import numpy as np


class PrefixIndex:
    """Owns what is known about the content of blocks. The block manager calls it.

    fill: int16 `[num_blocks]`, how many tokens of each block have KV, whether the block can be
    found or not; those tokens are in `_tokens`, and never change until the block is cleared.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tokens = np.zeros((num_blocks, block_size), dtype=np.int32)
        self.fill = np.zeros(num_blocks, dtype=np.int16)
        self._parent: list[bytes | None] = [None] * num_blocks  # None: cannot be found
        self._hash: list[bytes | None] = [None] * num_blocks  # of full blocks that can be found
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}

    def __contains__(self, block: int) -> bool:
        """Whether the block can be found."""
        return self._parent[block] is not None

    def find(self, block_hash: bytes) -> int | None:
        """The full block with this identity."""
        return self._by_hash.get(block_hash)

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
            self._children.setdefault(parent, {})[block] = None
        self._tokens[block, fill:end] = tokens
        self.fill[block] = end

    def seal(self, block: int, block_hash: bytes) -> None:
        """The block is full: it can be found by its hash, which no other block may have."""
        assert self.fill[block] == self._block_size, f"block {block} is not full"
        assert block_hash not in self._by_hash, f"the identity of block {block} is taken"
        self._hash[block] = block_hash
        self._by_hash[block_hash] = block

    def hide(self, block: int) -> None:
        """The block can no longer be found. Its content stays known until `clear`."""
        parent, block_hash = self._parent[block], self._hash[block]
        if parent is not None:
            children = self._children[parent]
            del children[block]
            if not children:
                del self._children[parent]
            self._parent[block] = None
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash[block] = None

    def clear(self, block: int) -> None:
        """The block is about to get another content."""
        self.hide(block)
        self.fill[block] = 0

    def check(self) -> None:
        """Assert that every way of finding a block leads to a block that agrees."""
        for block_hash, block in self._by_hash.items():
            assert self._hash[block] == block_hash, f"hash of block {block}"
            assert self.fill[block] == self._block_size, f"fill of block {block}"
        for parent, children in self._children.items():
            assert children, "an empty set of children"
            for block in children:
                assert self._parent[block] == parent, f"parent of block {block}"
                assert self.fill[block] > 0, f"fill of block {block}"
        num_children = sum(len(children) for children in self._children.values())
        assert num_children == sum(parent is not None for parent in self._parent)
        assert len(self._by_hash) == sum(block_hash is not None for block_hash in self._hash)
