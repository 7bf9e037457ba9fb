"""The public function: checks the contract, then calls the implementation that serves it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.pallas.tree_attention.xla import attend


def tree_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Grouped-query attention of a block's nodes to their prefix and, under a mask, to the block itself.

    Axis letters: B batch, N nodes, H query heads, K kv heads (H a multiple of K), D head_dim, L capacity.

    Args:
        query: `[B, N, H, D]`.
        key, value: `[B, N, K, D]`, the block's own.
        cache_key, cache_value: `[B, K, L, D]`; rows at or past `lengths` are never read into a result, whatever
            they hold (NaN included).
        lengths: `int32[B]`, prefix rows that every node of the batch row sees.
        mask: `uint32[B or 1, N, ceil(N / 32)]`, packed as in `masks.py`: which nodes each node sees.
        scale: of the scores; 1 / sqrt(D) by default.

    Returns:
        `[B, N, H, D]` in the query's dtype; softmax and accumulation are float32. A node that sees nothing gives 0.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    batch, nodes, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    expected = {
        "key": (key.shape, (batch, nodes, kv_heads, head_dim)),
        "value": (value.shape, key.shape),
        "cache_key": (cache_key.shape, (batch, kv_heads, cache_key.shape[2], head_dim)),
        "cache_value": (cache_value.shape, cache_key.shape),
        "lengths": (lengths.shape, (batch,)),
        "mask": (mask.shape, (mask.shape[0], nodes, -(-nodes // 32))),
    }
    wrong = [f"{name} is {got}, expected {want}" for name, (got, want) in expected.items() if got != want]
    if heads % kv_heads:
        wrong.append(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    if mask.shape[0] not in (1, batch) or mask.dtype != jnp.uint32:
        wrong.append(f"mask is {mask.dtype}[{mask.shape[0]}, ...], expected uint32[{batch} or 1, ...]")
    if wrong:
        raise ValueError("tree_attention: " + "; ".join(wrong))
    scale = head_dim**-0.5 if scale is None else scale
    return attend(query, key, value, cache_key, cache_value, lengths, mask, scale=scale)
