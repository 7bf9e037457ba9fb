"""Acceptance: the longest drafted path that the target itself would have taken.

Axis letters: B batch, N nodes (root included), S path slots (depth + 1).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jetspec_jax.tree import Tree


class Accepted(NamedTuple):
    """One round's outcome, before stops are applied.

    path: int32 `[B, S]`, node indices of the root and the accepted nodes; only the first `committed` hold.
    tokens: int32 `[B, S]`, tokens to commit: the accepted nodes' tokens, then the bonus token.
    committed: int32 `[B]`, how many: accepted nodes + 1.
    """

    path: jax.Array
    tokens: jax.Array
    committed: jax.Array


def accept(tree: Tree, seen: jax.Array, chosen: jax.Array, depth: int) -> Accepted:
    """Walks each tree from its root along the target's own tokens (paper section 3).

    A node is accepted when its token and those of all its ancestors are the target's choice at their parents.
    Siblings have distinct tokens, so the accepted nodes are one path.

    Args:
        tree: the draft trees.
        seen: boolean `[B, N, N]`, `tree.ancestors`.
        chosen: int32 `[B, N]`, the target's token after each node.
        depth: the trees' greatest depth.
    """
    nodes = tree.tokens.shape[1]
    matched = tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1)
    matched = matched.at[:, 0].set(True)
    accepted = jnp.all(matched[:, None, :] | ~seen, axis=2)
    count = jnp.sum(accepted, axis=1, dtype=jnp.int32)
    slots = jnp.arange(depth + 1, dtype=jnp.int32)
    here = accepted[:, None, :] & (tree.depths[:, None, :] == slots[None, :, None])
    path = jnp.sum(jnp.where(here, jnp.arange(nodes, dtype=jnp.int32)[None, None], 0), axis=2, dtype=jnp.int32)
    # The target's choice at each node of the path is the next node's token, and at the last one the bonus.
    return Accepted(path, jnp.take_along_axis(chosen, path, axis=1), count)
