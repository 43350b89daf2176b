"""A sequence's token ids, and the identities they give to its blocks.

A full block is identified by a hash of everything its KV depends on: the identity of the block
before it and its own token ids. A chain begins at `root_hash(kv_space, salt)`: so equal hashes
mean equal KV, and tenants with different salts never meet.
"""

from hashlib import blake2b

import numpy as np

HASH_BYTES = 16


class TokenBuffer:
    """Token ids that grow at the end and never change: int32, amortised O(1) per token."""

    def __init__(self, ids: np.ndarray) -> None:
        self._length = len(ids)
        self._ids = np.zeros(self._length + 64, dtype=np.int32)
        self._ids[: self._length] = ids

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        return int(self._ids[self._length - 1])

    def append(self, token_id: int) -> None:
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
        self._ids[self._length] = token_id
        self._length += 1

    def slice(self, start: int, end: int) -> np.ndarray:
        """int32 `[end - start]`, a view that stays valid: known tokens are never overwritten."""
        assert 0 <= start <= end <= self._length, f"[{start}, {end}) of {self._length} tokens"
        return self._ids[start:end]


def root_hash(kv_space: bytes, salt: bytes) -> bytes:
    """Where the chains of one KV space and one tenant begin."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"hillstar-kv-root")
    for part in (kv_space, salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, ids: bytes) -> bytes:
    """The identity of the full block that holds these token ids (int32) behind `parent`."""
    return blake2b(parent + ids, digest_size=HASH_BYTES).digest()


class HashChain:
    """The identities of a sequence's full blocks: each is computed once, when first asked for,
    unless it was known before (`adopt`).

    num_hashed: how many were computed.
    """

    def __init__(self, root: bytes, tokens: TokenBuffer, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._hashes = [root]
        self.num_hashed = 0

    @property
    def root(self) -> bytes:
        return self._hashes[0]

    def before(self, index: int) -> bytes:
        """The identity of what precedes block `index`: of block `index - 1`, or the root."""
        if len(self._hashes) <= index:
            self._compute(index)
        return self._hashes[index]

    def of(self, index: int) -> bytes:
        """The identity of full block `index`, all of whose tokens are known."""
        return self.before(index + 1)

    def between(self, first: int, end: int) -> list[bytes]:
        """The identities of full blocks `first` to `end` (exclusive)."""
        if first < end:
            self.before(end)
        return self._hashes[first + 1 : end + 1]

    def adopt(self, hashes: list[bytes]) -> None:
        """These are the identities of the first blocks: blocks with the same tokens have them."""
        self._hashes += hashes[len(self._hashes) - 1 :]

    def _compute(self, num_blocks: int) -> None:
        first = len(self._hashes) - 1
        ids = self._tokens.slice(first * self._block_size, num_blocks * self._block_size).tobytes()
        last, step = self._hashes[-1], self._block_size * 4
        for at in range(0, len(ids), step):
            last = block_hash(last, ids[at : at + step])
            self._hashes.append(last)
        self.num_hashed += num_blocks - first
