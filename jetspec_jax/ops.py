"""Operations that XLA does well only in a certain form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_FEW_ROWS = 64


def project(x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """`x @ weight.T`, `[..., out]` of `x` `[..., in]` and `weight` `[out, in]`, accumulated and returned in `dtype`.

    One product over flattened rows: XLA's gradient of a batched one transposes its operands. Of few rows the weight
    is the left operand, which XLA reads where it lies on a CPU; a right operand it repacks first, at half the speed.
    `dtype` None is x's own.
    """
    flat = x.reshape(-1, x.shape[-1])
    contracted = (((1,), (1,)), ((), ()))
    if flat.shape[0] <= _FEW_ROWS:
        out = jax.lax.dot_general(weight, flat, contracted, preferred_element_type=dtype).T
    else:
        out = jax.lax.dot_general(flat, weight, contracted, preferred_element_type=dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of the last axis of `x` `[..., n]`, descending, and their indices; equal ones by index.

    As `jax.lax.top_k`, over flattened rows: with more than two axes XLA sorts each row whole.
    """
    rows = math.prod(x.shape[:-1])  # not -1, which an axis of no elements leaves open
    values, indices = jax.lax.top_k(x.reshape(rows, x.shape[-1]), k)
    return values.reshape(*x.shape[:-1], k), indices.reshape(*x.shape[:-1], k)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x` `[B, n]` at `index` `[B, m]`, which must be in bounds."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def after(count: jax.Array, x: jax.Array) -> jax.Array:
    """`count` (int32 `[B]`, none negative), which XLA cannot have before `x` `[B, ...]`.

    Cache rows written by such a count are written after the reads that x comes from. Without the order XLA keeps a
    copy of the whole cache for them.
    """
    first = x.reshape(x.shape[0], -1)[:, 0]
    bits = jax.lax.bitcast_convert_type(first, jnp.int32 if first.dtype.itemsize == 4 else jnp.int16)
    return jnp.maximum(count, jnp.minimum(bits.astype(jnp.int32), 0))


def argmax(x: jax.Array) -> jax.Array:
    """The index, int32, of the largest of the last axis of `x` `[..., n]`; the first of equal ones.

    As `jnp.argmax` for numbers, in two plain reductions: XLA's reduction over (value, index) pairs is not vectorised
    on CPUs. A row with a NaN gives n - 1.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    best = jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(x == best, index, x.shape[-1] - 1), axis=-1)
