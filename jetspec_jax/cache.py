"""Linear key/value caches: one array pair per layer, updated in place, one length per row held by the caller."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jetspec_jax.config import DecoderConfig
from jetspec_jax.layers import Attend, KeyValue
from jetspec_jax.sharding import constrain, sharded, spec
from kernels.pallas.tree_attention import Backend, tree_attention

_AXES = ("batch", "kv_heads", None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of committed tokens: per layer `[B, K, capacity, D]`.

    Heads before tokens: a head's keys lie together, as its product with the queries reads them. A layer's array is
    passed whole to the attention, never sliced, so that no copy of it is made. `attention`, which backend of
    `tree_attention` reads it, is static: programs that take a cache are compiled for it.
    """

    layers: tuple[KeyValue, ...]
    attention: Backend = dataclasses.field(default="auto", metadata={"static": True})

    @classmethod
    def zeros(
        cls, config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype, attention: Backend = "auto"
    ) -> KVCache:
        """An empty cache for `batch` rows of up to `capacity` tokens."""
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        empty = lambda: constrain(jnp.zeros(shape, dtype), *_AXES)  # noqa: E731
        return cls(tuple(KeyValue(empty(), empty()) for _ in range(config.num_hidden_layers)), attention)

    def append(self, rows: tuple[KeyValue, ...], lengths: jax.Array, count: jax.Array) -> KVCache:
        """The cache with the first `count[b]` of the new rows of each batch row at `lengths[b]` onwards.

        Args:
            rows: per layer, `[B, N, K, D]`.
            lengths: `[B]`, where each batch row's new rows start.
            count: `[B]`, how many of its N rows are written; the rest is dropped, and nothing else changes.
        """
        index = row_index(lengths, count, rows[0].key.shape[1], self.layers[0].key.shape[2])
        inputs = spec(*_AXES), spec("batch", None, "kv_heads", None), spec("batch", None)
        write = sharded(_scatter, inputs, spec(*_AXES))
        return jax.tree.map(lambda old, new: write(old, new, index), self, KVCache(rows, self.attention))


def _scatter(old: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """`old` `[B, K, L, D]` with `new` `[B, N, K, D]` at `index` `[B, N]`."""
    batch = jnp.arange(old.shape[0])[:, None]
    return old.at[batch, :, index].set(new.astype(old.dtype), mode="drop")


def write_rows(array: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """`array` `[B, L, ...]` with `rows[b, :count[b]]` at `array[b, start[b]:]`."""
    index = row_index(start, count, rows.shape[1], array.shape[1])
    return array.at[jnp.arange(rows.shape[0])[:, None], index].set(rows.astype(array.dtype), mode="drop")


def row_index(start: jax.Array, count: jax.Array, width: int, capacity: int) -> jax.Array:
    """Where `width` new rows go, `[B, width]`: from `start` `[B]` on, and past the end from `count` `[B]` on.

    The scatter drops what is past the end: unlike a clamped slice update, it cannot shift a write onto rows that are
    already good.
    """
    offset = jnp.arange(width, dtype=start.dtype)
    return jnp.where(offset[None] < count[:, None], start[:, None] + offset[None], capacity)


def gather_rows(rows: tuple[KeyValue, ...], index: jax.Array) -> tuple[KeyValue, ...]:
    """Rows `[B, N, K, D]` of every layer at node `index` `[B, M]`: `[B, M, K, D]`."""
    batch = jnp.arange(index.shape[0])[:, None]
    return jax.tree.map(lambda x: x[batch, index], rows)


def attend_to(cache: KVCache, layer: KeyValue, lengths: jax.Array, mask: jax.Array) -> Attend:
    """Attention of a block to the cached prefix in one layer of `cache` and, under `mask`, to itself."""
    heads, kv_heads = spec("batch", None, "heads", None), spec("batch", None, "kv_heads", None)
    rows = spec("batch"), spec("batch" if mask.shape[0] > 1 else None)
    attend = sharded(
        functools.partial(tree_attention, backend=cache.attention),
        (heads, kv_heads, kv_heads, spec(*_AXES), spec(*_AXES), *rows),
        heads,
    )
    return lambda query, key, value: attend(query, key, value, layer.key, layer.value, lengths, mask)
