"""The target's choice of a token: greedy, or a draw from the processed distribution."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.ops import argmax, top_k


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the target chooses tokens. Filters apply in the order temperature, top_k, top_p, min_p.

    temperature: divides the logits; 0 is greedy and leaves the filters without effect.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability reaches this; 1 keeps all.
    min_p: keep tokens at least this fraction as likely as the most likely one; 0 keeps all.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax."""
        return self.temperature < float(np.finfo(np.float32).tiny)  # smaller ones are 0 in float32

    @property
    def mode(self) -> Mode:
        """What the compiled program depends on; `knobs` holds the rest."""
        return Mode(self.greedy, 0 if self.greedy else self.top_k, not self.greedy and self.top_p < 1)

    @property
    def knobs(self) -> Knobs:
        """The values that may change without recompiling."""
        return Knobs(*(np.float32(x) for x in (self.temperature, self.top_p, self.min_p)))


class Mode(NamedTuple):
    """The static part of `Sampling`."""

    greedy: bool
    top_k: int
    top_p: bool


class Knobs(NamedTuple):
    """The traced part of `Sampling`: float32 scalars."""

    temperature: jax.typing.ArrayLike
    top_p: jax.typing.ArrayLike
    min_p: jax.typing.ArrayLike


class Noise(NamedTuple):
    """What a draw depends on besides the logits.

    keys: PRNG keys `[B]`, one a row.
    start: int32 `[B]`, absolute position of the token that follows a node of depth 0.
    """

    keys: jax.Array
    start: jax.Array


def choose(logits: jax.Array, depths: jax.Array, noise: Noise, mode: Mode, knobs: Knobs, levels: int) -> jax.Array:
    """The target's token after every node, int32 `[B, N]`.

    A draw is the argmax of processed log-probabilities plus Gumbel noise that depends on the row's key and the
    drawn token's position alone. Whatever was drafted, the token at a position is thus the one that plain
    sampling with the same seed draws, and distinct positions have independent noise, so that the output has
    exactly the target's distribution. (Nodes of one depth share their noise; at most one of them is used.)

    Args:
        logits: float32 `[B, N, vocab]`.
        depths: int32 `[B, N]`, each below `levels`.
        noise, mode, knobs: see their classes.
        levels: number of distinct depths, static.
    """
    if mode.greedy:
        return argmax(logits)
    vocab = logits.shape[-1]
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / knobs.temperature
    added = jnp.take_along_axis(_gumbel(noise, levels, vocab), depths[..., None], axis=1)
    if mode.top_k == 0 and not mode.top_p:
        return argmax(_min_p(scaled, knobs) + added)
    kept, tokens = top_k(scaled, min(mode.top_k or vocab, vocab))
    if mode.top_p:
        kept = _top_p(kept, knobs)
    best = argmax(_min_p(kept, knobs) + jnp.take_along_axis(added, tokens, axis=-1))
    return jnp.take_along_axis(tokens, best[..., None], axis=-1)[..., 0]


def _gumbel(noise: Noise, levels: int, vocab: int) -> jax.Array:
    """Gumbel noise `[B, levels, vocab]` of the positions `start .. start + levels - 1`."""

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,))

    positions = noise.start[:, None] + jnp.arange(levels, dtype=noise.start.dtype)[None]
    return jax.vmap(jax.vmap(draw, (None, 0)))(noise.keys, positions)


def _top_p(scores: jax.Array, knobs: Knobs) -> jax.Array:
    """`scores` `[..., k]`, sorted descending, with -inf outside the smallest set that reaches top_p."""
    probabilities = jax.nn.softmax(scores, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    return jnp.where(before < knobs.top_p, scores, -jnp.inf)


def _min_p(scores: jax.Array, knobs: Knobs) -> jax.Array:
    """`scores` `[..., k]`, whose best is 0, with -inf where they are less than min_p times as likely."""
    return jnp.where(scores >= jnp.log(knobs.min_p), scores, -jnp.inf)
