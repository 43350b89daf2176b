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
* `scan_kernel`, grid `(ceil(vocab / 4096), num_rows)`: reads all logits once. Of 4096 tokens the
  best (`sampling_race`), and for rows with a filter the sum of exponentials and the maximum of
  each 32 tokens, from which the second kernel knows what it need not read (`sampling_groups`).
* `choose_kernel`, grid `(num_rows,)`: rows without a filter take the best. Top-k's threshold is
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

import torch
import triton

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.noise import gumbel_reference
from hillstar.kernels.sampling_groups import CHUNK, CHUNK_GROUPS, GROUP, SPAN
from hillstar.kernels.sampling_kernels import choose_kernel, scan_kernel


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
    scan_kernel[(num_chunks, num_rows)](
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
    choose_kernel[(num_rows,)](
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
