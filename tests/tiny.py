"""Tiny random checkpoints for tests of what lies around the decode loop."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetspec_jax.config import HeadConfig, TargetConfig

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_theta": 1e4, "max_position_embeddings": 128,
}  # fmt: skip


def target_config(vocab):
    return TargetConfig(**SIZES, vocab_size=vocab, num_hidden_layers=2)


def head_config(vocab, **fields):
    layout = {"block_size": 4, "num_target_layers": 2, "target_layer_ids": (0, 1), "mask_token_id": 3}
    return HeadConfig(**{**SIZES, **layout, "vocab_size": vocab, "num_hidden_layers": 1, "causal_head": True, **fields})


def random_module(kind, config, seed):
    """A module with random matrices; its own initialisation takes seconds to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda x: rng.normal(size=x.shape) / np.sqrt(x.shape[-1]) if x.ndim == 2 else np.ones(x.shape)  # noqa: E731
    shapes = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(draw(x).astype(np.float32)), shapes)
