"""The real head in the loop: context and drafts are those of a fresh pass, and caches are updated in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_case import CAPACITY, CHUNK, EOS, GREEDY, MAIN, Batch, anchors_of, by_token, forward, head, poison, target

from jetspec_jax.decode import LoopSpec, decode, prefill
from jetspec_jax.rope import rope_at

pytestmark = pytest.mark.usefixtures("compile_quickly")


@jax.jit
def fresh_head(head, target, tokens, lengths):
    """The head over the whole prefix, with no cache: context rows, and log-probabilities of every drafted slot."""
    batch, capacity = tokens.shape
    taps = forward(target, tokens)[2]
    positions = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32)[None], tokens.shape)
    rows = head.context_rows(taps, rope_at(positions, head.config))
    slots = head.depth + 1
    block = jnp.tri(slots, dtype=bool) if head.config.causal_head else jnp.ones((slots, slots), bool)
    before = jnp.broadcast_to((jnp.arange(capacity)[None] < lengths[:, None])[:, None], (batch, slots, capacity))
    visible = jnp.concatenate([before, jnp.broadcast_to(block[None], (batch, slots, slots))], axis=2)

    def dense(context):
        def attend(query, key, value):
            groups = query.shape[2] // key.shape[2]
            keys = jnp.repeat(jnp.concatenate([context.key, key], 1), groups, axis=2)
            values = jnp.repeat(jnp.concatenate([context.value, value], 1), groups, axis=2)
            scores = jnp.einsum("bnhd,bmhd->bhnm", query, keys) * query.shape[-1] ** -0.5
            weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), axis=-1)
            return jnp.einsum("bhnm,bmhd->bnhd", weights, values)

        return attend

    anchors = jnp.take_along_axis(tokens, lengths[:, None], axis=1)[:, 0]
    angles = rope_at(lengths[:, None] + jnp.arange(slots, dtype=jnp.int32)[None], head.config)
    hidden = head.run(target.embed(head.block_tokens(anchors)), angles, [dense(x) for x in rows])
    return rows, jax.nn.log_softmax(target.logits(hidden[:, 1:]))


def test_the_heads_context_and_drafts_equal_those_of_a_fresh_pass_over_the_prefix():
    """At every round, the first included, context rows and drafted log-probabilities are those of the head reading
    all committed tokens anew; the text is the target's own."""
    batch = Batch.of([1, 6, 10, 14, 19], [9, 12, 14, 10, 14], drafter=head())
    state = batch.prefill()

    @jax.jit
    def drafted(head, target, state):
        anchors = anchors_of(state)
        scorer = head.scorer(target, state.context, anchors, state.lengths, MAIN.width)
        children = [scorer(d, anchors[:, None]) for d in range(1, MAIN.depth + 1)]
        return tuple(jnp.concatenate(x, axis=1) for x in zip(*children, strict=True))

    while True:
        rows, want = jax.device_get(fresh_head(head(), target(), state.tokens, state.lengths))
        below = np.arange(CAPACITY) < np.array(state.lengths)[:, None]
        for have, new in zip(jax.tree.leaves(state.context), jax.tree.leaves(rows), strict=True):
            np.testing.assert_allclose(np.array(by_token(have))[below], new[below], atol=1e-4)
        state = poison(state)
        tokens, logprobs = jax.device_get(drafted(head(), target(), state))
        np.testing.assert_allclose(logprobs, np.take_along_axis(want, tokens, axis=2), atol=1e-3)
        np.testing.assert_allclose(logprobs, -np.sort(-want, axis=2)[..., : MAIN.width], atol=1e-3)
        if np.all(state.finished):
            break
        state = batch.advance(state, rounds=1)
    batch.check(state)


@pytest.mark.parametrize("causal", [True, False])
def test_a_slot_reaches_earlier_slots_only_in_a_bidirectional_head(causal):
    """Perturbing slot j's input changes no earlier slot of a causal head, in not one bit, and j itself and every
    slot of a bidirectional one; with an empty context too."""
    run = jax.jit(lambda head, x, context, lengths: head(x, context, lengths))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 32)).astype(np.float32)
    lengths = jnp.asarray([0, 9], jnp.int32)
    context = head(causal).new_context(2, 16, jnp.float32)
    taps = jnp.asarray(rng.normal(size=(2, 9, 64)), jnp.float32)
    context = head(causal).extend_context(context, taps, jnp.zeros((2,), jnp.int32), lengths)
    base = np.array(run(head(causal), x, context, lengths))
    for slot in range(8):
        moved = x.copy()
        moved[:, slot] += rng.normal(size=32)
        changed = np.any(np.array(run(head(causal), moved, context, lengths)) != base, axis=2)
        assert changed[:, slot:].all()
        assert np.all(changed[:, :slot] != causal)


def test_decoding_updates_its_caches_in_place():
    """The program's outputs alias the caches, and its temporaries are far below their size and do not grow with it."""
    temporaries = []
    for capacity in (4096, 16384):
        ints = jax.ShapeDtypeStruct((2,), jnp.int32)
        tokens, seeds = jax.ShapeDtypeStruct((2, capacity), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)
        start = functools.partial(prefill, eos_ids=EOS, mode=GREEDY.mode, chunk=CHUNK)
        state = jax.eval_shape(start, target(), head(), tokens, ints, ints, seeds, GREEDY.knobs)
        caches = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.cache, state.context)))
        rounds, spec = jax.ShapeDtypeStruct((), jnp.int32), LoopSpec(MAIN, EOS, GREEDY.mode)
        lowered = decode.lower(target(), head(), state, rounds, GREEDY.knobs, spec=spec)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= caches
        temporaries.append(memory.temp_size_in_bytes)
        assert memory.temp_size_in_bytes < caches / 4
    assert temporaries[1] <= temporaries[0] * 1.05
