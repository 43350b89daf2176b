"""What the server and the engine say to each other: plain values, nothing else.

They travel as msgpack over one Unix socket (`engine.channel`), or as they are over queues when
the loop runs on a thread. Token ids travel as little-endian int32 bytes (`pack_ids`): a
128k-token prompt is one copy, not 128k Python integers.

Index rule used everywhere: the output tokens of a sequence are numbered from 0, and a token's
*position* is `num_prompt_tokens + index`.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "cancelled", "prefilled", "refused", "error"]
"""Why a sequence ended.

stop: EOS or a stop token id was generated (it is the last output token). length: max_tokens, the
model's context or the pool's capacity was reached. cancelled: as asked. prefilled: max_tokens
was 0. refused: never ran, see `Finish.code`. error: the engine failed it, see `Finish.code`.
"""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How one sequence's tokens are chosen, already validated by the server.

    Order of processing: logit bias, repetition / presence / frequency penalties, (greedy stops
    here), temperature, top-k, top-p, min-p, then argmax(log p + Gumbel(seed, position, token)).
    """

    max_tokens: int  # 0 = prefill only; counts every output token, EOS included
    max_tokens_is_explicit: bool = False  # it then counts in "can this ever fit?"
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()  # besides the model's EOS ids
    ignore_eos: bool = False
    min_tokens: int = 0  # EOS and stop token ids are masked before this many output tokens
    seed: int = 0  # always concrete (the server draws one), so that a restart repeats it
    top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Run a sequence. With `output_ids`, go on after them (engine restart, wake)."""

    sequence_id: str
    prompt_ids: bytes
    output_ids: bytes = b""
    params: SamplingParams
    priority: int = 0  # larger is more urgent
    tenant: str = "local"  # fairness between tenants
    salt: bytes = b""  # of the tenant: in the hash of every block
    lease_id: str | None = None  # keep the blocks under this lease after the finish


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End a sequence now; answered by its `Finish` with `cancelled` unless it had finished.

    With `keep_tokens`, only that many output tokens remain in its lease (a stop string ended
    the turn there).
    """

    sequence_id: str
    keep_tokens: int | None = None


class Park(msgspec.Struct, frozen=True, tag="park"):
    """Leave the batch, keep the blocks while memory allows. `Unpark` goes on at the next token."""

    sequence_id: str


class Unpark(msgspec.Struct, frozen=True, tag="unpark"):
    sequence_id: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Drop an idle lease; with `erase`, also drop its unshared blocks from the prefix cache."""

    lease_id: str
    erase: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop at the next step boundary."""


ToEngine = Submit | Cancel | Park | Unpark | Release | Shutdown


class Usage(msgspec.Struct, frozen=True, array_like=True):
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens whose KV was found at the first admission
    num_output_tokens: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of one output position, of the unprocessed model distribution."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: FinishReason
    usage: Usage
    code: str | None = None  # a wire code of PROTOCOL.md, for `refused` and `error`
    message: str | None = None


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence, in order and without gaps; the last one carries `finish`."""

    sequence_id: str
    first_token: int  # index of token_ids[0] among the output tokens
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started (`num_*_total`) and gauges of this instant."""

    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_leased: int = 0
    waiting: int = 0
    running: int = 0
    parked: int = 0
    num_steps_total: int = 0
    num_prefill_tokens_total: int = 0  # prompt tokens computed
    num_cached_tokens_total: int = 0  # prompt tokens found
    num_generated_tokens_total: int = 0
    num_preemptions_total: int = 0
    num_drafted_tokens_total: int = 0  # looked up in the context and checked
    num_accepted_tokens_total: int = 0  # of these, right
    kv_tokens_used: int = 0  # tokens with KV in leased blocks, a shared block counted once
    kv_tokens_capacity: int = 0  # leased blocks * block_size: waste = 1 - used / capacity
    step_seconds: list[float] = []  # durations of the steps since the last frame


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The first message of an engine: it is loaded and takes work."""

    engine_id: str  # new at each start
    model: str
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: list[int]


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Weights are being loaded: `done` of `total` bytes."""

    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start (a missing tensor, no memory): said once, then it exits."""

    message: str


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """Everything one step produced: at most one a step."""

    outputs: list[Output]
    stats: EngineStats


FromEngine = Ready | Loading | Failed | Frame


def pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """The inverse of `pack_ids`: int32 `[num_tokens]`, read-only."""
    return np.frombuffer(data, dtype="<i4")
