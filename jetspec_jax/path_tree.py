"""Draft trees whose branches are scored given their own parent token: exactly the best paths, from few rows.

With a parent term the distribution of a node's children depends on (depth, token) of the node. Such a *row* over the
whole vocabulary is dear, so rows are computed for nodes that need one only, a few at a time, best nodes first, and each
is computed once (`docs/path-conditioning.md`).

Axis letters: B batch, N nodes (root included), R rows of a step, M rows kept, W tree width, D depth, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.ops import project, take, top_k
from jetspec_jax.sharding import constrain
from jetspec_jax.tree import Children, ChildScorer, Tree, TreeShape, build_tree, path_scores


class Table(nnx.Module):
    """A vector of `rank` numbers for each token: `weight` `[vocab, rank]`."""

    def __init__(self, weight: jax.Array):
        self.weight = nnx.Param(weight)


class ParentTerm(nnx.Module):
    """What a parent token t adds to the logits of its children: `unembed.weight @ embed.weight[t]`.

    It starts at exactly 0, since `unembed` does, and has a gradient, since `embed` does not.
    """

    def __init__(self, vocab: int, rank: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.embed = Table(jax.random.normal(rngs(), (vocab, rank), dtype) * rank**-0.5)
        self.unembed = Table(jnp.zeros((vocab, rank), dtype))

    def __call__(self, parents: jax.Array) -> jax.Array:
        """Float32 `[..., vocab]`, to be added to logits, of `parents` int32 `[...]`."""
        return project(self.embed.weight[...][parents], self.unembed.weight[...], jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class PathScorer:
    """Scores the children of single nodes, whatever their depths.

    base: `[B, D, V]`, float32 logits of every drafted slot without a parent.
    term: what a parent adds.
    width: children of a node, at most the vocabulary.
    """

    base: jax.Array
    term: ParentTerm
    width: int

    def rows(self, depths: jax.Array, tokens: jax.Array) -> Children:
        """The best children, `[B, R, W]`, of nodes of `depths` (the root's is 0) and `tokens`, each int32 `[B, R]`."""
        batch = jnp.arange(depths.shape[0], dtype=jnp.int32)[:, None]
        base = self.base.at[batch, depths].get(mode="promise_in_bounds")
        logits = constrain(base + self.term(tokens), "batch", None, "vocab")
        # The sum below reads it as well; without a barrier XLA adds up both parts once more for it.
        logits = jax.lax.optimization_barrier(logits)
        best, children = top_k(logits, self.width)
        # As logsumexp, whose maximum is there already.
        total = jnp.sum(jnp.exp(logits - best[..., :1]), axis=-1, keepdims=True)
        return Children(children, best - best[..., :1] - jnp.log(total))


def best_tree(anchors: jax.Array, scorer: ChildScorer | PathScorer, shape: TreeShape) -> Tree:
    """The best `shape.nodes - 1` paths below the anchors `[B]`, whichever kind of scorer there is."""
    if isinstance(scorer, PathScorer):
        return search_tree(anchors, scorer, shape)
    return build_tree(anchors, scorer, shape)


class _Search(NamedTuple):
    """The best N nodes found so far, and rows that were computed.

    scores: float32 `[B, N]`, descending; -inf is an empty place.
    keys: int32 `[B, N]`, depth * V + token while a node's children are to be scored; the bits inverted, which is
        negative, once they are, and where there are none to score.
    names: int32 `[B, N]`, a number of each node's own; the root's is 0. parents: int32 `[B, N]`, those of the parents.
    row_keys: int32 `[B, M]`, the keys of nodes that a kept row is of; -1 is none.
    child_keys, child_logprobs: int32 and float32 `[B, M, W]`, these rows.
    """

    scores: jax.Array
    keys: jax.Array
    names: jax.Array
    parents: jax.Array
    row_keys: jax.Array
    child_keys: jax.Array
    child_logprobs: jax.Array


def search_tree(anchors: jax.Array, scorer: PathScorer, shape: TreeShape) -> Tree:
    """The best `shape.nodes - 1` paths below the anchors `[B]`, every child scored given its own parent.

    Nodes are kept in the order of their scores, as many as the tree has. A step looks at the best few of those whose
    children are not scored yet, computes rows for some, merges the children in, and drops what falls off the end. That
    is exact: a log-probability is at most 0, so what is worse than `shape.nodes` others has no descendant among the
    best; and when no kept node waits, every node that was left out is, or descends from, a child that was scored and
    fell off. Ties go to the node that was found first, hence to the parent before its child, which keeps the set closed
    under ancestors. A row of the batch does not depend on the others.

    Nodes of equal depth and token share a row, which is kept for those to come. A log-probability that is no number
    counts as 0 probability.

    Raises:
        ValueError: the tree is deeper than the head's slots.
    """
    if shape.depth > scorer.base.shape[1]:
        raise ValueError(f"depth {shape.depth} is beyond the {scorer.base.shape[1]} drafted slots")
    search = _start(anchors, shape)

    def step(index: jax.Array, search: _Search) -> _Search:
        return _step(search, scorer, shape, index)

    def waiting(carry: tuple[jax.Array, _Search]) -> jax.Array:
        return jnp.any(carry[1].keys >= 0)

    # A path of `depth` tokens takes as many steps anyway. Their number is static, so that no device asks its host
    # after each whether to go on.
    search = jax.lax.fori_loop(0, shape.depth, step, search)
    _, search = jax.lax.while_loop(
        waiting, lambda carry: (carry[0] + 1, step(*carry)), (jnp.int32(shape.depth), search)
    )
    return _in_level_order(search, scorer.base.shape[-1])


def _rows_per_step(shape: TreeShape) -> int:
    """How many rows a step computes: enough that a tree of this size takes few more steps than its depth."""
    return 1 if shape.width == 1 or shape.nodes <= 33 else 2 if shape.nodes <= 129 else 4


def _parents_per_step(shape: TreeShape) -> int:
    """How many of the waiting nodes a step looks at: those that get rows, and enough of those that share one."""
    return min(shape.nodes, 8 * _rows_per_step(shape))


def _start(anchors: jax.Array, shape: TreeShape) -> _Search:
    """The roots alone."""
    batch, rows = anchors.shape[0], _rows_per_step(shape)
    kept = -(-shape.nodes // rows) * rows
    root = jnp.arange(shape.nodes)[None] == 0
    filled = lambda value, *sizes: jnp.full((batch, *sizes), value)  # noqa: E731
    return _Search(
        scores=jnp.where(root, jnp.float32(0), filled(jnp.float32(-jnp.inf), shape.nodes)),
        keys=jnp.where(root, anchors[:, None].astype(jnp.int32), filled(jnp.int32(-1), shape.nodes)),
        names=filled(jnp.int32(0), shape.nodes),
        parents=filled(jnp.int32(0), shape.nodes),
        row_keys=filled(jnp.int32(-1), kept),
        child_keys=filled(jnp.int32(-1), kept, shape.width),
        child_logprobs=filled(jnp.float32(0), kept, shape.width),
    )


def _step(search: _Search, scorer: PathScorer, shape: TreeShape, index: jax.Array) -> _Search:
    """Scores the children of the best waiting nodes, of those with a row, once the best without one have got it."""
    batch, nodes = search.keys.shape
    waiting = jnp.where(search.keys >= 0, search.scores, -jnp.inf)
    above, places = top_k(waiting, _parents_per_step(shape))
    keys = jnp.where(above > -jnp.inf, take(search.keys, places), -2)
    search = _with_rows(search, keys, scorer, shape, index)
    kept = jnp.arange(search.row_keys.shape[1], dtype=jnp.int32)[None, None]
    row = jnp.max(jnp.where(keys[:, :, None] == search.row_keys[:, None], kept, -1), axis=2)
    here = (jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.maximum(row, 0))
    logprobs = search.child_logprobs.at[here].get(mode="promise_in_bounds")
    found = path_scores(above, logprobs)  # finite: -inf marks an empty place, and NaN would wait for ever
    found = jnp.where((row >= 0)[:, :, None], found, -jnp.inf).reshape(batch, -1)
    child_keys = search.child_keys.at[here].get(mode="promise_in_bounds").reshape(batch, -1)
    names = 1 + index * found.shape[1] + jnp.arange(found.shape[1], dtype=jnp.int32)[None]
    parents = jnp.repeat(take(search.names, places), shape.width, axis=1)
    place = jnp.arange(nodes, dtype=jnp.int32)[None, :, None]
    done = jnp.any((place == places[:, None]) & (row >= 0)[:, None], axis=2)
    both = lambda old, new: jnp.concatenate([old, jnp.broadcast_to(new, found.shape)], axis=1)  # noqa: E731
    scores, chosen = top_k(both(search.scores, found), nodes)
    return search._replace(
        scores=scores,
        keys=take(both(jnp.where(done, ~search.keys, search.keys), child_keys), chosen),
        names=take(both(search.names, names), chosen),
        parents=take(both(search.parents, parents), chosen),
    )


def _with_rows(search: _Search, keys: jax.Array, scorer: PathScorer, shape: TreeShape, index: jax.Array) -> _Search:
    """The search with rows of the first few of `keys` `[B, P]` that have none; below 0 is no key."""
    rows, vocab = _rows_per_step(shape), scorer.base.shape[-1]
    known = jnp.any(keys[:, :, None] == search.row_keys[:, None], axis=2)
    before = jnp.tri(keys.shape[1], k=-1, dtype=bool)[None]
    repeated = jnp.any((keys[:, :, None] == keys[:, None]) & before, axis=2)
    wanted, chosen = top_k(((keys >= 0) & ~known & ~repeated).astype(jnp.float32), rows)
    asked = wanted > 0
    keys = jnp.where(asked, take(keys, chosen), 0)
    depths, tokens = keys // vocab, keys % vocab
    children = scorer.rows(depths, tokens)
    below = depths[:, :, None] + 1
    child_keys = below * vocab + children.tokens
    child_keys = jnp.where(below == shape.depth, ~child_keys, child_keys)
    place = index * rows % search.row_keys.shape[1]
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, place, axis=1)  # noqa: E731
    return search._replace(
        row_keys=put(search.row_keys, jnp.where(asked, keys, -1)),
        child_keys=put(search.child_keys, child_keys),
        child_logprobs=put(search.child_logprobs, children.logprobs),
    )


def _in_level_order(search: _Search, vocab: int) -> Tree:
    """The finished search as a tree: depths ascend, the better node of a depth comes first."""
    keys = ~search.keys
    _, order = top_k(-(keys // vocab), keys.shape[1])
    keys, names, parents = take(keys, order), take(search.names, order), take(search.parents, order)
    return Tree(
        tokens=keys % vocab,
        parents=_places(names, parents),
        depths=keys // vocab,
        scores=take(search.scores, order),
    )


def _places(among: jax.Array, wanted: jax.Array) -> jax.Array:
    """`[B, N]`, where in `among` `[B, N]` each of `wanted` `[B, N]` is; it is there once."""
    place = jnp.arange(among.shape[1], dtype=jnp.int32)[None, None]
    return jnp.sum(jnp.where(among[:, None] == wanted[:, :, None], place, 0), axis=2, dtype=jnp.int32)
