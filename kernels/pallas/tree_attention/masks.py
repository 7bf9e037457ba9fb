"""Block masks as packed bits: `uint32[batch, nodes, ceil(nodes / 32)]`; bit j % 32 of word j // 32 is node j."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def pack_mask(mask: jax.Array) -> jax.Array:
    """Packed bits `uint32[..., ceil(N / 32)]` of a boolean mask `[..., N]`."""
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    words = padded.reshape(*mask.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(words << _bit_index(words), axis=-1, dtype=jnp.uint32)


def unpack_mask(packed: jax.Array, nodes: int) -> jax.Array:
    """The boolean mask `[..., nodes]` of packed bits `uint32[..., ceil(nodes / 32)]`."""
    words = jnp.broadcast_to(packed[..., None], (*packed.shape, 32))
    bits = (words >> _bit_index(words)) & jnp.uint32(1)
    return (bits != 0).reshape(*packed.shape[:-1], -1)[..., :nodes]


def causal_mask(nodes: int) -> jax.Array:
    """The packed mask `[1, nodes, words]` under which node i sees nodes 0..i."""
    node = jnp.arange(nodes)
    return pack_mask((node[None] <= node[:, None])[None])


def full_mask(nodes: int) -> jax.Array:
    """The packed mask `[1, nodes, words]` under which every node sees every node."""
    return pack_mask(jnp.ones((1, nodes, nodes), bool))


def ancestors(parents: jax.Array, depth: int) -> jax.Array:
    """Boolean `[B, N, N]`: whether node j is node i or an ancestor of it.

    Args:
        parents: int32 `[B, N]`, node indices; a root is its own parent.
        depth: of the deepest node at most, the root's being 0.
    """
    batch, nodes = parents.shape
    rows = jnp.arange(batch)[:, None]
    seen = jnp.broadcast_to(jnp.eye(nodes, dtype=bool)[None], (batch, nodes, nodes))
    jump = parents
    for _ in range(depth.bit_length()):  # pointer doubling: each step sees twice as many ancestors
        seen = seen | seen[rows, jump]
        jump = jump[rows, jump]
    return seen


def parents_mask(parents: jax.Array, depth: int) -> jax.Array:
    """`ancestors` as packed bits: the mask `[B, N, words]` under which every node sees its path from the root."""
    return pack_mask(ancestors(parents, depth))


def _bit_index(words: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
