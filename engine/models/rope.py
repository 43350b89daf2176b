"""Cosines and sines of rotary position embedding, for every scaling a configuration can name.

Rotary embedding: Su et al. 2021 (arXiv 2104.09864), section 3.2. Linear position interpolation:
Chen et al. 2023 (arXiv 2306.15595). YaRN: Peng et al. 2023 (arXiv 2309.00071), sections 3.2-3.4.
Llama-3 scaling: the Llama 3.1 release.
"""

import math

import torch

from hillstar.engine.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, max_position: int) -> torch.Tensor:
    """The rotation of each position: float32 `[max_position, head_dim]` on the CPU.

    Columns `[: head_dim // 2]` are cosines, the rest sines; dimension i of a head is rotated
    together with dimension i + head_dim // 2. YaRN's attention factor is multiplied in.
    """
    frequencies, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 `[head_dim // 2]`, and the factor on cosine and sine."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, periods), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend those between."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_max_position / wavelengths  # full turns over the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - keep) * plain / rope.factor + keep * plain
    scaled = torch.where(
        wavelengths > rope.original_max_position / rope.low_freq_factor,
        plain / rope.factor,
        blended,
    )
    return torch.where(
        wavelengths < rope.original_max_position / rope.high_freq_factor, plain, scaled
    )


def _yarn(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """Extrapolate fast dimensions, interpolate slow ones, ramp between (YaRN, section 3.2)."""
    num_pairs = len(periods)
    dim = 2 * num_pairs

    def dimension_of(turns: float) -> float:
        """The dimension that makes `turns` full turns over the original context."""
        length = rope.original_max_position / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Scales q and k so that attention's entropy stays (YaRN, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
