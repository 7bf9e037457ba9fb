"""The target over packed documents, as training needs it: no cache, dense masks, documents apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jetspec_jax.rope import rope_at
from jetspec_jax.target import TargetModel, TargetOutput
from train.data import Packed


def masked_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention `[B, N, H, D]` under a boolean `mask` `[B, N, M]`; every query must see something."""
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])


def target_forward(model: TargetModel, batch: Packed, tap_ids: tuple[int, ...] = ()) -> TargetOutput:
    """The target's outputs at every packed token, each seeing its own document up to itself."""
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    causal = jnp.tril(jnp.ones(same.shape[1:], bool))
    mask = same & causal[None]
    attend = lambda query, key, value: masked_attention(query, key, value, mask)  # noqa: E731
    rope = rope_at(batch.positions, model.config)
    return model.run(model.embed(batch.tokens), rope, [attend] * model.config.num_hidden_layers, tap_ids)
