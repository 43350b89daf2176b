"""The two kernels of `kernels/sampling.py`, which says what they do."""

from typing import Any

import triton.language as tl

from hillstar.kernels.jit import jit
from hillstar.kernels.sampling_groups import (
    LOWEST,
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
def scan_kernel(
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
def choose_kernel(
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
