"""The decode loop: rounds of draft, tree, verify, accept and commit inside one compiled program.

Axis letters: B batch, L capacity, N nodes (root included), S path slots (depth + 1).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jetspec_jax.accept import Accepted, accept
from jetspec_jax.cache import KVCache, gather_rows, write_rows
from jetspec_jax.ops import after
from jetspec_jax.path_tree import PathScorer, best_tree
from jetspec_jax.sampling import Knobs, Mode, Noise, choose
from jetspec_jax.sharding import constrain
from jetspec_jax.target import TargetModel, TargetOutput
from jetspec_jax.tree import Children, ChildScorer, Tree, TreeShape, ancestors
from kernels.pallas.tree_attention import Backend, causal_mask, pack_mask


class Drafter(Protocol):
    """What the loop needs of a draft head: a pytree with its own context, kept per committed token."""

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are the context's features."""
        ...

    def new_context(self, batch: int, capacity: int, dtype: jnp.dtype, attention: Backend = "auto") -> Any:
        """An empty context, a pytree; its attention, if it has any, is to use this backend."""
        ...

    def extend_context(self, context: Any, taps: jax.Array, lengths: jax.Array, count: jax.Array) -> Any:
        """The context with the first `count` `[B]` of the new taps `[B, N, T * E]`, placed at `lengths` `[B]`."""
        ...

    def scorer(
        self, target: TargetModel, context: Any, anchors: jax.Array, lengths: jax.Array, width: int
    ) -> ChildScorer | PathScorer:
        """One drafting forward after `anchors` `[B]`."""
        ...


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """The drafter of plain decoding: no taps, no context, and trees of the root alone."""

    tap_ids: tuple[int, ...] = ()

    def new_context(self, batch: int, capacity: int, dtype: jnp.dtype, attention: Backend = "auto") -> None:
        """Nothing to keep."""

    def extend_context(self, context: None, taps: jax.Array, lengths: jax.Array, count: jax.Array) -> None:
        """Nothing to add."""

    def scorer(
        self, target: TargetModel, context: None, anchors: jax.Array, lengths: jax.Array, width: int
    ) -> ChildScorer:
        """A scorer that is never asked, since a tree of budget 0 has no children."""

        def score(depth: int, parents: jax.Array) -> Children:
            raise AssertionError("plain decoding drafts nothing; use TreeShape(0, 1, 0)")

        return score


jax.tree_util.register_static(NoDrafter)


class LoopSpec(NamedTuple):
    """What a compiled loop depends on besides array shapes.

    tree: size of the draft trees; budget 0 is plain decoding.
    eos_ids: every id that ends a row.
    mode: how the target chooses tokens.
    """

    tree: TreeShape
    eos_ids: tuple[int, ...]
    mode: Mode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch under way. Everything lives on the device, donated from round to round.

    tokens: int32 `[B, L]`, prompt and committed tokens.
    lengths: int32 `[B]`, committed tokens whose keys, values and features are cached. `tokens[b, lengths[b]]`
        is the anchor, the last committed token, which has none yet. Nothing at or past `lengths` is read from
        a cache.
    limits: int32 `[B]`, prompt length + max_new_tokens.
    finished: bool `[B]`; a finished row's state no longer changes.
    keys: PRNG keys `[B]`.
    rounds: int32 `[B]`, rounds taken by each row.
    token_rounds: int32 `[B, L]`, the round (from 1) that committed each token; 0 for the prompt and for the first
        new token, which prefill gives.
    drafted: bool `[B, L]`, whether the token was drafted and accepted (otherwise the target gave it).
    cache: the target's keys and values.
    context: the drafter's own cache.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    finished: jax.Array
    keys: jax.Array
    rounds: jax.Array
    token_rounds: jax.Array
    drafted: jax.Array
    cache: KVCache
    context: Any


@functools.partial(jax.jit, static_argnames=("eos_ids", "mode", "chunk", "attention"))
def prefill(
    target: TargetModel,
    drafter: Drafter,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    limits: jax.Array,
    seeds: jax.Array,
    knobs: Knobs,
    *,
    eos_ids: tuple[int, ...],
    mode: Mode,
    chunk: int,
    attention: Backend = "auto",
) -> DecodeState:
    """Reads the prompts in chunks and chooses each row's first token.

    Args:
        tokens: int32 `[B, L]`, prompts from column 0 on; L is at least the longest prompt rounded up to a multiple
            of `chunk`.
        prompt_lengths: int32 `[B]`; a row of length 0 is padding and starts finished.
        limits: int32 `[B]`, prompt length + max_new_tokens, at most L.
        seeds: uint32 `[B]`.
        knobs, mode: see their classes.
        eos_ids: every id that ends a row.
        chunk: prompt tokens per forward.
        attention: the backend of attention, here and in every round that takes the state.
    """
    batch, capacity = tokens.shape
    dtype = target.model.norm.weight[...].dtype
    cache = KVCache.zeros(target.config, batch, capacity, dtype, attention)
    context = drafter.new_context(batch, capacity, dtype, attention)

    def read(index: jax.Array, carry: tuple[KVCache, Any, jax.Array]) -> tuple[KVCache, Any, jax.Array]:
        cache, context, last = carry
        start = jnp.full((batch,), index * chunk, jnp.int32)
        block = jax.lax.dynamic_slice_in_dim(tokens, index * chunk, chunk, axis=1)
        positions = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
        cached = jnp.minimum(start, prompt_lengths)
        out = target(block, positions, cache, cached, causal_mask(chunk), drafter.tap_ids)
        count = after(jnp.clip(prompt_lengths - start, 0, chunk), out.hidden)
        offset = prompt_lengths - 1 - start
        here = (offset >= 0) & (offset < chunk)
        final = out.hidden[jnp.arange(batch), jnp.clip(offset, 0, chunk - 1)]
        last = jnp.where(here[:, None], final, last)
        return cache.append(out.rows, start, count), drafter.extend_context(context, out.taps, start, count), last

    chunks = (jnp.max(prompt_lengths) + chunk - 1) // chunk
    last = jnp.zeros((batch, target.config.hidden_size), dtype)
    cache, context, last = jax.lax.fori_loop(0, chunks, read, (cache, context, last))
    keys = jax.vmap(jax.random.key)(seeds)
    depths = jnp.zeros((batch, 1), jnp.int32)
    noise = Noise(keys, prompt_lengths)
    first = choose(target.logits(last[:, None]), depths, noise, mode, knobs, 1)
    live = prompt_lengths > 0
    count = live.astype(jnp.int32)
    return _by_row(
        DecodeState(
            tokens=write_rows(tokens, first, prompt_lengths, count),
            lengths=prompt_lengths,
            limits=limits,
            finished=~live | is_eos(first, eos_ids)[:, 0] | (prompt_lengths + 1 >= limits),
            keys=keys,
            rounds=jnp.zeros((batch,), jnp.int32),
            token_rounds=jnp.zeros((batch, capacity), jnp.int32),
            drafted=jnp.zeros((batch, capacity), bool),
            cache=cache,
            context=context,
        )
    )


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames=("state",))
def decode(
    target: TargetModel, drafter: Drafter, state: DecodeState, max_rounds: jax.Array, knobs: Knobs, *, spec: LoopSpec
) -> DecodeState:
    """Decodes until every row is finished, or for `max_rounds` (int32 scalar) rounds, without leaving the device."""

    def unfinished(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        done, state = carry
        return (done < max_rounds) & ~jnp.all(state.finished)

    def step(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        done, state = carry
        return done + 1, decode_round(target, drafter, state, knobs, spec)

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), state))[1]


def decode_round(
    target: TargetModel, drafter: Drafter, state: DecodeState, knobs: Knobs, spec: LoopSpec
) -> DecodeState:
    """One round for every row (docs/design.md); finished rows come out as they went in."""
    depth = spec.tree.depth
    tree, seen = draft_tree(target, drafter, state, spec.tree)
    with jax.named_scope("verify"):
        positions = state.lengths[:, None] + tree.depths
        out = target(tree.tokens, positions, state.cache, state.lengths, pack_mask(seen), drafter.tap_ids)
        noise = Noise(state.keys, state.lengths + 1)
        chosen = choose(target.logits(out.hidden), tree.depths, noise, spec.mode, knobs, depth + 1)
    with jax.named_scope("commit"):
        return _commit(drafter, state, out, accept(tree, seen, chosen, depth), spec)


def draft_tree(target: TargetModel, drafter: Drafter, state: DecodeState, shape: TreeShape) -> tuple[Tree, jax.Array]:
    """The trees below every row's anchor, and `tree.ancestors` of them, `[B, N, N]`."""
    anchors = jnp.take_along_axis(state.tokens, state.lengths[:, None], axis=1)[:, 0]
    scorer = drafter.scorer(target, state.context, anchors, state.lengths, shape.width)
    with jax.named_scope("tree"):
        tree = best_tree(anchors, scorer, shape)
        return tree, ancestors(tree, shape.depth)


def _commit(drafter: Drafter, state: DecodeState, out: TargetOutput, accepted: Accepted, spec: LoopSpec) -> DecodeState:
    """The state after the accepted tokens, cut at the first end of sequence or the cap, have joined it."""
    slots = jnp.arange(spec.tree.depth + 1, dtype=jnp.int32)[None]
    ends = is_eos(accepted.tokens, spec.eos_ids) & (slots < accepted.committed[:, None])
    until_eos = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, spec.tree.depth + 1)
    room = state.limits - state.lengths - 1
    count = jnp.minimum(jnp.minimum(accepted.committed, until_eos), room).astype(jnp.int32)
    stopped = (count == until_eos) & jnp.any(ends, axis=1) | (count == room)
    live = ~state.finished
    count = after(jnp.where(live, count, 0), accepted.tokens)
    rounds = state.rounds + live.astype(jnp.int32)
    taps = jnp.take_along_axis(out.taps, accepted.path[..., None], axis=1)
    write = functools.partial(write_rows, start=state.lengths + 1, count=count)
    return _by_row(
        DecodeState(
            tokens=write(state.tokens, accepted.tokens),
            lengths=state.lengths + count,
            limits=state.limits,
            finished=state.finished | stopped,
            keys=state.keys,
            rounds=rounds,
            token_rounds=write(state.token_rounds, jnp.broadcast_to(rounds[:, None], accepted.tokens.shape)),
            drafted=write(state.drafted, slots < accepted.committed[:, None] - 1),
            cache=state.cache.append(gather_rows(out.rows, accepted.path), state.lengths, count),
            context=drafter.extend_context(state.context, taps, state.lengths, count),
        )
    )


def _by_row(state: DecodeState) -> DecodeState:
    """`state` with its rows split over the mesh in force, always alike: what one call gives, the next one takes."""
    fields = (f.name for f in dataclasses.fields(state) if f.name not in ("cache", "context"))
    arrays = {name: getattr(state, name) for name in fields}
    placed: dict[str, Any] = {n: constrain(x, "batch", *(None,) * (x.ndim - 1)) for n, x in arrays.items()}
    return dataclasses.replace(state, **placed)


def is_eos(tokens: jax.Array, eos_ids: tuple[int, ...]) -> jax.Array:
    """Whether each of `tokens` ends a row; bool, in their shape."""
    found = jnp.zeros(tokens.shape, bool)
    for eos in eos_ids:
        found = found | (tokens == eos)
    return found
