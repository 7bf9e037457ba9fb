"""The objective of a packed batch: who teaches which slot, the loss and metrics of all, and which blocks are drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_case import (
    ANCHORS,
    BLOCK,
    FILLED,
    LENGTH,
    blocks_of,
    drafted,
    drawn_grad,
    drawn_loss,
    fresh_models,
    logits_of,
    models,
    outputs,
    packed,
)  # fmt: skip

import train.objective
from train.data import Packed
from train.objective import Blocks, distillation_loss, sample_blocks, supervision

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.mark.parametrize("gamma", [0, 7])
def test_sources_truths_and_weights_of_a_case_done_by_hand(gamma):
    """Rows: documents at 0-4 and 5-9, then padding; and one document that fills the row."""
    documents = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * 12], np.int32)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    batch = Packed(tokens, np.zeros_like(documents), documents, documents > 0)
    # (row, anchor, filled, live, sources, whether each slot is supervised)
    cases = [
        (0, 1, 0, True, (1, 1, 2, 3), (0, 1, 1, 1)),
        (0, 0, 2, True, (0, 1, 2, 2), (1, 1, 1, 1)),  # filled slots learn the token after their own
        (0, 3, 0, True, (3, 3, 4, 5), (0, 1, 0, 0)),  # the document ends at 4
        (0, 7, 1, True, (7, 8, 8, 9), (1, 1, 1, 0)),  # padding follows 9
        (0, 8, 2, True, (8, 9, 10, 10), (1, 0, 0, 0)),
        (0, 6, 0, False, (6, 6, 7, 8), (0, 0, 0, 0)),
        (1, 8, 0, True, (8, 8, 9, 10), (0, 1, 1, 1)),
        (1, 9, 2, True, (9, 10, 11, 11), (1, 1, 0, 0)),  # the row ends at 11
        (1, 10, 0, True, (10, 10, 11, 11), (0, 1, 0, 0)),
        (1, 10, 1, False, (10, 11, 11, 11), (0, 0, 0, 0)),
        (1, 0, 1, True, (0, 1, 1, 2), (1, 1, 1, 1)),
        (1, 0, 0, True, (0, 0, 1, 2), (0, 1, 1, 1)),
    ]
    shaped = lambda index, dtype: np.array([case[index] for case in cases], dtype).reshape(2, 6)  # noqa: E731
    assert np.array_equal(shaped(0, np.int32), [[0] * 6, [1] * 6])
    blocks = Blocks(shaped(1, np.int32), shaped(2, np.int32), shaped(3, bool))
    taught = jax.device_get(supervision(jax.tree.map(jnp.asarray, batch), blocks, 4, gamma))
    sources, counted = (np.array([case[i] for case in cases]).reshape(2, 6, 4) for i in (4, 5))
    ahead = sources - blocks.anchors[..., None]  # a slot that learns the first token after the anchor weighs 1
    decay = np.exp(-ahead / gamma) if gamma else 1.0
    np.testing.assert_allclose(taught.weights, counted * decay, rtol=1e-6)
    assert np.array_equal(taught.source[counted > 0], sources[counted > 0])
    truth = sources + 1 + 12 * np.arange(2)[:, None, None]
    assert np.array_equal(taught.truth[counted > 0], truth[counted > 0])
    assert taught.source.min() >= 0 and taught.source.max() < 12


def test_in_a_conversation_only_the_anchors_own_answer_is_learnt():
    """Two answers with a message between: no slot learns the message, nor across it the second answer, and the token
    that ends a turn is no anchor."""
    response = np.array([[0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]], bool)
    tokens = np.arange(12, dtype=np.int32)[None]
    batch = Packed(tokens, tokens, np.ones_like(tokens), response)
    drawn = sample_blocks(batch, 12, 4, 0.0, np.random.default_rng(0))
    assert sorted(drawn.anchors[drawn.live]) == [2, 9, 10]
    blocks = Blocks(np.array([[2, 9, 2]], np.int32), np.array([[0, 0, 1]], np.int32), np.ones((1, 3), bool))
    taught = supervision(jax.tree.map(jnp.asarray, batch), blocks, 10, 0.0)
    learnt = [row.tolist() for row in map(np.unique, np.where(taught.weights[0] > 0, taught.truth[0], -1))]
    assert learnt == [[-1, 3], [-1, 10, 11], [-1, 3]]


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("loss", "gamma", "temperature"), [("forward_kl", 0.0, 1.0), ("forward_kl", 7.0, 2.0), ("sft", 3.0, 1.0)]
)
def test_the_loss_is_the_weighted_mean_over_slots_and_the_metrics_are_what_their_docs_say(loss, gamma, temperature):
    """Against a float64 loop over slots: teacher, text and weight of each, and what is counted."""
    target, head = models(True)
    batch, out, blocks = packed(), outputs(), blocks_of()
    options = {"loss": loss, "gamma": gamma, "temperature": temperature}
    value, metrics = drawn_loss(head, target, batch, out.taps, out.hidden, blocks, **options)
    student = logits_of(target, drafted(head, target, batch, out.taps, blocks))
    teacher = logits_of(target, out.hidden)
    total = weights = 0.0
    supervised = 0
    agreeing, guesses = np.zeros(BLOCK - 1), np.zeros(BLOCK - 1)
    lengths = []
    for row, index in np.ndindex(ANCHORS.shape):
        anchor, filled = ANCHORS[row, index], FILLED[row, index]
        leading = True
        committed = 1
        for slot in range(BLOCK):
            predicted = anchor + slot + (slot <= filled)
            if slot == 0 and not filled:
                continue
            if predicted >= LENGTH or batch.documents[row, predicted] != batch.documents[row, anchor]:
                break
            weight = np.exp(-(predicted - anchor - 1) / gamma) if gamma else 1.0
            guess, lesson, truth = student[row, index, slot], teacher[row, predicted - 1], batch.tokens[row, predicted]
            p, q = log_softmax(lesson / temperature), log_softmax(guess / temperature)
            total += weight * (-q[truth] if loss == "sft" else temperature**2 * np.sum(np.exp(p) * (p - q)))
            weights += weight
            supervised += 1
            if not filled:
                guesses[slot - 1] += 1
                agreeing[slot - 1] += guess.argmax() == lesson.argmax()
                leading = leading and guess.argmax() == truth
                committed += leading
        if not filled:
            lengths.append(committed)
    np.testing.assert_allclose([value, metrics.loss], total / weights, rtol=1e-5)
    np.testing.assert_allclose([metrics.total, metrics.weight], [total, weights], rtol=1e-5)
    np.testing.assert_allclose(metrics.coverage, supervised / student[..., 0].size, rtol=1e-6)
    assert np.array_equal(metrics.guesses, guesses)
    assert np.array_equal(metrics.agreeing, agreeing)
    np.testing.assert_allclose(metrics.agreement, agreeing / np.maximum(guesses, 1), rtol=1e-6)
    np.testing.assert_allclose(metrics.accepted, np.mean(lengths), rtol=1e-6)


def test_metrics_of_parts_add_up_to_those_of_the_whole():
    """Two micro-batches of a row each, added, are the batch of both rows."""
    target, head = models(True)
    batch, out, blocks = packed(), outputs(), blocks_of()
    options = {"gamma": 7.0, "temperature": 2.0}
    _, whole = drawn_loss(head, target, batch, out.taps, out.hidden, blocks, **options)
    parts = []
    for row in range(2):
        cut = jax.tree.map(lambda x: x[row : row + 1], (batch, out.taps, out.hidden, blocks))  # noqa: B023
        parts.append(drawn_loss(head, target, *cut, **options)[1])
    for have, want in zip(jax.tree.map(lambda *x: sum(x), *parts), whole, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


@pytest.mark.parametrize("logit_chunk", [1, 7])
def test_the_chunk_of_logits_changes_neither_loss_nor_gradient(logit_chunk):
    """Chunks of one slot, and of a number that divides nothing, against all slots at once."""
    target, head = models(True)
    arguments = (head, target, packed(), outputs().taps, outputs().hidden, blocks_of())
    want, all_metrics = drawn_grad(*arguments, gamma=7.0, temperature=2.0)
    have, metrics = drawn_grad(*arguments, gamma=7.0, temperature=2.0, logit_chunk=logit_chunk)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5), have, want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), metrics, all_metrics)


def test_options_that_cannot_be_are_refused_before_anything_is_compiled():
    """With the field to change."""
    arguments = (*models(True)[::-1], packed(), outputs().taps, outputs().hidden, blocks_of())
    with pytest.raises(ValueError, match=r"--config\.logit_chunk .* got -1"):
        distillation_loss(*arguments, gamma=0.0, temperature=1.0, logit_chunk=-1)
    with pytest.raises(ValueError, match="unknown loss 'hinge'"):
        distillation_loss(*arguments, gamma=0.0, temperature=1.0, loss="hinge")


def test_bfloat16_compute_keeps_float32_gradients_near_those_of_float32():
    """The target is bfloat16, the head's weights float32: gradients arrive in float32 and point the same way."""
    target, head = fresh_models(True, layers=1)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    batch, blocks, options = packed(), blocks_of(), {"gamma": 0.0, "temperature": 1.0}
    exact, _ = drawn_grad(head, target, batch, outputs().taps, outputs().hidden, blocks, **options)
    taps, hidden = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (outputs().taps, outputs().hidden))
    rounded, metrics = drawn_grad(head, half, batch, taps, hidden, blocks, compute_dtype=jnp.bfloat16, **options)
    assert metrics.total.dtype == jnp.float32
    for have, want in zip(jax.tree.leaves(rounded), jax.tree.leaves(exact), strict=True):
        assert have.dtype == jnp.float32
        have, want = np.ravel(have), np.ravel(want)
        assert have @ want > 0.99 * np.linalg.norm(have) * np.linalg.norm(want)


def test_a_student_that_is_its_teacher_has_no_loss(monkeypatch):
    """The loss is exactly 0, and every MASK slot agrees."""
    target, head = models(True)
    batch, out, blocks = packed(), outputs(), blocks_of()
    source = supervision(jax.tree.map(jnp.asarray, batch), blocks, BLOCK, 7.0).source
    monkeypatch.setattr(train.objective, "draft_blocks", lambda *_: out.hidden[jnp.arange(2)[:, None, None], source])
    loss = functools.partial(distillation_loss, gamma=7.0, temperature=2.0)
    _, metrics = jax.jit(lambda *arguments: loss(*arguments))(head, target, batch, out.taps, out.hidden, blocks)
    assert metrics.loss == 0
    assert np.array_equal(metrics.agreement, np.ones(BLOCK - 1))


def test_a_batch_without_a_live_block_has_loss_zero_and_zero_gradients():
    """Nothing is divided by nothing: no NaN in the loss, the metrics or any gradient."""
    target, head = models(True)
    out = outputs()
    arguments = (head, target, packed(), out.taps, out.hidden)
    gradients, metrics = drawn_grad(*arguments, blocks_of(live=False), gamma=7.0, temperature=2.0)
    for mean in (metrics.loss, metrics.agreement, metrics.accepted, metrics.coverage):
        assert np.all(np.asarray(mean) == 0)
    assert all(np.all(np.array(leaf) == 0) for leaf in jax.tree.leaves(gradients))
    gradients, metrics = drawn_grad(*arguments, blocks_of(), gamma=7.0, temperature=2.0)  # and live ones have some
    assert metrics.loss > 0
    assert all(np.isfinite(leaf).all() and np.any(np.array(leaf) != 0) for leaf in jax.tree.leaves(gradients))


def usable():
    """Response tokens with another after them in their document."""
    batch = packed()
    follows = np.zeros(batch.documents.shape, bool)
    follows[:, :-1] = batch.documents[:, 1:] == batch.documents[:, :-1]
    return batch.response & follows & (batch.documents > 0)


def test_anchors_are_distinct_response_tokens_with_a_successor_and_any_may_be_drawn():
    """A live block's anchor is usable, no two of a row are the same, and over many draws each is met."""
    met = np.zeros_like(usable())
    for seed in range(50):
        blocks = sample_blocks(packed(), 4, BLOCK, 0.5, np.random.default_rng(seed))
        assert blocks.live.all()
        assert np.take_along_axis(usable(), blocks.anchors, axis=1).all()
        assert all(len(set(row)) == 4 for row in blocks.anchors)
        np.put_along_axis(met, blocks.anchors, True, axis=1)
    assert np.array_equal(met, usable())


@pytest.mark.parametrize("anchors", [20, 24, 40])
def test_rows_with_too_few_usable_tokens_use_each_once(anchors):
    """Surplus blocks are not live, be there even more of them than the row has tokens; the arrays fit each other."""
    blocks = sample_blocks(packed(), anchors, BLOCK, 0.5, np.random.default_rng(0))
    assert blocks.anchors.shape == blocks.filled.shape == blocks.live.shape
    for row, (places, live) in enumerate(zip(blocks.anchors, blocks.live)):
        assert sorted(places[live]) == np.flatnonzero(usable()[row]).tolist()
    assert blocks.anchors.min() >= 0 and blocks.anchors.max() < LENGTH


@pytest.mark.parametrize(("share", "size"), [(0.0, 5), (0.3, 5), (1.0, 5), (1.0, 3), (1.0, 2)])
def test_the_asked_share_of_blocks_is_filled_and_keeps_a_slot_to_draft(share, size):
    """A filled block holds 1 to block_size - 2 true tokens, each number as likely; a block of 2 has room for none."""
    batch = jax.tree.map(lambda x: np.tile(x, (300, 1)), packed())
    filled = sample_blocks(batch, 4, size, share, np.random.default_rng(0)).filled.ravel()
    held = filled[filled > 0]
    want = share if size > 2 else 0.0
    assert abs(len(held) / len(filled) - want) <= (0.05 if 0 < want < 1 else 0)
    assert set(held) == (set(range(1, size - 1)) if want else set())
    if len(held):
        assert np.bincount(held)[1:].min() > 0.8 * len(held) / (size - 2)
