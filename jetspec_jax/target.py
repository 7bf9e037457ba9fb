"""The target: a Qwen3 or Llama decoder that verifies, and whose tapped hidden states feed the draft head."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.cache import KVCache, attend_to
from jetspec_jax.config import TargetConfig
from jetspec_jax.layers import MLP, Attend, DecoderLayer, KeyValue, Linear, RMSNorm
from jetspec_jax.moe import SparseMLP
from jetspec_jax.ops import project
from jetspec_jax.rope import Rope, rope_at
from jetspec_jax.sharding import constrain


class TargetOutput(NamedTuple):
    """What one forward gives.

    hidden: `[B, N, E]`, after the final norm.
    taps: `[B, N, T * E]`, outputs of the tapped layers (before the final norm), side by side.
    rows: per layer, the keys and values of the N inputs.
    """

    hidden: jax.Array
    taps: jax.Array
    rows: tuple[KeyValue, ...]


class Embedding(nnx.Module):
    """A table of token embeddings, `weight` `[vocab, E]`."""

    def __init__(self, vocab: int, features: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.weight = nnx.Param(jax.random.normal(rngs(), (vocab, features), dtype) * 0.02)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Embeddings `[..., E]` of `tokens` `[...]`."""
        return constrain(self.weight[...][tokens], "batch", *(None,) * tokens.ndim)


class Backbone(nnx.Module):
    """Embedding, decoder layers and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        kinds = [SparseMLP if config.is_sparse(i) else MLP for i in range(config.num_hidden_layers)]
        self.layers = nnx.List([DecoderLayer(config, kind, rngs=rngs, dtype=dtype) for kind in kinds])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)


class TargetModel(nnx.Module):
    """A causal language model; `config` is static, everything else a parameter."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.model = Backbone(config, rngs=rngs, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeddings `[..., E]` of `tokens` `[...]`; ids must be below the vocabulary's size."""
        return self.model.embed_tokens(tokens)

    @property
    def unembedding(self) -> jax.Array:
        """lm_head's weight `[vocab, E]`, or the embedding table where they are tied."""
        words = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return words.weight[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits `[..., vocab]` of final hidden states `[..., E]`."""
        return project(hidden, self.unembedding, jnp.dtype(jnp.float32))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        lengths: jax.Array,
        mask: jax.Array,
        tap_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """One forward over a block of nodes behind a cached prefix (paper section 3).

        Args:
            tokens: `[B, N]`.
            positions: `[B, N]`, absolute.
            cache: keys and values of committed tokens; rows at or past `lengths` are not read.
            lengths: `[B]`, committed rows of each batch row.
            mask: `uint32[B or 1, N, ceil(N / 32)]`, packed: which nodes of the block each node sees.
            tap_ids: layers whose outputs are returned as `taps`.
        """
        return self.run(
            self.embed(tokens),
            rope_at(positions, self.config),
            [attend_to(cache, layer, lengths, mask) for layer in cache.layers],
            tap_ids,
        )

    def run(self, x: jax.Array, rope: Rope, attends: list[Attend], tap_ids: tuple[int, ...]) -> TargetOutput:
        """The layers over embedded inputs `x` `[B, N, E]`, each with its own `attend`."""
        taps: dict[int, jax.Array] = {}
        rows = []
        for index, (layer, attend) in enumerate(zip(self.model.layers, attends, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, own = layer(x, rope, attend)
            rows.append(own)
            if index in tap_ids:
                taps[index] = x
        fused = [taps[i] for i in tap_ids]
        empty = jnp.zeros((*x.shape[:2], 0), x.dtype)
        return TargetOutput(self.model.norm(x), jnp.concatenate(fused, -1) if fused else empty, tuple(rows))
