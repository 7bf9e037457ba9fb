"""Training sees what decoding sees: the same block, context and teacher, and nothing else (train/serve skew)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_case import (
    ANCHORS,
    BLOCK,
    DOCUMENTS,
    FILLED,
    LENGTH,
    MASK,
    SIZES,
    STARTS,
    VOCAB,
    blocks_of,
    drafted,
    drawn_loss,
    fresh_models,
    models,
    outputs,
    packed,
)  # fmt: skip

from jetspec_jax import Target, generate
from jetspec_jax.cache import KVCache
from kernels.pallas.tree_attention import causal_mask
from train import pretrain, step
from train.config import OptimizerConfig
from train.data import document, pad_batch
from train.objective import Blocks, draft_blocks, supervision
from train.optimizer import make_optimizer

pytestmark = pytest.mark.usefixtures("compile_quickly")


@jax.jit
def decoded(target, head, tokens, count, truth, filled):
    """What decoding computes: the head's hidden states after `count` cached tokens of a document that is alone, and
    the target's hidden states of the document.

    tokens `[N, L]`; `truth` `[N, S]` are the tokens from the anchor on, of which `filled` after it are shown.
    """
    batch, length = tokens.shape
    none = jnp.zeros((batch,), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
    empty = KVCache.zeros(target.config, batch, 1, jnp.float32)
    out = target(tokens, positions, empty, none, causal_mask(length), head.tap_ids)
    context = head.extend_context(head.new_context(batch, length, jnp.float32), out.taps, none, count)
    shown = jnp.arange(BLOCK)[None] <= filled[:, None]
    block = jnp.where(shown, truth, head.block_tokens(truth[:, 0]))
    return head(target.embed(block), context, count), out.hidden


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_in_training_is_the_block_that_decoding_drafts(causal):
    """Hidden states and logits of every block of packed documents equal, to 1e-5, the decode-time forward over its
    document alone: causal or not, filled or not, with a first response token or a document's first token as anchor.
    The teacher's states are those of the document alone, too."""
    target, head = models(causal)
    batch, blocks = packed(), blocks_of()
    have = np.array(drafted(head, target, batch, outputs().taps, blocks))
    tokens, truth, places = np.zeros((ANCHORS.size, 16), np.int32), [], []
    for index, (row, anchor) in enumerate((r, a) for r in range(2) for a in ANCHORS[r]):
        which = batch.documents[row, anchor] - 1
        start, size = STARTS[row][which], DOCUMENTS[row][which][0]
        tokens[index, :size] = batch.tokens[row, start : start + size]
        truth.append(np.resize(batch.tokens[row, anchor : anchor + BLOCK], BLOCK))  # those past the row are not shown
        places.append((row, start, size))
    counts = ANCHORS.ravel() - [start for _, start, _ in places]
    assert 0 in counts
    want, alone = jax.device_get(decoded(target, head, tokens, counts, np.stack(truth), FILLED.ravel()))
    have = have.reshape(want.shape)
    np.testing.assert_allclose(have, want, atol=1e-5)
    lm_head = np.asarray(target.lm_head.weight[...]).T
    np.testing.assert_allclose(have @ lm_head, want @ lm_head, atol=1e-5)
    for lone, (row, start, size) in zip(alone, places):
        np.testing.assert_allclose(np.array(outputs().hidden)[row, start : start + size], lone[:size], atol=1e-5)


def test_slots_in_training_and_in_decoding_are_conditioned_on_the_same_parents():
    """The log-probabilities that a head with a parent term trains on, each given the true token before, are those that
    decoding gives the child of a node with that token, slot by slot; and the loss is made of them."""
    target, head = fresh_models(True, layers=1, parent_rank=3)
    batch, blocks = packed(), blocks_of(filled=False)
    lessons = supervision(jax.tree.map(jnp.asarray, batch), blocks, BLOCK, 0.0)
    logits = target.logits(drafted(head, target, batch, outputs().taps, blocks)) + head.parent(lessons.parent)
    have = np.array(jax.nn.log_softmax(logits))[..., 1:, :]
    _, metrics = drawn_loss(
        head, target, batch, outputs().taps, outputs().hidden, blocks, gamma=0.0, temperature=1.0, loss="sft"
    )

    @jax.jit
    def in_decoding(target, head, taps, count, text):
        """Log-probabilities `[N, S - 1, V]` of the words after each token of `text` `[N, S - 1]`."""
        empty = head.new_context(taps.shape[0], taps.shape[1], jnp.float32)
        context = head.extend_context(empty, taps, jnp.zeros_like(count), count)
        scorer = head.scorer(target, context, text[:, 0], count, VOCAB)
        depths = jnp.broadcast_to(jnp.arange(BLOCK - 1, dtype=jnp.int32), text.shape)
        words, logprobs = scorer.rows(depths, text)
        return jnp.take_along_axis(logprobs, jnp.argsort(words, axis=-1), axis=-1)

    taps, text, counts = np.zeros((ANCHORS.size, 16, outputs().taps.shape[2]), np.float32), [], []
    for index, (row, anchor) in enumerate((r, a) for r in range(2) for a in ANCHORS[r]):
        which = batch.documents[row, anchor] - 1
        start, size = STARTS[row][which], DOCUMENTS[row][which][0]
        taps[index, :size] = outputs().taps[row, start : start + size]
        text.append(np.resize(batch.tokens[row, anchor : anchor + BLOCK - 1], BLOCK - 1))
        counts.append(anchor - start)
    want = np.array(in_decoding(target, head, taps, np.int32(counts), np.int32(text))).reshape(have.shape)
    counted = np.array(lessons.weights)[..., 1:] > 0
    assert counted.sum() > 20
    np.testing.assert_allclose(have[counted], want[counted], atol=1e-5)
    of_truth = np.take_along_axis(want, np.array(lessons.truth)[..., 1:, None], axis=3)[..., 0]
    np.testing.assert_allclose(metrics.total, -of_truth[counted].sum(), rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_only_features_before_the_anchor_in_its_document_reach_a_block(causal):
    """Other features, the anchor's own and later ones included, change not one bit of it."""
    target, head = models(causal)
    batch, blocks, taps = packed(), blocks_of(), np.array(outputs().taps)
    base = np.array(drafted(head, target, batch, taps, blocks))
    for place in range(LENGTH):
        moved = taps.copy()
        moved[:, place] += np.random.default_rng(place).normal(size=taps.shape[2])
        changed = np.any(np.array(drafted(head, target, batch, moved, blocks)) != base, axis=3)
        same = batch.documents[:, place, None] == np.take_along_axis(batch.documents, ANCHORS, axis=1)
        assert np.array_equal(changed.all(axis=2), same & (place < ANCHORS))
        assert np.array_equal(changed.any(axis=2), same & (place < ANCHORS))


@pytest.mark.parametrize("causal", [True, False])
def test_only_tokens_that_a_block_shows_reach_it(causal):
    """The anchor's token and the filled ones reach slots from their own on (causal) or all slots (bidirectional);
    other blocks' tokens and later ones change not one bit, however close their anchors are."""
    target, head = models(causal)
    batch, blocks, taps = packed(), blocks_of(), outputs().taps
    base = np.array(drafted(head, target, batch, taps, blocks))
    for place in range(LENGTH):
        tokens = batch.tokens.copy()
        tokens[:, place] = (tokens[:, place] + 1) % MASK
        have = np.array(drafted(head, target, batch._replace(tokens=tokens), taps, blocks))
        shown = ((place >= ANCHORS) & (place <= ANCHORS + FILLED))[..., None]
        reached = (np.arange(BLOCK) >= place - ANCHORS[..., None]) | (not causal)
        assert np.array_equal(np.any(have != base, axis=3), shown & reached)


def test_gradients_of_a_block_reach_only_features_before_its_anchor():
    """The Jacobian of each block with respect to any other feature is exactly zero, and finite everywhere."""
    target, head = models(True)
    batch, count = packed(), ANCHORS.shape[1]

    @jax.jit
    def pulled(batch, taps, directions):
        _, pull = jax.vjp(lambda taps: draft_blocks(head, target, batch, taps, blocks_of()), taps)
        return jax.vmap(lambda direction: pull(direction)[0])(directions)

    noise = np.random.default_rng(0).normal(size=(1, 2, count, BLOCK, SIZES["hidden_size"]))
    directions = np.eye(count)[:, None, :, None, None] * noise  # one block at a time
    gradients = np.array(pulled(batch, outputs().taps, directions.astype(np.float32)))
    assert np.isfinite(gradients).all()
    own = np.take_along_axis(batch.documents, ANCHORS, axis=1)
    for block in range(count):
        allowed = (np.arange(LENGTH) < ANCHORS[:, block, None]) & (batch.documents == own[:, block, None])
        assert np.array_equal(np.any(gradients[block] != 0, axis=2), allowed)


@pytest.mark.usefixtures("optax_promotes")
def test_a_head_overfitted_on_one_text_drafts_it_in_full_blocks():
    """Target and head are trained on one text until the target knows it. Decoding its prompt then gives the text, a
    full block each round: what training optimises is what decoding uses."""
    rounds, prompt = 5, 4
    tokens = np.random.default_rng(3).integers(0, MASK, prompt + 1 + rounds * BLOCK).tolist()
    batch = pad_batch([document(tokens[:prompt], tokens[prompt:])], 64)
    model, head = fresh_models(True, layers=1)
    steps = 80
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=10), steps)
    state = jax.jit(optimizer.init)(model)
    for _ in range(steps):
        model, state, _, right = pretrain.train_step(model, state, batch, optimizer=optimizer, prompt_weight=0.1)
    assert right == 1

    steps = 150
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=10), steps)
    anchors = np.arange(prompt, len(tokens) - 1, dtype=np.int32)[None]
    blocks = Blocks(anchors, np.zeros_like(anchors), np.ones(anchors.shape, bool))
    state = jax.jit(functools.partial(step.new_state, optimizer=optimizer))(head)
    for _ in range(steps):
        state, metrics = step.train_step(state, model, batch, blocks, optimizer=optimizer, objective=step.Objective())
    assert np.array_equal(metrics.blocks.agreement, np.ones(BLOCK - 1))

    target = Target(model, None, (), pathlib.Path("overfitted"))
    [result] = generate(
        target, state.head, [tokens[:prompt]], budget=2 * BLOCK, tree_width=2, max_new_tokens=len(tokens) - prompt
    )
    assert result.token_ids == tokens[prompt:]
    assert result.accepted_lengths == [BLOCK] * rounds
    assert result.mean_accepted_length == BLOCK
