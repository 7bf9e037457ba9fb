"""Attention over whole rows, as training needs it: in chunks of queries, whose scores are never kept.

Axis letters: B rows, L row length, A blocks of a row, S slots of a block, C blocks or queries of a chunk, M keys,
H query heads, K kv heads, G query heads of a kv head, D head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.layers import KeyValue

_SCORE_BYTES = 128 * 2**20  # of one chunk's float32 scores in one row


class Part(NamedTuple):
    """Keys that a chunk of blocks attends to.

    rows: keys and values that all blocks share `[B, M, K, D]`, or each block's own `[B, C, M, K, D]`.
    mask: bool, of `[B, C, S, M]` or broadcastable to it.
    """

    rows: KeyValue
    mask: jax.Array


def document_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array, chunk: int | None = None
) -> jax.Array:
    """Attention `[B, L, H, D]` of packed tokens, each to those of its own document up to itself.

    Args:
        query: `[B, L, H, D]`; `key` and `value` are `[B, L, K, D]`.
        documents: `[B, L]`, equal in one document.
        chunk: queries at a time; by default what keeps a row's scores within 128 MiB.
    """
    length, heads = query.shape[1:3]
    everything = jnp.arange(length)

    def attend(query: jax.Array, documents_: jax.Array, places: jax.Array) -> jax.Array:
        mask = (documents_[..., None] == documents[:, None]) & (places[..., None] >= everything[None, None])
        return _attend(query[:, :, None], [Part(KeyValue(key, value), mask[:, :, None])])[:, :, 0]

    places = jnp.broadcast_to(everything[None], documents.shape)
    return _in_chunks(attend, (query, documents, places), chunk or _fitting(length * heads))


def block_attention(
    query: jax.Array,
    own: KeyValue,
    context: KeyValue,
    seen: jax.Array,
    *,
    causal: bool,
    chunk: int | None = None,
) -> jax.Array:
    """Attention `[B, A, S, H, D]` of blocks, each to its context and to its own slots.

    Args:
        query: `[B, A, S, H, D]`.
        own: the slots' keys and values, `[B, A, S, K, D]`.
        context: the row's keys and values, `[B, L, K, D]`.
        seen: bool `[B, A, L]`, the context of each block.
        causal: a slot sees its block up to itself, not the whole block.
        chunk: blocks at a time; by default what keeps a row's scores within 128 MiB.
    """
    slots, heads = query.shape[2:4]
    within = np.tri(slots, dtype=bool) if causal else np.ones((slots, slots), bool)
    # Chunks add up the context's gradient: in float32, whatever they compute in.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), context)

    def attend(query: jax.Array, own: KeyValue, seen: jax.Array) -> jax.Array:
        shared = KeyValue(*(x.astype(old.dtype) for x, old in zip(wide, context, strict=True)))
        return _attend(query, [Part(shared, seen[:, :, None]), Part(own, jnp.asarray(within)[None, None])])

    return _in_chunks(attend, (query, own, seen), chunk or _fitting((context.key.shape[1] + slots) * slots * heads))


def _fitting(scores: int) -> int:
    """How many items of this many float32 scores fit a chunk."""
    return max(1, _SCORE_BYTES // (4 * scores))


def _in_chunks(attend: Callable[..., jax.Array], arrays: Any, chunk: int) -> jax.Array:
    """`attend(*arrays)`, over equal chunks of axis 1; several recompute what they need for their gradient."""
    count = jax.tree.leaves(arrays)[0].shape[1]
    chunks = -(-count // chunk)
    if chunks == 1:
        return attend(*arrays)
    size = -(-count // chunks)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, chunks * size - count if axis == 1 else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(padded.reshape(x.shape[0], chunks, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(lambda x: attend(*x)), jax.tree.map(split, arrays))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], chunks * size, *out.shape[3:])[:, :count]


def _attend(query: jax.Array, parts: list[Part]) -> jax.Array:
    """Attention `[B, C, S, H, D]` of `query` to the union of `parts`, softmax in float32.

    A query that sees nothing gets a mean of values: finite numbers, to be dropped by the caller.
    """
    heads, size = query.shape[3:]
    kv_heads = parts[0].rows.key.shape[-2]
    apart = query.reshape(*query.shape[:3], kv_heads, heads // kv_heads, size)
    apart = jnp.transpose(apart, (0, 3, 1, 4, 2, 5))  # [B, K, C, G, S, D]: products are of whole matrices
    scores, values = [], []
    for part in parts:
        # Shared rows meet all blocks in one matrix, a block's own rows one for each block.
        axes, matrices = ((0, 2, 1, 3), 2) if part.rows.key.ndim == 4 else ((0, 3, 1, 2, 4), 3)
        key, value = (jnp.transpose(x, axes) for x in part.rows)
        score = _scores(apart.reshape(*apart.shape[:matrices], -1, size), key)
        score = score.reshape(*apart.shape[:-1], -1) * size**-0.5
        scores.append(jnp.where(part.mask[:, None, :, None], score, jnp.finfo(jnp.float32).min))
        values.append(value)
    top = functools.reduce(jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in scores])
    weights = [jnp.exp(score - jax.lax.stop_gradient(top)) for score in scores]
    total = sum(jnp.sum(weight, axis=-1, keepdims=True) for weight in weights)
    out = sum(
        _applied(weight.astype(value.dtype).reshape(*value.shape[:-2], -1, value.shape[-2]), value).reshape(apart.shape)
        for weight, value in zip(weights, values, strict=True)
    )
    out = jnp.transpose(out / total, (0, 2, 4, 1, 3, 5))
    return out.reshape(*out.shape[:3], heads, size).astype(query.dtype)


# Products of stacks of matrices, summed to float32. Their gradients' products have the operands' dtype too: with the
# float32 cotangent as it comes, XLA would widen bfloat16 operands to float32. The largest operand, [R, M], is always
# the left one of a product over M and the right one of a product over R: XLA on a CPU transposes any other.


@jax.custom_vjp
def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """`[..., R, M]` of `query` `[..., R, D]` and `key` `[..., M, D]`."""
    return _matmul(query, key, -1, -1)


def _scores_backward(operands: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    query, key = operands
    of_query = _matmul(g.astype(query.dtype), key, -1, -2)
    of_key = jnp.swapaxes(_matmul(query, g.astype(key.dtype), -2, -2), -1, -2)
    return of_query.astype(query.dtype), of_key.astype(key.dtype)


@jax.custom_vjp
def _applied(weights: jax.Array, value: jax.Array) -> jax.Array:
    """`[..., R, D]` of `weights` `[..., R, M]` and `value` `[..., M, D]`."""
    return _matmul(weights, value, -1, -2)


def _applied_backward(operands: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, value = operands
    of_weights = _matmul(g.astype(weights.dtype), value, -1, -1)
    of_value = jnp.swapaxes(_matmul(g.astype(value.dtype), weights, -2, -2), -1, -2)
    return of_weights.astype(weights.dtype), of_value.astype(value.dtype)


_scores.defvjp(lambda *operands: (_scores(*operands), operands), _scores_backward)
_applied.defvjp(lambda *operands: (_applied(*operands), operands), _applied_backward)


def _matmul(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """The product of two stacks of matrices over an axis of each, in float32; the others stay, left's first."""
    stack = tuple(range(left.ndim - 2))
    contracted = ((left.ndim + left_axis,), (right.ndim + right_axis,))
    return jax.lax.dot_general(left, right, (contracted, (stack, stack)), preferred_element_type=jnp.float32)
