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

Without a sort, in three launches that depend on shapes alone:
* `_threshold_kernel`, grid `(num_rows,)`: bisects the logits' values for a row's threshold. As
  integers of the same order float32 values are 2^32: at most 32 passes over the row for top-k
  and 32 for top-p, fewer as the row's range is smaller; rows without a filter leave at once.
* `_choose_kernel`, grid `(num_rows, ceil(vocab / 4096))`: the best of 4096 tokens.
* `_pick_kernel`, grid `(num_rows,)`: the best of those.
Bytes moved a call: `num_rows * vocab * itemsize` once, and once more a pass for filtered rows
(out of the L2 cache).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.noise import gumbel_reference


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
            if 0 < k < len(x):
                threshold = torch.maximum(threshold, x.topk(k).values[-1])
                kept = x[x >= x.topk(k).values[-1]]
            else:
                kept = x
            if p < 1:
                ordered = kept.sort(descending=True).values
                mass = ((ordered - x.max()) / t).exp().cumsum(0)
                last = torch.count_nonzero(mass < p * mass[-1])
                threshold = torch.maximum(threshold, ordered[last])
            token_range = torch.arange(len(x), dtype=torch.int32, device=x.device)
            scores = x / t + gumbel_reference(keys[row], token_range)
            x = scores.masked_fill(x < threshold, -math.inf)
        token_ids.append(int((x == x.max()).to(torch.int8).argmax()))
    return torch.tensor(token_ids, dtype=torch.int32, device=logits.device)


@jit
def _load_logits(row: tl.tensor, tokens: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """float32 logits; -inf past the end and for NaN."""
    x = tl.load(row + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@jit
def _order(bits: tl.tensor) -> tl.tensor:
    """The bits of a float32 as an int32 of the same order, and back: its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _mass_above(
    row: tl.tensor,
    vocab: tl.tensor,
    threshold: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """How many tokens reach the threshold (COUNT), or the sum of their exp((x - max) / T)."""
    mass = tl.zeros([BLOCK], dtype=tl.float32)  # counts are exact in it: each lane's is small
    for start in tl.range(0, vocab, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        x = _load_logits(row, start + tl.arange(0, BLOCK), vocab)
        if COUNT:
            weight = 1.0
        else:
            weight = tl.exp((x - highest) / temperature)
        mass += tl.where((x >= threshold) & (start + tl.arange(0, BLOCK) < vocab), weight, 0.0)
    return tl.sum(mass, axis=0)


@jit
def _bisect(
    row: tl.tensor,
    vocab: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    needed: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest threshold in `lowest … highest` above which there is at least `needed`.

    `lowest` has that much, whatever it is: it is the answer where nothing higher has.
    """
    low = _order(lowest.to(tl.int32, bitcast=True)).to(tl.int64)
    high = _order(highest.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        threshold = _order(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        mass = _mass_above(row, vocab, threshold, highest, temperature, COUNT, BLOCK)
        low = tl.where(mass >= needed, middle, low)
        high = tl.where(mass >= needed, high, middle)
        if COUNT:  # exactly the wanted tokens: any threshold that parts them will do
            high = tl.where(mass == needed, low + 1, high)
    return _order(low.to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def _threshold_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    thresholds: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    min_p = tl.load(min_ps + index)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if (temperature <= 0) | ((not has_top_k) & (top_p >= 1) & (min_p <= 0)):
        tl.store(thresholds + index, float("-inf"))
        return

    row = logits + index * stride
    largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    smallest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    for start in tl.range(0, vocab, BLOCK):  # pyright: ignore[reportGeneralTypeIssues]
        x = _load_logits(row, start + tl.arange(0, BLOCK), vocab)
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, x)
    highest = tl.max(largest, axis=0)
    if highest == float("-inf"):
        tl.store(thresholds + index, float("-inf"))
        return
    threshold = tl.min(smallest, axis=0)
    if has_top_k:
        count = top_k.to(tl.float32)
        threshold = _bisect(row, vocab, threshold, highest, temperature, count, True, BLOCK)
    if top_p < 1:
        mass = _mass_above(row, vocab, threshold, highest, temperature, False, BLOCK)
        needed = top_p * mass
        threshold = _bisect(row, vocab, threshold, highest, temperature, needed, False, BLOCK)
    if min_p > 0:
        threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
    tl.store(thresholds + index, threshold)


@jit
def _mix(h: tl.tensor) -> tl.tensor:
    """`fmix32` of the noise's definition, on uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def _gumbel(tokens: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """The noise of `kernels.noise`, step for step."""
    h = tokens.to(tl.uint32) * 0x9E3779B1 + key0.to(tl.uint32, bitcast=True)
    h = _mix(_mix(h) ^ key1.to(tl.uint32, bitcast=True))
    v = tl.minimum((h.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    # -log1p(-v): its series where 1 - v would round v away, seven terms to float32's precision.
    tail = 1.0 / 4 + v * (1.0 / 5 + v * (1.0 / 6 + v * (1.0 / 7)))
    series = v * (1.0 + v * (1.0 / 2 + v * (1.0 / 3 + v * tail)))
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@jit
def _choose_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    thresholds: tl.tensor,
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = _load_logits(logits + index * stride, tokens, vocab)
    temperature = tl.load(temperatures + index)
    if temperature > 0:
        allowed = scores >= tl.load(thresholds + index)
        noise = _gumbel(tokens, tl.load(keys + 2 * index), tl.load(keys + 2 * index + 1))
        scores = tl.where(allowed, tl.div_rn(scores, temperature) + noise, float("-inf"))
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), axis=0)
    where = index * tl.num_programs(1) + chunk
    tl.store(best_scores + where, best)
    tl.store(best_tokens + where, token)


@jit
def _pick_kernel(
    best_scores: tl.tensor,
    best_tokens: tl.tensor,
    token_ids: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS_PADDED: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    mask = chunks < num_chunks
    where = index * num_chunks + chunks
    scores = tl.load(best_scores + where, mask=mask, other=float("-inf"))
    tokens = tl.load(best_tokens + where, mask=mask, other=0x7FFFFFFF)
    best = tl.max(scores, axis=0)
    tl.store(token_ids + index, tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), axis=0))


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
    block = min(4096, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, block)
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
    best_scores = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    best_tokens = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    _threshold_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        thresholds,
        logits.stride(0),
        vocab,
        BLOCK=min(8192, triton.next_power_of_2(vocab)),
        num_warps=16,
    )
    _choose_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        keys,
        thresholds,
        best_scores,
        best_tokens,
        logits.stride(0),
        vocab,
        BLOCK=block,
        num_warps=8,
    )
    _pick_kernel[(num_rows,)](
        best_scores,
        best_tokens,
        token_ids,
        num_chunks,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
        num_warps=1,
    )
    return token_ids
