"""Mixture of experts: an MLP per expert, and a router that sends each token through a few of them.

No expert has a capacity, so that no token is ever dropped and none depends on its neighbours.

Axis letters: B batch, N block rows, E hidden features, X experts, k experts of a token, R rows (B * N).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import TargetConfig
from jetspec_jax.layers import Linear
from jetspec_jax.ops import top_k


class StackedLinear(nnx.Module):
    """One linear layer per expert, `kernel` `[X, in, out]`."""

    def __init__(self, experts: int, in_features: int, out_features: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        scale = in_features**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs(), (experts, in_features, out_features), dtype) * scale)

    def grouped(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """`[rows, out]` of `x` `[rows, in]`, whose first `sizes[0]` rows are expert 0's, and so on."""
        return jax.lax.ragged_dot(x, self.kernel[...], sizes)

    def single(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """`[rows, out]` of `x` `[rows, in]`, all by one `expert` (a scalar)."""
        return x @ self.kernel[...][expert]


class Experts(nnx.Module):
    """The experts' SwiGLU MLPs, `down(silu(gate(x)) * up(x))`, and two ways through them that give the same."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = StackedLinear(experts, hidden, inner, rngs=rngs, dtype=dtype)
        self.up_proj = StackedLinear(experts, hidden, inner, rngs=rngs, dtype=dtype)
        self.down_proj = StackedLinear(experts, inner, hidden, rngs=rngs, dtype=dtype)
        self.num_experts = experts

    def by_group(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Rows sorted by expert, each product one grouped product.

        Args:
            x: `[R, E]`.
            weights: float32 `[R, k]`.
            chosen: int32 `[R, k]`, the experts of each row.

        Returns:
            `[R, E]`, each row's weighted sum of its experts' outputs.
        """
        per_row = chosen.shape[1]
        order = jnp.argsort(chosen.reshape(-1))
        inverse = jnp.argsort(order)
        sizes = self.rows_of_experts(chosen)
        grouped = x[order // per_row]
        inner = jax.nn.silu(self.gate_proj.grouped(grouped, sizes)) * self.up_proj.grouped(grouped, sizes)
        out = self.down_proj.grouped(inner, sizes)[inverse].reshape(*chosen.shape, -1)
        # Gathered and summed per row: a scatter-add would sum in no fixed order on a GPU.
        return jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1).astype(x.dtype)

    def by_expert(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Every row through each expert that any row chose, one expert after the other; as `by_group`.

        XLA's grouped product on a CPU multiplies all rows with all experts, as one product over a zero-padded copy of
        the rows per expert. This reads the chosen experts only, which is what a step of few rows costs.
        """
        shares = jnp.sum(jnp.where(self._is_chosen(chosen), weights[..., None], 0.0), axis=1)  # [R, X]

        def through(expert: jax.Array, total: jax.Array) -> jax.Array:
            inner = jax.nn.silu(self.gate_proj.single(x, expert)) * self.up_proj.single(x, expert)
            share = shares[:, expert][:, None]
            # Not a plain product: an infinite output of an expert that a row did not choose is not the row's.
            return total + jnp.where(share > 0, self.down_proj.single(inner, expert).astype(jnp.float32) * share, 0.0)

        def step(total: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            expert, rows = at
            return jax.lax.cond(rows > 0, through, lambda _, total: total, expert, total), None

        experts = jnp.arange(self.num_experts, dtype=jnp.int32)
        total = jnp.zeros(x.shape, jnp.float32)
        return jax.lax.scan(step, total, (experts, self.rows_of_experts(chosen)))[0].astype(x.dtype)

    def rows_of_experts(self, chosen: jax.Array) -> jax.Array:
        """How many rows chose each expert, int32 `[X]`, for `chosen` `[R, k]`."""
        return jnp.sum(self._is_chosen(chosen), axis=(0, 1), dtype=jnp.int32)

    def _is_chosen(self, chosen: jax.Array) -> jax.Array:
        return chosen[..., None] == jnp.arange(self.num_experts, dtype=chosen.dtype)[None, None]


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
        out = jax.lax.platform_dependent(
            rows, weights, chosen, cpu=self.experts.by_expert, default=self.experts.by_group
        )
        return out.reshape(x.shape)
