"""Drafters whose drafts come from data, and tiny random targets: what tests of the decode loop run on.

A random draft head accepts almost nothing, which would leave most of the loop untested.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetspec_jax.cache import write_rows
from jetspec_jax.config import TargetConfig
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import ChildScorer, slot_scorer

ORACLE, OFFSPINE, ANTI, MIX = range(4)
MODES = (ORACLE, OFFSPINE, ANTI, MIX)


def tiny_target(
    seed: int, *, vocab: int = 64, hidden: int = 32, layers: int = 2, logit_scale: float = 8.0
) -> TargetModel:
    """A random float32 target whose lm_head is scaled up, so that argmax margins are not near-ties."""
    config = TargetConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_theta=1e4,
    )
    model = TargetModel(config, rngs=nnx.Rngs(seed))
    model.lm_head.weight[...] = model.lm_head.weight[...] * logit_scale
    return model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InjectedDraft:
    """Drafts that stand in a known relation to the target's own continuation.

    ORACLE: the true token is rank 1 at every depth, far above the rest. OFFSPINE: it has a random rank 2..width
    at every depth. ANTI: it is never among the children. MIX: each depth of each round is one of the three.

    oracle: int32 `[B, L]`, the target's own text, prompt included: `oracle[b, i]` is the token at position i.
    modes: int32 `[B]`, one of `MODES`.
    seeds: uint32 `[B]`, of all that is random; the round's length is folded in.
    decoys: int32 `[B]`, a token that is always drafted (as the best wrong one) wherever it is wrong; -1 is none.
    tap_ids, features: the target's layers that are tapped, and the size of their taps together.
    depth: slots drafted; a tree may use fewer.
    """

    oracle: jax.Array
    modes: jax.Array
    seeds: jax.Array
    decoys: jax.Array
    tap_ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    features: int = dataclasses.field(metadata={"static": True})
    depth: int = dataclasses.field(default=15, metadata={"static": True})

    def new_context(self, batch: int, capacity: int, dtype: jnp.dtype, attention: str = "auto") -> jax.Array:
        """Room for the taps `[B, L, T * E]` themselves, which tests compare with a fresh prefill's."""
        return jnp.zeros((batch, capacity, self.features), dtype)

    def extend_context(self, context: jax.Array, taps: jax.Array, lengths: jax.Array, count: jax.Array) -> jax.Array:
        """The context with the first `count` of the taps at `lengths`."""
        return write_rows(context, taps, lengths, count)

    def scorer(
        self, target: TargetModel, context: jax.Array, anchors: jax.Array, lengths: jax.Array, width: int
    ) -> ChildScorer:
        """The scorer of the injected logits."""
        return slot_scorer(self.logits(target.config.vocab_size, lengths, width), width)

    def logits(self, vocab: int, lengths: jax.Array, width: int) -> jax.Array:
        """Draft logits `[B, depth, vocab]` for anchors at `lengths` `[B]`.

        The words stand in a rotated order with the true one at its rank; logits fall by a random slope a rank.
        """
        slots = jnp.arange(self.depth, dtype=jnp.int32)[None]
        places = jnp.minimum(lengths[:, None] + 1 + slots, self.oracle.shape[1] - 1)
        truth = jnp.take_along_axis(self.oracle, places, axis=1)
        state = _hash(_hash(self.seeds)[:, None] ^ (lengths[:, None] * 64 + slots).astype(jnp.uint32))
        share, state = _uniform(state), _hash(state)
        mixed = jnp.where(share < 0.7, ORACLE, jnp.where(share < 0.9, OFFSPINE, ANTI))
        kind = jnp.where(self.modes[:, None] == MIX, mixed, self.modes[:, None])
        rank, state = 1 + (state % max(width - 1, 1)).astype(jnp.int32), _hash(state)
        rank = jnp.where(kind == ORACLE, 0, jnp.where(kind == OFFSPINE, rank, vocab - 1))
        words = jnp.arange(vocab, dtype=jnp.int32)[None, None]
        ranks = (words - truth[..., None] + rank[..., None]) % vocab
        # The decoy changes places with the best wrong word.
        decoy = jnp.broadcast_to(self.decoys[:, None], truth.shape)
        decoy_rank = ((decoy - truth + rank) % vocab)[..., None]
        best_rank = jnp.where(kind == ORACLE, 1, 0)[..., None]
        swapped = jnp.where(ranks == best_rank, decoy_rank, jnp.where(words == decoy[..., None], best_rank, ranks))
        ranks = jnp.where(((decoy < 0) | (decoy == truth))[..., None], ranks, swapped)
        slope = 0.05 + _uniform(state)
        peak = jnp.where((kind == ORACLE)[..., None] & (ranks == 0), 8.0, 0.0)
        return peak - slope[..., None] * ranks.astype(jnp.float32)


def _hash(x: jax.Array) -> jax.Array:
    """Well mixed uint32 bits (the finaliser of MurmurHash3); a real PRNG takes seconds to compile on CPUs."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def _uniform(x: jax.Array) -> jax.Array:
    """Float32 in [0, 1) from uint32 bits."""
    return (x >> jnp.uint32(8)).astype(jnp.float32) / float(1 << 24)


def injected(target: TargetModel, oracle: np.ndarray, modes: Any, *, seeds: Any = 0, decoys: Any = -1) -> InjectedDraft:
    """An `InjectedDraft` that taps every layer of the target; scalars hold for every row."""
    rows = oracle.shape[0]
    layers = target.config.num_hidden_layers
    per_row = lambda x, dtype: jnp.asarray(np.broadcast_to(np.asarray(x, dtype), (rows,)))  # noqa: E731
    return InjectedDraft(
        oracle=jnp.asarray(oracle, jnp.int32),
        modes=per_row(modes, np.int32),
        seeds=per_row(seeds, np.uint32),
        decoys=per_row(decoys, np.int32),
        tap_ids=tuple(range(layers)),
        features=layers * target.config.hidden_size,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableDraft:
    """Draft logits looked up by the anchor's token in `table` `[vocab, depth, vocab]`; no context."""

    table: jax.Array
    tap_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def new_context(self, batch: int, capacity: int, dtype: jnp.dtype, attention: str = "auto") -> None:
        """Nothing to keep."""

    def extend_context(self, context: None, taps: jax.Array, lengths: jax.Array, count: jax.Array) -> None:
        """Nothing to add."""

    def scorer(
        self, target: TargetModel, context: None, anchors: jax.Array, lengths: jax.Array, width: int
    ) -> ChildScorer:
        """The scorer of the anchors' entries."""
        return slot_scorer(self.table[anchors], width)
