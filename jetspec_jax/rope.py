"""Rotary position embeddings: feature i of a head turns together with feature i + D/2.

Axis letters: B batch, N block rows, D head_dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import DecoderConfig
from jetspec_jax.rope_scaling import Llama3Scaling, YarnScaling


class Rope(NamedTuple):
    """What the two halves of a head's features contribute to its rotation, float32 `[B, N, 1, 2, D / 2]`.

    first: of features before D/2: cosines for the first half of the result, sines for the second.
    second: of features from D/2 on: minus sines, and cosines.
    """

    first: jax.Array
    second: jax.Array


def rope_at(positions: jax.Array, config: DecoderConfig) -> Rope:
    """Rotary angles, in float32, of absolute `positions` `[B, N]`."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    scale = 1.0
    if isinstance(config.rope_scaling, YarnScaling):
        frequencies = frequencies * _yarn_stretch(config.head_dim, config.rope_theta, config.rope_scaling)
        scale = _yarn_attention_factor(config.rope_scaling)
    elif isinstance(config.rope_scaling, Llama3Scaling):
        frequencies = frequencies * _llama3_stretch(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    return Rope(*(jnp.stack(pair, axis=2)[:, :, None] for pair in ((cos, sin), (-sin, cos))))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """`x` `[B, N, heads, D]` rotated by `rope`: feature i pairs with feature i + D/2."""
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # Each half is broadcast over the result's two: unlike a concatenation, that is one vectorised loop.
    rotated = halves[..., :1, :] * rope.first + halves[..., 1:, :] * rope.second
    return rotated.reshape(x.shape).astype(x.dtype)


def _yarn_stretch(head_dim: int, theta: float, scaling: YarnScaling) -> np.ndarray:
    """What YaRN multiplies each frequency by, float32 `[D / 2]`: 1 for the fast ones, 1 / factor for the slow."""

    def feature_that_turns(times: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = feature_that_turns(scaling.beta_fast), feature_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # transformers caps by the number of features, not of pairs; what a model was tuned with is what counts.
    low, high = max(low, 0), min(high, head_dim - 1)
    slow = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0, 1)
    return (slow / scaling.factor + (1 - slow)).astype(np.float32)


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    """What cosines and sines are multiplied by, as the YaRN paper suggests when the config does not say."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _llama3_stretch(head_dim: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """What Llama 3.1 multiplies each frequency by, float32 `[D / 2]`: from 1 / factor for the slow to 1."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position_embeddings / wavelengths
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    fast = np.clip(fast, 0, 1)
    return ((1 - fast) / scaling.factor + fast).astype(np.float32)
