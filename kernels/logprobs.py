"""Log-probabilities of the chosen tokens and of the most likely ones, for rows that ask.

    logprob(token) = logit(token) - log(sum(exp(logits)))

of the model's own logits. The most likely are in order, ties by the lowest id; a NaN counts as
-inf. Two launches, as in `kernels/sampling.py`:
* `_scan_kernel`, grid `(ceil(vocab / 4096), num_rows)`: sums, and the maximum of each 32 tokens.
* `_logprobs_kernel`, grid `(num_rows,)`: takes the best token num_top times from the few groups
  that can hold one (`sampling_groups`).
Bytes moved a call: `vocab * itemsize` for each row that asks.
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.sampling_groups import (
    CHUNK,
    CHUNK_GROUPS,
    GROUP,
    bound_of_top,
    list_groups,
    load_chunk,
    load_listed,
    total_weight,
    weights,
)

_SPAN = 64  # groups read at a time: a few more than a row asks for


def logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor, max_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The specification of `logprobs`: same arguments, same result (zeros where not written)."""
    num_rows = len(logits)
    chosen = logits.new_zeros(num_rows, dtype=torch.float32)
    top_ids = torch.zeros((num_rows, max_top), dtype=torch.int32, device=logits.device)
    top_logprobs = top_ids.to(torch.float32)
    for row, count in enumerate(num_top.tolist()):
        if count < 0:
            continue
        x = logits[row].float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        logprobs = x - x.logsumexp(0)
        ordered = logprobs.sort(descending=True, stable=True)
        chosen[row] = logprobs[token_ids[row]]
        top_ids[row, :count] = ordered.indices[:count].int()
        top_logprobs[row, :count] = ordered.values[:count]
    return chosen, top_ids, top_logprobs


@jit
def _scan_kernel(
    logits: tl.tensor,
    num_top: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    group_maxima: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    chunk, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(num_top + index) < 0:
        return
    x, _, groups = load_chunk(logits + index * stride, chunk, vocab, GROUPS, GROUP)
    in_groups = tl.max(x, axis=1)
    highest = tl.max(in_groups, axis=0)
    where = index * tl.num_programs(0) + chunk
    tl.store(maxima + where, highest)
    tl.store(sums + where, tl.sum(tl.sum(weights(x, highest, 1.0), axis=1), axis=0))
    tl.store(group_maxima + index * num_groups + groups, in_groups, mask=groups < num_groups)


@jit
def _logprobs_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    num_top: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    group_maxima: tl.tensor,
    lists: tl.tensor,
    chosen: tl.tensor,
    top_ids: tl.tensor,
    top_logprobs: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,
    max_top: tl.tensor,
    CHUNKS_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    count = tl.load(num_top + index)
    if count < 0:
        return
    chunks = tl.arange(0, CHUNKS_PADDED)
    in_row = chunks < num_chunks
    part = index * num_chunks + chunks
    highest = tl.max(tl.load(maxima + part, mask=in_row, other=float("-inf")), axis=0)
    total = total_weight(maxima + part, sums + part, in_row, highest, 1.0)
    log_total = highest + tl.log(total)
    row = logits + index * stride
    logit = tl.load(row + tl.load(token_ids + index)).to(tl.float32)
    tl.store(chosen + index, logit - log_total)
    if count == 0:
        return

    groups = tl.arange(0, GROUPS_PADDED)
    exists = groups < num_groups
    tops = tl.load(group_maxima + index * num_groups + groups, mask=exists, other=float("-inf"))
    bound = bound_of_top(tops, exists, count, num_groups, highest)
    listed = lists + index * num_groups
    num_listed = list_groups(listed, groups, exists & (tops >= bound))
    value = tl.full([], float("inf"), dtype=tl.float32)
    token = tl.full([], -1, dtype=tl.int32)
    for place in range(count):
        best = tl.full([], float("-inf"), dtype=tl.float32)
        winner = tl.full([], 0x7FFFFFFF, dtype=tl.int32)
        for start in tl.range(0, num_listed, SPAN):  # pyright: ignore[reportGeneralTypeIssues]
            x, tokens, is_token = load_listed(row, listed, start, num_listed, vocab, SPAN, GROUP)
            is_next = is_token & ((x < value) | ((x == value) & (tokens > token)))
            top = tl.max(tl.where(is_next, x, float("-inf")), axis=None)
            first = tl.min(tl.where(is_next & (x == top), tokens, 0x7FFFFFFF), axis=None)
            winner = tl.where((top > best) | ((top == best) & (first < winner)), first, winner)
            best = tl.maximum(best, top)
        value, token = best, winner
        tl.store(top_ids + index * max_top + place, token)
        tl.store(top_logprobs + index * max_top + place, value - log_total)


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: torch.Tensor, max_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each chosen token float32 `[num_rows]`; the most likely: int32 and float32
    `[num_rows, max_top]`, new. What a row did not ask for is 0.

    logits: `[num_rows, vocab]`, float32, bfloat16 or float16, rows may be strided. token_ids:
    int32 `[num_rows]`. num_top: int32 `[num_rows]`, how many of the most likely a row asks for, at
    most max_top; -1 = not even the chosen token's. max_top: at most the vocabulary.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device, ints = logits.device, (torch.int32,)
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOATS, device=device)
    num_rows, vocab = logits.shape
    check_tensor("token_ids", token_ids, shape=(num_rows,), dtypes=ints, device=device)
    check_tensor("num_top", num_top, shape=(num_rows,), dtypes=ints, device=device)
    if not 0 <= max_top <= vocab:
        raise ValueError(f"max_top: {max_top}; expected 0 to {vocab}, the vocabulary")
    chosen = torch.zeros(num_rows, device=device)
    top_ids = torch.zeros((num_rows, max_top), dtype=torch.int32, device=device)
    top_logprobs = torch.zeros((num_rows, max_top), device=device)
    if num_rows == 0 or vocab == 0:
        return chosen, top_ids, top_logprobs
    num_chunks, num_groups = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, GROUP)
    maxima, sums = torch.empty((2, num_rows, num_chunks), device=device)
    group_maxima = torch.empty((num_rows, num_groups), device=device)
    _scan_kernel[(num_chunks, num_rows)](
        logits,
        num_top,
        maxima,
        sums,
        group_maxima,
        logits.stride(0),
        vocab,
        num_groups,
        GROUPS=CHUNK_GROUPS,
        GROUP=GROUP,
        num_warps=4,
    )
    _logprobs_kernel[(num_rows,)](
        logits,
        token_ids,
        num_top,
        maxima,
        sums,
        group_maxima,
        torch.empty((num_rows, num_groups), dtype=torch.int32, device=device),
        chosen,
        top_ids,
        top_logprobs,
        logits.stride(0),
        vocab,
        num_chunks,
        num_groups,
        max_top,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        GROUPS_PADDED=triton.next_power_of_2(num_groups),
        SPAN=_SPAN,
        GROUP=GROUP,
        num_warps=8,
    )
    return chosen, top_ids, top_logprobs
