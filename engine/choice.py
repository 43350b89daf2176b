"""One token from a row of processed logits, as the CPU finds it.

The token is argmax(logit / temperature + Gumbel(seed, position, token id)) over the tokens that
top-k, top-p and min-p leave: a pure function of logits, seed and position, whatever else is in
the batch. `kernels/sampling.py` states the same rules and is the choice of CUDA.
"""

import numpy as np
import torch

from hillstar.engine.sampling_ops import Choices
from hillstar.kernels.noise import gumbel_reference, noise_bits


def choose_on_cpu(logits: torch.Tensor, choices: Choices) -> torch.Tensor:
    """See `SamplingOps.choose`. numpy does the searches: its argmax and comparisons are many times
    faster than torch's there."""
    best = logits.amax(-1).numpy()
    if np.isnan(best).any():
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best = logits.amax(-1).numpy()
    token_ids = logits.numpy().argmax(-1)  # ties to the lowest id
    sampling = np.flatnonzero((choices.temperature > 0) & np.isfinite(best))
    if len(sampling):
        scaled = logits[sampling] / torch.from_numpy(choices.temperature[sampling, None])
        thresholds = _thresholds(scaled, choices, sampling)
        for i, row in enumerate(sampling):
            token_ids[row] = _race(scaled[i].numpy(), thresholds[i], choices.keys[row])
    return torch.from_numpy(token_ids)


def _thresholds(scaled: torch.Tensor, choices: Choices, rows: np.ndarray) -> np.ndarray:
    """The lowest logit that may be chosen, float32 `[n]`: top-k, then top-p of what is left, then
    min-p. Tokens that tie with the last one kept are kept, so no order among ties matters."""
    with np.errstate(divide="ignore"):
        thresholds: np.ndarray = scaled.amax(-1).numpy() + np.log(choices.min_p[rows])
    for i, row in enumerate(rows):
        top_k, top_p = int(choices.top_k[row]), float(choices.top_p[row])
        kept = scaled[i]
        if 0 < top_k < len(kept):
            kth = kept.topk(top_k).values[-1]
            thresholds[i] = max(thresholds[i], float(kth))
            kept = kept[kept >= kth]
        if top_p < 1:
            thresholds[i] = max(thresholds[i], _nucleus(kept, top_p))
    return thresholds


def _nucleus(logits: torch.Tensor, top_p: float) -> float:
    """The lowest logit of the nucleus (Holtzman et al. 2020, arXiv 1904.09751).

    A token is kept if those before it, most likely first, hold less than `top_p` of the
    probability; the first always is. Sorts no more of `logits` than it needs.
    """
    best = logits.max()
    needed = top_p * float((logits - best).exp().sum(dtype=torch.float64))
    num_sorted = 256
    while True:
        num_sorted = min(num_sorted, len(logits))
        ordered = logits.topk(num_sorted).values
        reached = (ordered - best).exp().cumsum(0, dtype=torch.float64) >= needed
        if bool(reached[-1]) or num_sorted == len(logits):
            num_kept = num_sorted - int(reached.sum()) + 1
            return float(ordered[min(num_kept, num_sorted) - 1])
        num_sorted *= 16


def _race(logits: np.ndarray, threshold: np.float32, keys: np.ndarray) -> int:
    """The token with the largest logit + Gumbel among those at or above the threshold."""
    if threshold > -np.inf:
        token_ids = np.flatnonzero(logits >= threshold).astype(np.int32)
    else:
        token_ids = _contenders(logits, keys)
    scores = logits[token_ids] + gumbel_reference(keys, token_ids)
    return int(token_ids[scores.argmax()])


def _contenders(logits: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Every token that can win over the whole vocabulary: int32 `[n]`, usually a few.

    One that beats the most likely token's score s has -log(E) >= s - logit, and E >= v, so its
    uniform variable v is at most exp(logit - s): a comparison that spares two logarithms a token.
    """
    best = np.array([logits.argmax()], dtype=np.int32)
    score = logits[best] + gumbel_reference(keys, best)
    bits = noise_bits(keys, np.arange(len(logits), dtype=np.int32)).view(np.uint32)
    bounds = np.exp(np.minimum(logits - score, 1.0))  # v is below 1, so more is no bound
    bounds *= np.float32(1.001 * 2**32)  # rounding must not exclude a winner
    return np.flatnonzero(bits.astype(np.float32) <= bounds).astype(np.int32)
