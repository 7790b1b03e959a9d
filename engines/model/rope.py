"""Rotary positions (Su et al. 2021), as tables."""

from __future__ import annotations

import math

import torch

from engines.model.config import ModelConfig


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_positions, head_dim]; the two halves are equal (component i pairs with i +
    D/2)."""
    frequencies = inverse_frequencies(config)
    angles = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: leave short wavelengths, stretch long ones, blend between (as its release describes).
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
