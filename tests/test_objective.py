"""Training sees what decoding sees: the same block, context and teacher, and nothing else (pitfalls: train/serve skew).

One packed batch of two rows of two documents serves most tests, so that a few programs are compiled once.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train.objective
from jetspec_jax import Target, generate
from jetspec_jax.cache import KVCache
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from kernels.pallas.tree_attention import causal_mask
from train import distill, pretrain
from train.config import DistillConfig, OptimizerConfig, check_positive
from train.data import Packed, document, pad_batch
from train.objective import Blocks, distillation_loss, draft_blocks, sample_blocks, supervision
from train.optimizer import make_optimizer, schedule
from train.packed import target_forward

VOCAB, MASK, BLOCK = 40, 39, 5
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64,
}  # fmt: skip
TARGET = TargetConfig(**SIZES, num_hidden_layers=2)
HEAD = {"block_size": BLOCK, "num_target_layers": 2, "target_layer_ids": (0, 1), "mask_token_id": MASK}
LENGTH = 24
DOCUMENTS = (((9, 3), (12, 0)), ((14, 5), (10, 4)))  # rows of (tokens, prompt tokens); row 0 ends in padding
STARTS = ((0, 9), (0, 14))
# First response tokens (of a document that is all response too), neighbours closer than a block, last ones.
ANCHORS = np.array([[3, 5, 9, 17], [5, 12, 18, 22]], np.int32)
FILLED = np.array([[0, 2, 0, 3], [0, 1, 3, 0]], np.int32)


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly():
    """These tests spend their time compiling; programs optimised less mean the same and compile twice as fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def _optax_promotes():
    """Optax multiplies integers with floats."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def random_module(kind, config, seed):
    """A module with random matrices; its own initialisation takes seconds to compile."""
    rng = np.random.default_rng(seed)
    draw = lambda x: rng.normal(size=x.shape) / np.sqrt(x.shape[-1]) if x.ndim == 2 else np.ones(x.shape)  # noqa: E731
    shapes = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(draw(x).astype(np.float32)), shapes)


def fresh_models(causal, layers=2):
    config = HeadConfig(**SIZES, **HEAD, num_hidden_layers=layers, causal_head=causal)
    return random_module(TargetModel, TARGET, 0), random_module(DraftHead, config, 1)


models = functools.cache(fresh_models)
forward = jax.jit(target_forward, static_argnames="tap_ids")
drafted = jax.jit(draft_blocks)
logits_of = lambda target, hidden: np.asarray(jax.jit(TargetModel.logits)(target, hidden))  # noqa: E731
drawn_loss = jax.jit(distillation_loss, static_argnames=("gamma", "temperature"))
drawn_grad = jax.jit(jax.grad(distillation_loss, has_aux=True), static_argnames=("gamma", "temperature"))


@functools.cache
def packed():
    """The batch of `DOCUMENTS`, with random tokens."""
    rng = np.random.default_rng(0)
    shape = (len(DOCUMENTS), LENGTH)
    batch = Packed(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, bool)))
    for row, documents in enumerate(DOCUMENTS):
        for number, (start, (size, prompt)) in enumerate(zip(STARTS[row], documents), start=1):
            part = np.s_[row, start : start + size]
            batch.tokens[part] = rng.integers(0, MASK, size)
            batch.positions[part] = np.arange(size)
            batch.documents[part] = number
            batch.response[part] = np.arange(size) >= prompt
    return batch


def blocks_of(filled=True, live=True):
    return Blocks(ANCHORS, FILLED if filled else np.zeros_like(FILLED), np.full(ANCHORS.shape, live))


@functools.cache
def outputs():
    return forward(models(True)[0], packed(), tap_ids=HEAD["target_layer_ids"])


# Train and serve.


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
    lm_head = np.asarray(target.lm_head.kernel[...])
    np.testing.assert_allclose(have @ lm_head, want @ lm_head, atol=1e-5)
    for lone, (row, start, size) in zip(alone, places):
        np.testing.assert_allclose(np.array(outputs().hidden)[row, start : start + size], lone[:size], atol=1e-5)


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


# The objective.


@pytest.mark.parametrize("gamma", [0, 7])
def test_sources_and_weights_of_a_case_done_by_hand(gamma):
    """Rows: documents at 0-4 and 5-9, then padding; and one document that fills the row."""
    documents = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * 12], np.int32)
    batch = Packed(np.zeros_like(documents), np.zeros_like(documents), documents, documents > 0)
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
    assert taught.source.min() >= 0 and taught.source.max() < 12


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(("gamma", "temperature"), [(0.0, 1.0), (7.0, 2.0)])
def test_the_loss_is_the_forward_kl_and_the_metrics_count_agreeing_slots(gamma, temperature):
    """Against a float64 loop over slots: `T^2 sum(w KL(p_T || q_T)) / sum(w)`, and what the metrics' docs say."""
    target, head = models(True)
    batch, out, blocks = packed(), outputs(), blocks_of()
    loss, metrics = drawn_loss(head, target, batch, out.taps, out.hidden, blocks, gamma=gamma, temperature=temperature)
    student = logits_of(target, drafted(head, target, batch, out.taps, blocks))
    teacher = logits_of(target, out.hidden)
    total = weights = 0.0
    agreeing, lengths = [], []
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
            guess, lesson = student[row, index, slot], teacher[row, predicted - 1]
            p, q = log_softmax(lesson / temperature), log_softmax(guess / temperature)
            total += weight * np.sum(np.exp(p) * (p - q))
            weights += weight
            if slot > filled:
                agreeing.append(guess.argmax() == lesson.argmax())
                leading = leading and guess.argmax() == batch.tokens[row, predicted]
                committed += leading
        if not filled:
            lengths.append(committed)
    np.testing.assert_allclose(loss, temperature**2 * total / weights, rtol=1e-5)
    np.testing.assert_allclose(metrics.loss, loss)
    np.testing.assert_allclose(metrics.agreement, np.mean(agreeing), rtol=1e-6)
    np.testing.assert_allclose(metrics.accepted, np.mean(lengths), rtol=1e-6)


def test_a_student_that_is_its_teacher_has_no_loss(monkeypatch):
    """The loss is exactly 0, and every MASK slot agrees."""
    target, head = models(True)
    batch, out, blocks = packed(), outputs(), blocks_of()
    source = supervision(jax.tree.map(jnp.asarray, batch), blocks, BLOCK, 7.0).source
    monkeypatch.setattr(train.objective, "draft_blocks", lambda *_: out.hidden[jnp.arange(2)[:, None, None], source])
    loss = functools.partial(distillation_loss, gamma=7.0, temperature=2.0)
    _, metrics = jax.jit(lambda *arguments: loss(*arguments))(head, target, batch, out.taps, out.hidden, blocks)
    assert metrics.loss == 0
    assert metrics.agreement == 1


def test_a_batch_without_a_live_block_has_loss_zero_and_zero_gradients():
    """Nothing is divided by nothing: no NaN in the loss, the metrics or any gradient."""
    target, head = models(True)
    out = outputs()
    arguments = (head, target, packed(), out.taps, out.hidden)
    gradients, metrics = drawn_grad(*arguments, blocks_of(live=False), gamma=7.0, temperature=2.0)
    assert metrics.loss == 0
    assert np.isfinite(metrics).all()
    assert all(np.all(np.array(leaf) == 0) for leaf in jax.tree.leaves(gradients))
    gradients, metrics = drawn_grad(*arguments, blocks_of(), gamma=7.0, temperature=2.0)  # and live ones have some
    assert metrics.loss > 0
    assert all(np.isfinite(leaf).all() and np.any(np.array(leaf) != 0) for leaf in jax.tree.leaves(gradients))


# Sampled blocks.


def usable():
    """Response tokens with a successor in their document."""
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


# All of it together.


@pytest.mark.usefixtures("_optax_promotes")
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
    state = jax.jit(optimizer.init)(head)
    options = {"optimizer": optimizer, "gamma": 0.0, "temperature": 1.0}
    for _ in range(steps):
        head, state, metrics = distill.train_step(head, state, model, batch, blocks, **options)
    assert metrics.agreement == 1

    target = Target(model, None, (), pathlib.Path("overfitted"))
    [result] = generate(
        target, head, [tokens[:prompt]], budget=2 * BLOCK, tree_width=2, max_new_tokens=len(tokens) - prompt
    )
    assert result.token_ids == tokens[prompt:]
    assert result.accepted_lengths == [BLOCK] * rounds
    assert result.mean_accepted_length == BLOCK


# Optimizer, configs.


@pytest.mark.usefixtures("_optax_promotes")
@pytest.mark.parametrize(("warmup", "peak_at"), [(10, 10), (0, 0), (500, 50)])
def test_the_schedule_rises_to_the_peak_and_falls_to_its_final_share(warmup, peak_at):
    """Warmup takes half of a short run at most; every step is between the end points."""
    config = OptimizerConfig(warmup_steps=warmup, final_scale=0.1)
    rates = np.array(jax.jit(jax.vmap(schedule(config, 2.0, 100)))(np.arange(101)))
    assert rates[0] == (0 if peak_at else 2)
    np.testing.assert_allclose([rates[peak_at], rates[100]], [2, 0.2], rtol=1e-6)
    assert np.all(np.diff(rates[: peak_at + 1]) > 0) and np.all(np.diff(rates[peak_at:]) < 0)


@pytest.mark.usefixtures("_optax_promotes")
@pytest.mark.parametrize("index", [0, 1], ids=["target", "head"])
@pytest.mark.parametrize("matrix_rate", [0.0, 0.02])
def test_muon_has_the_layers_matrices_and_adam_all_else(index, matrix_rate):
    """Adam's first step is one size with the gradient's sign, about the learning rate; Muon's is a matrix with all
    singular values alike. Embeddings, lm_head and `fc` are Adam's, and without a matrix rate everything is."""
    module = models(True)[index]
    config = OptimizerConfig(learning_rate=1e-3, matrix_learning_rate=matrix_rate, warmup_steps=0, clip_norm=1e9)
    optimizer = make_optimizer(config, 100)
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), module)
    updates = jax.jit(lambda g, m: optimizer.update(g, optimizer.init(m), m)[0])(gradients, module)
    leaves = zip(jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(gradients), strict=True)
    kinds = {"adam": 0, "muon": 0}
    for (path, update), gradient in leaves:
        muon = matrix_rate > 0 and "layers[" in jax.tree_util.keystr(path) and update.ndim == 2
        kinds["muon" if muon else "adam"] += 1
        if muon:
            values = np.linalg.svd(np.asarray(update), compute_uv=False)
            assert values.min() > 0.5 * values.max()
        else:
            size = np.abs(update).max()
            assert 0.9e-3 < size < 1.6e-3  # Muon's own Adam takes Nesterov steps
            np.testing.assert_allclose(update, -size * np.sign(gradient), rtol=1e-2)
    assert kinds["adam"] > 0 and (kinds["muon"] > 0) == (matrix_rate > 0)


@pytest.mark.parametrize("value", [0, -1])
def test_a_field_that_must_be_positive_is_named(value):
    """The first wrong one is; others are not looked at."""
    config = DistillConfig(steps=3, anchors=value, length=value)
    check_positive(config, "steps", "batch_size")
    with pytest.raises(ValueError, match=rf"--config\.anchors must be above 0, got {value}"):
        check_positive(config, "steps", "anchors", "length")
