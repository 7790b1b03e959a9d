"""Rotary positions (Su et al. 2021), as tables. The arithmetic is transformers' (5.24.0), operation by
operation, so that the float32 frequencies are its to the bit."""

from __future__ import annotations

import math

import torch

from engines.model.config import ModelConfig
from engines.model.rope_scaling import RopeScaling


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [context, head_dim], YaRN's attention factor included; the two halves are equal
    (component i pairs with i + D/2)."""
    frequencies = inverse_frequencies(config)
    angles = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    factor = config.rope_scaling.attention_factor if config.rope_scaling else 1.0
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    periods = config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / periods
    if scaling.kind == "linear":
        return (1.0 / periods) / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(1.0 / periods, scaling)
    return _yarn(periods, scaling, config.head_dim, config.rope_theta)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: leave short wavelengths, stretch long ones, blend between."""
    original, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)


def _yarn(periods: torch.Tensor, scaling: RopeScaling, head_dim: int, theta: float) -> torch.Tensor:
    """YaRN: leave pairs that turn more than beta_fast times within the original context, stretch those that
    turn less than beta_slow times, ramp between."""

    def pair(turns: float) -> float:
        """The pair (as a component of the head) that turns so often, which need not be whole."""
        return (head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi))) / (
            2 * math.log(theta)
        )

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
