"""The table of cosines and sines that rotary embedding reads, for every kind of frequency scaling."""

from __future__ import annotations

import math

import torch

from engine.errors import ConfigurationError
from engine.model.spec import RopeSpec


def cos_sin_table(rope: RopeSpec, max_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """fp32 [max_positions, rotary_dim]: rotary_dim/2 cosines, then rotary_dim/2 sines, of each position."""
    frequencies, scale = inverse_frequencies(rope, max_positions)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
    return table.to(device)


def identity_table(rope: RopeSpec, max_positions: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A table that rotates by nothing, for layers without RoPE."""
    half = rope.rotary_dim // 2
    table = torch.zeros(max_positions, 2 * half, dtype=torch.float32)
    table[:, :half] = 1.0
    return table.to(device)


def inverse_frequencies(rope: RopeSpec, max_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair, fp32 [rotary_dim/2], and the factor on cosines and sines. max_positions: the
    context served, by which dynamic and longrope scale every position of it."""
    theta = _dynamic_theta(rope, max_positions) if rope.kind == "dynamic" else rope.theta
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (theta**exponents)
    scale = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies, scale = _yarn(theta**exponents, rope), _yarn_scale(rope)
    elif rope.kind == "longrope":
        long = max_positions > rope.original_max_positions
        factors = torch.tensor(rope.long_factors if long else rope.short_factors, dtype=torch.float32)
        frequencies, scale = 1.0 / (factors * theta**exponents), _longrope_scale(rope)
    if rope.divisors:
        frequencies = frequencies / _divisors(rope, len(frequencies))
    return frequencies, scale


def _divisors(rope: RopeSpec, count: int) -> torch.Tensor:
    if len(rope.divisors) < count:
        raise ConfigurationError(f"rope_freqs.weight has {len(rope.divisors)} factors for {count} frequencies")
    return torch.tensor(rope.divisors[:count], dtype=torch.float32)


def _dynamic_theta(rope: RopeSpec, max_positions: int) -> float:
    # The base grows with the context served; up to the original length it is the original one.
    length, original, dim = (
        max(max_positions, rope.original_max_positions),
        rope.original_max_positions,
        rope.rotary_dim,
    )
    stretch = rope.factor * length / original - (rope.factor - 1)
    return float(rope.theta * stretch ** (dim / (dim - 2)))


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated."""
    original, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, (1 - blend) * slowed / rope.factor + blend * slowed, slowed)


def _yarn(base_powers: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Fast dimensions keep their frequency, slow ones are divided by `factor`, with a linear ramp between."""
    low, high = _yarn_bounds(rope)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * base_powers) * (1 - keep) + 1.0 / base_powers * keep


def _yarn_bounds(rope: RopeSpec) -> tuple[float, float]:
    dim = rope.rotary_dim

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_scale(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope_scale(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))
