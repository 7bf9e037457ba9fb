"""What a backend must know of a call before it runs: shapes and dtypes, checked once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Problem(NamedTuple):
    """One call's static facts. `capacity`: prefix rows a batch row can have; `page_size`: None when contiguous."""

    batch: int
    nodes: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    page_size: int | None
    dtype: jnp.dtype

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads


def describe(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache_key: jax.Array,
    cache_value: jax.Array,
    lengths: jax.Array,
    mask: jax.Array,
    page_table: jax.Array | None,
) -> Problem:
    """The problem that these arguments of `tree_attention` pose.

    Raises:
        ValueError: they do not fit each other; the message names each that does not.
    """
    batch, nodes, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    blocks = batch if page_table is None else cache_key.shape[0]
    expected = {
        "key": (key.shape, (batch, nodes, kv_heads, head_dim)),
        "value": (value.shape, key.shape),
        "cache_key": (cache_key.shape, (blocks, kv_heads, cache_key.shape[2], head_dim)),
        "cache_value": (cache_value.shape, cache_key.shape),
        "lengths": (lengths.shape, (batch,)),
        "mask": (mask.shape, (mask.shape[0], nodes, -(-nodes // 32))),
    }
    if page_table is not None:
        expected["page_table"] = (page_table.shape, (batch, *page_table.shape[1:2]))
    wrong = [f"{name} is {got}, expected {want}" for name, (got, want) in expected.items() if got != want]
    if heads % kv_heads:
        wrong.append(f"{heads} query heads are not a multiple of {kv_heads} kv heads")
    if mask.shape[0] not in (1, batch) or mask.dtype != jnp.uint32:
        wrong.append(f"mask is {mask.dtype}[{mask.shape[0]}, ...], expected uint32[{batch} or 1, ...]")
    named = {"key": key, "value": value, "cache_key": cache_key, "cache_value": cache_value}
    wrong += [f"{name} is {x.dtype}, and query {query.dtype}" for name, x in named.items() if x.dtype != query.dtype]
    integers = {"lengths": lengths} if page_table is None else {"lengths": lengths, "page_table": page_table}
    wrong += [f"{name} is {x.dtype}, expected int32" for name, x in integers.items() if x.dtype != jnp.int32]
    if wrong:
        raise ValueError("tree_attention: " + "; ".join(wrong))
    page_size = None if page_table is None else cache_key.shape[2]
    capacity = cache_key.shape[2] if page_table is None else page_table.shape[1] * cache_key.shape[2]
    return Problem(batch, nodes, heads, kv_heads, head_dim, capacity, page_size, jnp.dtype(query.dtype))
