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


class HashChain:
    """The identities of a sequence's full blocks, each computed once, when first asked for."""

    def __init__(self, root: bytes, tokens: TokenBuffer, block_size: int) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._hashes = [root]

    def before(self, index: int) -> bytes:
        """The identity of what precedes block `index`: of block `index - 1`, or the root."""
        while len(self._hashes) <= index:
            start = (len(self._hashes) - 1) * self._block_size
            digest = blake2b(self._hashes[-1], digest_size=HASH_BYTES)
            digest.update(self._tokens.slice(start, start + self._block_size).tobytes())
            self._hashes.append(digest.digest())
        return self._hashes[index]

    def of(self, index: int) -> bytes:
        """The identity of full block `index`, all of whose tokens are known."""
        return self.before(index + 1)
