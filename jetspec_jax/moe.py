"""Mixture of experts: an MLP per expert, and a router that sends each token through a few of them.

No expert has a capacity, so that no token is ever dropped and none depends on its neighbours.

Axis letters: B batch, N block rows, E hidden features, X experts, k experts of a token, R rows (B * N).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import TargetConfig
from jetspec_jax.layers import Linear
from jetspec_jax.ops import project, top_k
from jetspec_jax.sharding import part_index, parts, sharded, spec, total

ROUNDS = 4
"""Of `Experts.by_round`, where all experts have like many rows: a round copies so large a part of their weights."""
_TILE = 16  # rows; fewer repack the kernels more often, more compute with rows that are not the expert's

# ragged_dot for a right operand [expert, out, in]
_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)

# How `through` splits the weights: whole input features, so that fsdp's parts are gathered first.
_PARTS = {
    "gate_proj": spec("expert", "mlp", None),
    "up_proj": spec("expert", "mlp", None),
    "down_proj": spec("expert", None, "mlp"),
}


class StackedLinear(nnx.Module):
    """One linear layer per expert, `weight` `[X, out, in]`."""

    def __init__(self, experts: int, in_features: int, out_features: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        scale = in_features**-0.5
        self.weight = nnx.Param(jax.random.normal(rngs(), (experts, out_features, in_features), dtype) * scale)

    def grouped(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """`[rows, out]` of `x` `[rows, in]`, whose first `sizes[0]` rows are expert 0's, and so on."""
        return jax.lax.ragged_dot_general(x, self.weight[...], sizes, _BY_EXPERT)

    def single(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """`[rows, out]` of `x` `[rows, in]`, all by one `expert` (a scalar)."""
        return project(x, self.weight[...][expert])

    def each(self, x: jax.Array, experts: jax.Array) -> jax.Array:
        """`[T, rows, out]` of `x` `[T, rows, in]`, each `[rows, in]` by one of `experts` `[T]`."""
        return jnp.einsum("tri,toi->tro", x, self.weight[...][experts])


class _Tiles(NamedTuple):
    """Rows sorted by expert and cut into equal tiles of one expert each, those that hold any first.

    used: bool `[T]`. rows: int32 `[T, tile]`, rows of x; past an expert's last one there are others', to be ignored.
    expert: int32 `[T]`. place: int32 `[R, k]`, where among all tiles' rows each row's choices are.
    """

    used: jax.Array
    rows: jax.Array
    expert: jax.Array
    place: jax.Array

    def collect(self, out: jax.Array) -> jax.Array:
        """`[R, k, E]` of all tiles' outputs `[..., tile, E]`."""
        return out.reshape(-1, out.shape[-1])[self.place]


class Experts(nnx.Module):
    """The experts' SwiGLU MLPs, `down(silu(gate(x)) * up(x))`, and three ways through them that give the same."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = StackedLinear(experts, hidden, inner, rngs=rngs, dtype=dtype)
        self.up_proj = StackedLinear(experts, hidden, inner, rngs=rngs, dtype=dtype)
        self.down_proj = StackedLinear(experts, inner, hidden, rngs=rngs, dtype=dtype)

    @property
    def num_experts(self) -> int:
        """How many experts are here: all, or under `sharding.sharded` this device's."""
        return self.gate_proj.weight.shape[0]

    def by_group(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Rows sorted by expert, each product one grouped product.

        Args:
            x: `[R, E]`.
            weights: float32 `[R, k]`; 0 where `chosen` is no expert.
            chosen: int32 `[R, k]`, the experts of each row; `num_experts` for one that is elsewhere.

        Returns:
            float32 `[R, E]`, each row's weighted sum of its experts' outputs.
        """
        per_row = chosen.shape[1]
        order = jnp.argsort(chosen.reshape(-1))
        inverse = jnp.argsort(order)
        sizes = self.rows_of_experts(chosen)
        grouped = x[order // per_row]
        inner = jax.nn.silu(self.gate_proj.grouped(grouped, sizes)) * self.up_proj.grouped(grouped, sizes)
        out = self.down_proj.grouped(inner, sizes)[inverse].reshape(*chosen.shape, -1)
        return _weighted(out, weights)

    def by_tile(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Rows sorted by expert and cut into tiles of one expert each, one tile after the other; as `by_group`.

        XLA's grouped product on a CPU multiplies all rows with all experts: a step of few rows would read every
        expert's weights. Tiles read those of the chosen experts only. With few rows an expert a tile is a single
        row, since a product of a vector reads a kernel where it lies, and one of a few rows repacks it first.
        """
        tile = 1 if chosen.size <= self.num_experts else _TILE
        tiles = _tiles(chosen, self.rows_of_experts(chosen), tile)

        def through(rows: jax.Array, expert: jax.Array) -> jax.Array:
            held = x[rows]
            inner = jax.nn.silu(self.gate_proj.single(held, expert)) * self.up_proj.single(held, expert)
            return self.down_proj.single(inner, expert)

        def step(_: None, at: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            used, *rest = at
            return None, jax.lax.cond(used, through, lambda *_: jnp.zeros((tile, x.shape[1]), x.dtype), *rest)

        out = jax.lax.scan(step, None, (tiles.used, tiles.rows, tiles.expert))[1]
        return _weighted(tiles.collect(out), weights)

    def by_round(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """As `by_tile`, with tiles as long as an expert's mean share, and many of them in one product: a round.

        XLA's grouped product on a GPU, too, multiplies all rows with all experts. Here products have at most three
        times the rows that were chosen, whatever the router does. A round copies its tiles' weights, and there is a
        round at least: of no more rows than experts the grouped product reads no more.
        """
        width = -(-self.num_experts // ROUNDS)
        tile = 1 << (self.mean_rows(chosen) - 1).bit_length()
        tiles = _tiles(chosen, self.rows_of_experts(chosen), tile, width)
        apart = lambda part: part.reshape(-1, width, *part.shape[1:])  # noqa: E731
        used, rows, expert = apart(tiles.used), apart(tiles.rows), apart(tiles.expert)

        def step(index: jax.Array, out: jax.Array) -> jax.Array:
            held, experts = x[rows[index]], expert[index]
            inner = jax.nn.silu(self.gate_proj.each(held, experts)) * self.up_proj.each(held, experts)
            return out.at[index].set(self.down_proj.each(inner, experts))

        # What the loop does not write is never read; of constants XLA would make those of all layers at once.
        out = jnp.broadcast_to(x[0, 0], (*rows.shape, x.shape[1]))
        out = jax.lax.fori_loop(0, jnp.sum(used[:, 0], dtype=jnp.int32), step, out)
        return _weighted(tiles.collect(out), weights)

    def mean_rows(self, chosen: jax.Array) -> int:
        """An expert's mean share of `chosen` `[R, k]`, rounded up; experts that are elsewhere have theirs."""
        return -(-chosen.size // (self.num_experts * parts("expert")))

    def rows_of_experts(self, chosen: jax.Array) -> jax.Array:
        """How many rows chose each expert, int32 `[X]`, for `chosen` `[R, k]`."""
        experts = jnp.arange(self.num_experts, dtype=chosen.dtype)
        return jnp.sum(chosen[..., None] == experts[None, None], axis=(0, 1), dtype=jnp.int32)


class SparseMLP(nnx.Module):
    """A layer's mixture of experts: the router `gate`, and the experts."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.gate = Linear(config.hidden_size, config.num_experts, rngs=rngs, dtype=dtype)
        self.experts = Experts(config, rngs=rngs, dtype=dtype)
        self.experts_per_row = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights, float32, and the experts, int32, of each row of `x` `[R, E]`; each `[R, k]`."""
        weights, chosen = top_k(jax.nn.softmax(self.gate(x).astype(jnp.float32), axis=-1), self.experts_per_row)
        if self.normalise:
            weights /= jnp.sum(weights, axis=-1, keepdims=True)
        return weights, chosen

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, N, E]` of `x` `[B, N, E]`."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows)
        with jax.named_scope("experts"):
            out = through(self.experts, rows, weights, chosen)
        return out.astype(x.dtype).reshape(x.shape)


def through(experts: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """As `Experts.by_group`, with experts and their inner features split over the mesh in force."""
    split = jax.tree_util.tree_map_with_path(lambda path, _: _PARTS[path[0].name], experts)
    rows = spec("batch", None)

    def own(experts: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        chosen = chosen - part_index("expert") * experts.num_experts
        here = (chosen >= 0) & (chosen < experts.num_experts)
        args = x, jnp.where(here, weights, 0.0), jnp.where(here, chosen, experts.num_experts)
        on_gpus = experts.by_round if experts.mean_rows(chosen) > 1 else experts.by_group
        out = jax.lax.platform_dependent(*args, cpu=experts.by_tile, default=on_gpus)
        return total(out, "expert", "mlp")

    return sharded(own, (split, rows, rows, rows), rows)(experts, x, weights, chosen)


def _tiles(chosen: jax.Array, sizes: jax.Array, tile: int, multiple: int = 1) -> _Tiles:
    """Tiles for any `chosen` `[R, k]` with these `sizes` (`rows_of_experts`); as many as a multiple of `multiple`."""
    pairs, experts = chosen.size, sizes.size
    count = min(pairs, pairs // tile + experts)
    tiles = -(-sizes // tile)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    first_tile, first_row = ends - tiles, jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    order = jnp.argsort(chosen.reshape(-1))

    index = jnp.arange(-(-count // multiple) * multiple, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32), experts - 1)
    start = first_row[expert] + (index - first_tile[expert]) * tile
    held = jnp.minimum(start[:, None] + jnp.arange(tile, dtype=jnp.int32)[None], pairs - 1)
    offset = jnp.argsort(order).reshape(chosen.shape) - first_row[chosen]
    return _Tiles(index < ends[-1], order[held] // chosen.shape[1], expert, first_tile[chosen] * tile + offset)


def _weighted(out: jax.Array, weights: jax.Array) -> jax.Array:
    """Float32 `[R, E]`, the sums of `out` `[R, k, E]` by `weights` `[R, k]`; what has no weight may be anything.

    Summed per row: a scatter-add over experts would sum in no fixed order on a GPU.
    """
    return jnp.sum(jnp.where(weights[..., None] > 0, out.astype(jnp.float32) * weights[..., None], 0.0), axis=1)
