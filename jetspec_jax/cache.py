"""Linear key/value caches: one array pair per layer, updated in place, one length per row held by the caller."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jetspec_jax.config import DecoderConfig
from jetspec_jax.layers import Attend, KeyValue
from kernels.pallas.tree_attention import Backend, tree_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of committed tokens: per layer `[B, capacity, K, D]`.

    A layer's array is passed whole to the attention, never sliced, so that no copy of it is made. `attention`, which
    backend of `tree_attention` reads it, is static: programs that take a cache are compiled for it.
    """

    layers: tuple[KeyValue, ...]
    attention: Backend = dataclasses.field(default="auto", metadata={"static": True})

    @classmethod
    def zeros(
        cls, config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype, attention: Backend = "auto"
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        layers = (KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers))
        return cls(tuple(layers), attention)

    def append(self, rows: tuple[KeyValue, ...], lengths: jax.Array, count: jax.Array) -> KVCache:
        """The cache with the first `count[b]` of the new rows of each batch row at `lengths[b]` onwards.

        Args:
            rows: per layer, `[B, N, K, D]`.
            lengths: `[B]`, where each batch row's new rows start.
            count: `[B]`, how many of its N rows are written; the rest is dropped, and nothing else changes.
        """
        return jax.tree.map(lambda old, new: write_rows(old, new, lengths, count), self, KVCache(rows, self.attention))


def write_rows(array: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`array` `[B, L, ...]` with `rows[b, :count[b]]` at `array[b, start[b]:]`.

    Rows past `count` get an index past the end, which the scatter drops: unlike a clamped slice update, it cannot
    shift a write onto rows that are already good.
    """
    batch, width = rows.shape[:2]
    offset = jnp.arange(width, dtype=start.dtype)
    index = jnp.where(offset[None] < count[:, None], start[:, None] + offset[None], array.shape[1])
    return array.at[jnp.arange(batch)[:, None], index].set(rows.astype(array.dtype), mode="drop")


def gather_rows(rows: tuple[KeyValue, ...], index: jax.Array) -> tuple[KeyValue, ...]:
    """Rows `[B, N, K, D]` of every layer at node `index` `[B, M]`: `[B, M, K, D]`."""
    batch = jnp.arange(index.shape[0])[:, None]
    return jax.tree.map(lambda x: x[batch, index], rows)


def attend_to(cache: KVCache, layer: KeyValue, lengths: jax.Array, mask: jax.Array) -> Attend:
    """Attention of a block to the cached prefix in one layer of `cache` and, under `mask`, to itself."""
    return lambda query, key, value: tree_attention(
        query, key, value, layer.key, layer.value, lengths, mask, backend=cache.attention
    )
