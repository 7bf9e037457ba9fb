"""The draft head: one forward drafts a block of tokens from the target's fused hidden states (paper section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.cache import KVCache, attend_to
from jetspec_jax.config import HeadConfig
from jetspec_jax.layers import Attend, DecoderLayer, KeyValue, Linear, RMSNorm
from jetspec_jax.path_tree import ParentTerm, PathScorer
from jetspec_jax.rope import Rope, rope_at
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import ChildScorer, slot_scorer
from kernels.pallas.tree_attention import Backend, causal_mask, full_mask


class DraftHead(nnx.Module):
    """A few Qwen3 layers whose keys and values are `[context ; block]`.

    The context of every layer is its own k/v projection of the *same* fused feature (not of a residual stream),
    so each committed token is projected once and cached. Embeddings and lm_head are the target's. With a
    `parent_rank`, `parent` is the term that a drafted token's parent adds to its logits.
    """

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32):
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if config.parent_rank:
            self.parent = ParentTerm(config.vocab_size, config.parent_rank, rngs=rngs, dtype=dtype)

    @property
    def depth(self) -> int:
        """How many tokens one forward drafts: the slots after the anchor."""
        return self.config.block_size - 1

    def fuse(self, taps: jax.Array) -> jax.Array:
        """Fused features `[B, N, E]` of the target's `taps` `[B, N, T * E]`."""
        return self.hidden_norm(self.fc(taps))

    def context_rows(self, taps: jax.Array, rope: Rope) -> tuple[KeyValue, ...]:
        """Per layer, the keys and values of committed tokens with these `taps` `[B, N, T * E]`."""
        features = self.fuse(taps)
        return tuple(layer.self_attn.keys_values(features, rope) for layer in self.layers)

    def block_tokens(self, anchors: jax.Array) -> jax.Array:
        """The input block `[B, block_size]`: each of `anchors` `[B]`, then mask tokens."""
        masks = jnp.full((anchors.shape[0], self.depth), self.config.mask_token_id, anchors.dtype)
        return jnp.concatenate([anchors[:, None], masks], axis=1)

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs are the context."""
        return self.config.target_layer_ids

    def new_context(self, batch: int, capacity: int, dtype: jnp.dtype, attention: Backend = "auto") -> KVCache:
        """An empty cache of projected context."""
        return KVCache.zeros(self.config, batch, capacity, dtype, attention)

    def extend_context(self, context: KVCache, taps: jax.Array, lengths: jax.Array, count: jax.Array) -> KVCache:
        """The context with the first `count[b]` of `taps` `[B, N, T * E]` at `lengths[b]` onwards."""
        positions = lengths[:, None] + jnp.arange(taps.shape[1], dtype=lengths.dtype)[None]
        return context.append(self.context_rows(taps, rope_at(positions, self.config)), lengths, count)

    def scorer(
        self, target: TargetModel, context: KVCache, anchors: jax.Array, lengths: jax.Array, width: int
    ) -> ChildScorer | PathScorer:
        """One forward: the scorer of every depth's tokens after `anchors` `[B]` at positions `lengths` `[B]`."""
        with jax.named_scope("draft"):
            hidden = self(target.embed(self.block_tokens(anchors)), context, lengths)
            logits = target.logits(hidden[:, 1:])
            return PathScorer(logits, self.parent, width) if self.config.parent_rank else slot_scorer(logits, width)

    def __call__(self, embedded: jax.Array, cache: KVCache, lengths: jax.Array) -> jax.Array:
        """Hidden states `[B, S, E]` of every slot, for the target's lm_head.

        Args:
            embedded: `[B, S, E]`, the target's embeddings of the block's tokens; slot 0 is the anchor.
            cache: context rows of the committed tokens before the anchor.
            lengths: `[B]`, how many there are; it is the anchor's position too.
        """
        slots = embedded.shape[1]
        positions = lengths[:, None] + jnp.arange(slots, dtype=lengths.dtype)[None]
        mask = causal_mask(slots) if self.config.causal_head else full_mask(slots)
        attends = [attend_to(cache, layer, lengths, mask) for layer in cache.layers]
        return self.run(embedded, rope_at(positions, self.config), attends)

    def run(self, x: jax.Array, rope: Rope, attends: list[Attend]) -> jax.Array:
        """The layers over embedded slots `x` `[B, N, E]`, each with its own `attend`."""
        for layer, attend in zip(self.layers, attends, strict=True):
            x, _ = layer(x, rope, attend)
        return self.norm(x)
