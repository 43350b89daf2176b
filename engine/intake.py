"""From a `Submit` to a `Sequence`, or to the reason why it can never run."""

from dataclasses import dataclass

import numpy as np

from hillstar.engine.messages import Submit, unpack_ids
from hillstar.engine.sequence import Sequence
from hillstar.engine.tokens import HashChain, TokenBuffer, root_hash


class Refused(Exception):
    """The sequence will not run. `code` is a wire code of PROTOCOL.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What this engine can run at all.

    A sequence of p prompt tokens that generates m needs KV for p + m - 1: its last token is never
    fed. So the pool never fails one that runs alone: it ends by count before.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_space: bytes  # what makes KV interchangeable: weights, RoPE settings, KV dtype

    def sequence(self, submit: Submit, arrival: int, now_s: float) -> Sequence:
        """Raises Refused."""
        prompt, output = self._ids(submit.prompt_ids), self._ids(submit.output_ids)
        if not len(prompt):
            raise Refused("invalid_value", "The prompt has no tokens.")
        params = submit.params
        if params.max_tokens < 0:
            raise Refused("invalid_value", f"max_tokens must not be negative: {params.max_tokens}.")
        tokens = TokenBuffer(np.concatenate([prompt, output]))
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return Sequence(
            sequence_id=submit.sequence_id,
            tenant=submit.tenant,
            priority=submit.priority,
            params=params,
            lease_id=submit.lease_id,
            tokens=tokens,
            chain=HashChain(root_hash(self.kv_space, submit.salt), tokens, self.block_size),
            num_prompt_tokens=len(prompt),
            max_output_tokens=self._max_output_tokens(submit, len(prompt)),
            stop_ids=eos.union(params.stop_token_ids),
            arrival=arrival,
            arrived_s=now_s,
            resting_id=submit.lease_id,
        )

    def _ids(self, data: bytes) -> np.ndarray:
        if len(data) % 4:
            raise Refused("invalid_value", f"{len(data)} bytes are no 32-bit token ids.")
        ids = unpack_ids(data)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise Refused("invalid_value", f"Token ids must be from 0 to {self.vocab_size - 1}.")
        return ids

    def _max_output_tokens(self, submit: Submit, num_prompt_tokens: int) -> int:
        """The smallest of what was asked for, the context's room and the pool's room.

        Only an explicit limit is held against the request: without one it ends at the others.
        """
        asked = submit.params.max_tokens
        explicit = asked if submit.params.max_tokens_is_explicit else min(asked, 1)
        num_tokens = num_prompt_tokens + explicit
        if num_tokens > self.max_model_len:
            raise Refused(
                "context_length_exceeded",
                f"The request needs {num_tokens} tokens; "
                f"this model's context holds {self.max_model_len}.",
            )
        num_kv_tokens = self.num_blocks * self.block_size
        num_needed = num_tokens - min(explicit, 1)
        if num_needed > num_kv_tokens:
            raise Refused(
                "kv_capacity_exceeded",
                f"The request needs the KV of {num_needed} tokens; the pool holds {num_kv_tokens}.",
            )
        room = min(self.max_model_len, num_kv_tokens + 1) - num_prompt_tokens
        return min(asked, room)
