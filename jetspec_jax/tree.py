"""The draft tree: exactly the `budget` best paths by cumulative log-probability, built on the device.

Axis letters: B batch, F frontier (nodes kept at one depth), W tree width, N nodes (root included).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jetspec_jax.ops import take, top_k
from kernels.pallas.tree_attention import masks


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """The static size of a tree.

    budget: nodes below the root at most (the root, which is the anchor, is not counted); 0 is plain decoding.
    width: children scored per parent (`tree_width`).
    depth: levels below the root, one per drafted slot.
    """

    budget: int
    width: int
    depth: int

    @property
    def levels(self) -> tuple[int, ...]:
        """How many nodes of each depth can matter: `width ** depth`, never more than the budget."""
        sizes, size = [], 1
        for _ in range(self.depth):
            size = min(size * self.width, self.budget)
            sizes.append(size)
        return tuple(sizes)

    @property
    def nodes(self) -> int:
        """Rows of the verify forward: the root and as many nodes as budget, width and depth allow."""
        return 1 + min(self.budget, sum(self.levels))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """Draft trees of a batch. Node 0 is the root (the anchor); parents come before children, depths ascend.

    tokens: int32 `[B, N]`.
    parents: int32 `[B, N]`, node indices; the root's is 0.
    depths: int32 `[B, N]`.
    scores: float32 `[B, N]`, log-probability of the path from the root; descending along every path.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    scores: jax.Array


class Children(NamedTuple):
    """The scored children of candidate parents: tokens int32 `[B, F, W]`, log-probabilities float32 `[B, F, W]`."""

    tokens: jax.Array
    logprobs: jax.Array


class ChildScorer(Protocol):
    """Gives the best `width` children of candidate parents; siblings have distinct tokens, best first."""

    def __call__(self, depth: int, parents: jax.Array) -> Children:
        """Children at `depth` (1 is the first drafted token) of parents with tokens `parents` `[B, F]`."""
        ...


def slot_scorer(logits: jax.Array, width: int) -> ChildScorer:
    """The scorer of a draft head whose slots do not depend on the parent's token.

    Args:
        logits: `[B, depth, vocab]`; row d - 1 is the distribution of depth d.
        width: children kept, at most the vocabulary.
    """
    logits = logits.astype(jnp.float32)
    best, tokens = top_k(logits, width)
    logprobs = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    def score(depth: int, parents: jax.Array) -> Children:
        if depth > tokens.shape[1]:
            raise ValueError(f"depth {depth} is beyond the {tokens.shape[1]} drafted slots")
        shape = (*parents.shape, width)
        return Children(
            jnp.broadcast_to(tokens[:, None, depth - 1], shape), jnp.broadcast_to(logprobs[:, None, depth - 1], shape)
        )

    return score


def build_tree(anchors: jax.Array, scorer: ChildScorer, shape: TreeShape) -> Tree:
    """The best `shape.nodes - 1` paths below the anchors `[B]` (paper section 3).

    A log-probability is never above 0, so a node's ancestors score at least as well as it does. Hence a node among
    the best `budget` of the whole tree is among the best `budget` of its level, and so are its ancestors: a search
    that keeps that many per level and one selection over all levels are exact. Ties go to the smaller depth, then
    to the better parent, then to the better-ranked child, which keeps the set closed under ancestors.
    """
    batch = anchors.shape[0]
    zero = jnp.zeros((batch, 1), jnp.int32)
    tokens, scores = [anchors[:, None].astype(jnp.int32)], [jnp.zeros((batch, 1), jnp.float32)]
    parents, depths, starts = [zero], [zero], [0]
    for depth, size in enumerate(shape.levels, start=1):
        children = scorer(depth, tokens[-1])
        candidates = path_scores(scores[-1], children.logprobs)
        best, index = top_k(candidates.reshape(batch, -1), size)
        width = children.tokens.shape[-1]
        parents.append(starts[-1] + index // width)
        starts.append(starts[-1] + tokens[-1].shape[1])
        tokens.append(take(children.tokens.reshape(batch, -1), index))
        scores.append(best)
        depths.append(jnp.full_like(index, depth))
    return _select(*(jnp.concatenate(x, axis=1) for x in (tokens, parents, depths, scores)), nodes=shape.nodes)


def path_scores(parents: jax.Array, logprobs: jax.Array) -> jax.Array:
    """Float32 `[B, F, W]`, never below -1e30, of children with `logprobs` `[B, F, W]`; `parents` `[B, F]`.

    A probability of exactly 0 would tie every descendant at -inf. One that is no number, as of a head that overflows,
    counts as 0: it would win over the root.
    """
    return jnp.fmax(parents[:, :, None] + logprobs, -1e30)


def _select(tokens: jax.Array, parents: jax.Array, depths: jax.Array, scores: jax.Array, *, nodes: int) -> Tree:
    """The best `nodes` of all levels' candidates, in level order, with parents renumbered."""
    _, kept = top_k(scores, nodes)
    kept = jnp.sort(kept, axis=1)
    rows = jnp.arange(kept.shape[0])[:, None]
    places = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32)[None], kept.shape)
    renumbered = jnp.zeros(scores.shape, jnp.int32).at[rows, kept].set(places)
    return Tree(
        tokens=take(tokens, kept),
        parents=take(renumbered, take(parents, kept)),
        depths=take(depths, kept),
        scores=take(scores, kept),
    )


def ancestors(tree: Tree, depth: int) -> jax.Array:
    """Boolean `[B, N, N]`: whether node j is node i or an ancestor of it, in trees of at most `depth` levels."""
    return masks.ancestors(tree.parents, depth)
