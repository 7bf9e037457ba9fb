"""The XLA implementation: einsum over the prefix in chunks with a running softmax, so that memory stays bounded."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.pallas.tree_attention.masks import unpack_mask


def chunk_size(capacity: int) -> int:
    """Prefix rows scored at once, for a cache of `capacity` rows.

    The loop over chunks stops at the longest row, so that time follows the committed length and not the capacity.
    Short caches are read in short steps, where a step costs about what its rows cost.
    """
    return min(capacity, 128 if capacity <= 1024 else 512)


class Running(NamedTuple):
    """A softmax under way: maximum and sum `[B, K, G * N]`, weighted values `[B, K, G * N, D]`, all float32."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    page_table: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    """See `tree_attention`; arguments are already checked."""
    batch, nodes, heads, head_dim = query.shape
    kv_heads, size = cache_key.shape[1:3]
    capacity = size if page_table is None else page_table.shape[1] * size
    group = heads // kv_heads
    grouped = query.reshape(batch, nodes, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, kv_heads, group * nodes, head_dim)
    visible = jnp.tile(unpack_mask(mask, nodes)[:, None], (1, 1, group, 1))
    state = _include(None, grouped, key.swapaxes(1, 2), value.swapaxes(1, 2), visible, scale)

    def include_chunk(index: jax.Array | int, state: Running, size: int) -> Running:
        # The last chunk is moved back to fit; the rows that it repeats are masked by `start`.
        start = jnp.minimum(index * size, capacity - size)
        keys, values = (_rows(cache, page_table, start, size) for cache in (cache_key, cache_value))
        rows = start + jnp.arange(size, dtype=jnp.int32)
        live = (rows >= index * size)[None] & (rows[None] < lengths[:, None])
        values = jnp.where(live[:, None, :, None], values, jnp.zeros((), values.dtype))
        return _include(state, grouped, keys, values, live[:, None, None], scale)

    size = chunk_size(capacity)
    if page_table is not None:  # whole pages, which a last chunk that is moved back keeps
        size = min(capacity, -(-size // cache_key.shape[2]) * cache_key.shape[2])
    if size == capacity:
        state = include_chunk(0, state, size)
    else:
        chunks = (jnp.max(lengths) + size - 1) // size
        with jax.named_scope("prefix"):
            state = jax.lax.fori_loop(0, chunks, lambda i, s: include_chunk(i, s, size), state)
    out = state.values / jnp.where(state.total == 0, 1.0, state.total)[..., None]
    out = out.reshape(batch, kv_heads, group, nodes, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(query.shape).astype(query.dtype)


def _rows(cache: jax.Array, page_table: jax.Array | None, start: jax.Array, size: int) -> jax.Array:
    """Prefix rows `[B, K, size, D]` from `start` on; with pages, both are multiples of their size."""
    if page_table is None:
        return jax.lax.dynamic_slice_in_dim(cache, start, size, axis=2)
    page_size = cache.shape[2]
    pages = jax.lax.dynamic_slice_in_dim(page_table, start // page_size, size // page_size, axis=1)
    rows = cache.at[pages].get(mode="clip")  # entries past a row's length may be anything
    return rows.swapaxes(1, 2).reshape(pages.shape[0], cache.shape[1], size, cache.shape[3])


def _include(
    state: Running | None, query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, scale: float
) -> Running:
    """The running softmax after keys and values `[B, K, M, D]`, where `visible` (broadcast to `[B, K, G * N, M]`)."""
    # Whole float32 products, also where accelerators would round their operands to fewer bits.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else None
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=precision)
    scores = einsum("bknd,bkmd->bknm", query, key) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    maximum = jnp.max(scores, axis=-1)
    if state is not None:
        maximum = jnp.maximum(maximum, state.maximum)
    # A row that has seen nothing yet keeps maximum -inf; exponents are then taken against 0.
    base = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = jnp.exp(scores - base[..., None])
    total = jnp.sum(weights, axis=-1)
    values = einsum("bknm,bkmd->bknd", weights.astype(value.dtype), value)
    if state is not None:
        decay = jnp.exp(state.maximum - base)
        total = total + decay * state.total
        values = values + decay[..., None] * state.values
    return Running(maximum, total, values)
