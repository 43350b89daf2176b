"""One token for each row of logits: temperature, top-k, top-p, min-p, then Gumbel's argmax.

Logits arrive processed (bias, penalties, forbidden tokens as -inf). For a row with temperature
T = 0 the token is the argmax. Otherwise p = softmax(logits / T), and a token may be chosen if
* top-k: its logit is at least the k-th largest;
* top-p: its logit is at least that of the nucleus's last token, the nucleus being the fewest most
  likely tokens whose probability, renormalised after top-k, adds up to `top_p` or more
  (Holtzman et al. 2020, section 3.1);
* min-p: its probability is at least `min_p` times the largest (Nguyen et al. 2024, section 3).
All three are thresholds on the logit, and **every token equal to a threshold is kept**: ties are
never broken by order. The token is argmax(logit / T + gumbel) over those (`kernels.noise`), ties
to the lowest id. A NaN logit counts as -inf; where every logit is -inf, token 0 is chosen.

Neither sorts nor finds the nucleus, in two launches that depend on shapes alone:
* `_scan_kernel`, grid `(ceil(vocab / 4096), num_rows)`: reads all logits once. Of 4096 tokens the
  best (`sampling_race`), and for rows with a filter the sum of exponentials and the maximum of
  each 32 tokens, from which the second kernel knows what it need not read (`sampling_groups`).
* `_choose_kernel`, grid `(num_rows,)`: rows without a filter take the best. Top-k's threshold is
  found by bisection among about k groups. Top-p rejects, an idea of FlashInfer's sampler (Ye et
  al. 2025, arXiv 2501.01005) made deterministic: with fixed noise the token over the nucleus is
  the first of a sequence that lies in it, of which each member is the best token among those
  strictly more likely than the member before. A member lies in it if what is more likely
  than it weighs less than `top_p`. The first does with probability `top_p`, and the tokens more
  likely than it are mostly few.
Bytes moved a call: `num_rows * vocab * itemsize`, once; a flat row with top-p is read again, once
or twice. Sums depend on a row's values alone, never on the batch: so does its token.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.noise import gumbel_reference
from hillstar.kernels.sampling_groups import (
    CHUNK,
    CHUNK_GROUPS,
    GROUP,
    LOWEST,
    SPAN,
    best_above,
    bound_of_top,
    kth_largest,
    list_groups,
    load_chunk,
    total_weight,
    weight_above,
    weights,
)
from hillstar.kernels.sampling_race import no_winner, race


def sample_reference(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """The specification of `sample`: same arguments, same result."""
    token_ids = []
    for row, given in enumerate(logits.float()):
        x = given.masked_fill(given.isnan(), -math.inf)
        t, k, p = float(temperature[row]), int(top_k[row]), float(top_p[row])
        if t > 0:
            threshold = x.max() + t * torch.log(min_p[row])
            kept = x
            if 0 < k < len(x):
                threshold = torch.maximum(threshold, x.topk(k).values[-1])
                kept = x[x >= x.topk(k).values[-1]]
            if p < 1:
                ordered = kept.sort(descending=True).values
                mass = ((ordered - x.max()) / t).double().exp().cumsum(0)
                last = torch.count_nonzero(mass < p * mass[-1])
                threshold = torch.maximum(threshold, ordered[last])
            token_range = torch.arange(len(x), dtype=torch.int32, device=x.device)
            scores = x / t + gumbel_reference(keys[row], token_range)
            x = scores.masked_fill(x < threshold, -math.inf)
        token_ids.append(int((x == x.max()).to(torch.int8).argmax()))
    return torch.tensor(token_ids, dtype=torch.int32, device=logits.device)


@jit
def _load_parameters(
    index: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    vocab: tl.tensor,
) -> Any:
    """Temperature, top-k (0 = off, also where it is the vocabulary), top-p, min-p, and whether
    the row has a filter."""
    temperature = tl.load(temperatures + index)
    temperature = tl.where(temperature > 0, tl.maximum(temperature, 1e-30), 0.0)  # of finite 1 / T
    top_k = tl.load(top_ks + index)
    top_k = tl.where((temperature > 0) & (top_k > 0) & (top_k < vocab), top_k, 0)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    is_filtered = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return temperature, top_k, top_p, min_p, is_filtered


@jit
def _scan_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    keys: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    group_maxima: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    chunk, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_k, top_p, _, is_filtered = _load_parameters(
        index, temperatures, top_ks, top_ps, min_ps, vocab
    )
    row = logits + index * stride
    x, tokens, groups = load_chunk(row, chunk, vocab, GROUPS, GROUP)
    where = index * tl.num_programs(0) + chunk
    if is_filtered:
        in_groups = tl.max(x, axis=1)
        tl.store(group_maxima + index * num_groups + groups, in_groups, mask=groups < num_groups)
        highest = tl.max(in_groups, axis=0)
        tl.store(maxima + where, highest)
        if (top_k == 0) & (top_p < 1):
            weight = weights(x, highest, 1.0 / temperature)
            tl.store(sums + where, tl.sum(tl.sum(weight, axis=1), axis=0))
    if top_k == 0:
        if temperature > 0:
            key0, key1 = tl.load(keys + 2 * index), tl.load(keys + 2 * index + 1)
            score, token = no_winner()
            score, token = race(row, x, tokens, temperature, key0, key1, score, token)
        else:
            score = tl.max(x, axis=None)
            token = tl.min(tl.where(x == score, tokens, 0x7FFFFFFF), axis=None)
        tl.store(best_scores + where, score)
        tl.store(best_tokens + where, token)


@jit
def _best_of_chunks(scores: tl.tensor, tokens: tl.tensor, mask: tl.tensor) -> Any:
    """The token of the best score, ties to the lowest id; 0 where all are -inf."""
    found = tl.load(scores, mask=mask, other=float("-inf"))
    best = tl.max(found, axis=0)
    is_best = mask & (found == best) & (found > float("-inf"))
    token = tl.min(tl.where(is_best, tl.load(tokens, mask=mask, other=0), 0x7FFFFFFF), axis=0)
    return tl.where(token == 0x7FFFFFFF, 0, token)


@jit
def _first_in_nucleus(
    row: tl.tensor,
    listed: tl.tensor,
    num_listed: tl.tensor,
    vocab: tl.tensor,
    token: tl.tensor,
    value: tl.tensor,
    needed: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """The first of a token, whose logit is `value`, and those that follow it by rejection, above
    which there is less than the needed weight, or nothing."""
    is_open = value < highest
    while is_open:
        above = weight_above(
            row, listed, num_listed, vocab, value, highest, 1.0 / temperature, True, SPAN, GROUP
        )
        is_open = above >= needed
        if is_open:
            token = best_above(
                row,
                listed,
                num_listed,
                vocab,
                value,
                temperature,
                key0,
                key1,
                True,
                SPAN,
                GROUP,
            )
            value = tl.load(row + token).to(tl.float32)
            is_open = value < highest
    return token


@jit
def _choose_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    keys: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    group_maxima: tl.tensor,
    lists: tl.tensor,
    token_ids: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_groups: tl.tensor,
    CHUNKS_PADDED: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, min_p, is_filtered = _load_parameters(
        index, temperatures, top_ks, top_ps, min_ps, vocab
    )
    chunks = tl.arange(0, CHUNKS_PADDED)
    in_row = chunks < num_chunks
    part = index * num_chunks + chunks
    row = logits + index * stride
    token = tl.full([], 0, dtype=tl.int32)
    value = tl.full([], float("-inf"), dtype=tl.float32)
    if top_k == 0:
        token = _best_of_chunks(best_scores + part, best_tokens + part, in_row)
        value = tl.load(row + token).to(tl.float32)
    tl.store(token_ids + index, token)
    if not is_filtered:
        return
    highest = tl.max(tl.load(maxima + part, mask=in_row, other=float("-inf")), axis=0)
    if highest == float("-inf"):
        return
    floor = tl.full([], float("-inf"), dtype=tl.float32)
    if min_p > 0:
        floor = highest + temperature * tl.log(tl.minimum(min_p, 1.0))
    if (top_k == 0) & (top_p >= 1) & (value >= floor):
        return

    key0, key1 = tl.load(keys + 2 * index), tl.load(keys + 2 * index + 1)
    inverse = 1.0 / temperature
    groups = tl.arange(0, GROUPS_PADDED)
    exists = groups < num_groups
    tops = tl.load(group_maxima + index * num_groups + groups, mask=exists, other=float("-inf"))
    # Of the tokens that reach this one the kept are a part, and what is needed to tell which.
    bound = tl.maximum(value, floor)
    if top_k > 0:
        bound = bound_of_top(tops, exists, top_k, num_groups, highest)
    bound = tl.maximum(bound, LOWEST)  # -inf is never chosen
    listed = lists + index * num_groups
    num_listed = list_groups(listed, groups, tops >= bound)
    total = tl.full([], 0.0, dtype=tl.float32)
    if top_k > 0:
        bound = kth_largest(row, listed, num_listed, vocab, top_k, bound, highest, SPAN, GROUP)
        if top_p < 1:
            total = weight_above(
                row, listed, num_listed, vocab, bound, highest, inverse, False, SPAN, GROUP
            )
    elif top_p < 1:
        total = total_weight(maxima + part, sums + part, in_row, highest, inverse)
    if (top_k > 0) | (value < floor):
        token = best_above(
            row,
            listed,
            num_listed,
            vocab,
            tl.maximum(bound, floor),
            temperature,
            key0,
            key1,
            False,
            SPAN,
            GROUP,
        )
        value = tl.load(row + token).to(tl.float32)
    if top_p < 1:
        token = _first_in_nucleus(
            row,
            listed,
            num_listed,
            vocab,
            token,
            value,
            top_p * total,
            highest,
            temperature,
            key0,
            key1,
            SPAN,
            GROUP,
        )
    tl.store(token_ids + index, token)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Choose one token for each row: int32 `[num_rows]`, new.

    logits: `[num_rows, vocab]`, float32, bfloat16 or float16, processed, rows may be strided;
    left unchanged. temperature: float32 `[num_rows]`, 0 = greedy. top_k: int32, 0 = off. top_p:
    float32, 1 = off. min_p: float32, 0 = off. keys: int32 `[num_rows, 2]`, contiguous, from
    `noise_keys(seed, position)`. All on one device.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device = logits.device
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOATS, device=device)
    num_rows, vocab = logits.shape
    if vocab == 0:
        raise ValueError("logits: 0 tokens; expected at least one")
    rows, floats, ints = (num_rows,), (torch.float32,), (torch.int32,)
    check_tensor("temperature", temperature, shape=rows, dtypes=floats, device=device)
    check_tensor("top_k", top_k, shape=rows, dtypes=ints, device=device)
    check_tensor("top_p", top_p, shape=rows, dtypes=floats, device=device)
    check_tensor("min_p", min_p, shape=rows, dtypes=floats, device=device)
    check_tensor("keys", keys, shape=(num_rows, 2), dtypes=ints, device=device, contiguous=True)
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return token_ids
    num_chunks, num_groups = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, GROUP)
    maxima, sums, best_scores = torch.empty((3, num_rows, num_chunks), device=device)
    best_tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    group_maxima = torch.empty((num_rows, num_groups), device=device)
    parameters = (temperature, top_k, top_p, min_p, keys)
    parts = (maxima, sums, best_scores, best_tokens, group_maxima)
    stride = logits.stride(0)
    _scan_kernel[(num_chunks, num_rows)](
        logits,
        *parameters,
        *parts,
        stride,
        vocab,
        num_groups,
        GROUPS=CHUNK_GROUPS,
        GROUP=GROUP,
        num_warps=4,
    )
    _choose_kernel[(num_rows,)](
        logits,
        *parameters,
        *parts,
        torch.empty((num_rows, num_groups), dtype=torch.int32, device=device),
        token_ids,
        stride,
        vocab,
        num_chunks,
        num_groups,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        GROUPS_PADDED=triton.next_power_of_2(num_groups),
        SPAN=SPAN,
        GROUP=GROUP,
        num_warps=16,
    )
    return token_ids
