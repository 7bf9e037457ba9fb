"""Operations that XLA does well only in a certain form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis of `x` `[..., n]`, descending, and their indices; equal ones by index.

    As `jax.lax.top_k`, over flattened rows: with more than two axes XLA sorts each row whole.
    """
    rows = math.prod(x.shape[:-1])  # not -1, which an axis of no elements leaves open
    values, indices = jax.lax.top_k(x.reshape(rows, x.shape[-1]), k)
    return values.reshape(*x.shape[:-1], k), indices.reshape(*x.shape[:-1], k)


def argmax(x: jax.Array) -> jax.Array:
    """The index, int32, of the largest of the last axis of `x` `[..., n]`; the first of equal ones.

    As `jnp.argmax` for numbers, in two plain reductions: XLA's reduction over (value, index) pairs is not vectorised
    on CPUs. A row with a NaN gives n - 1.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    best = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == best, index, x.shape[-1] - 1), axis=-1)
