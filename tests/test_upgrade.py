"""Training from a head there is: its layout and weights are kept, and only what is asked for is trained."""

import dataclasses
import pathlib

import jax
import numpy as np
import optax
import pytest
from packed_case import BLOCK, TARGET, blocks_of, drawn_grad, drawn_loss, fresh_models, models, outputs, packed

from configs import parent_term
from jetspec_jax import Target, save_draft_head
from jetspec_jax.checkpoint import hf_tensors
from train.config import DistillConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.setup import new_head
from train.step import Objective, new_state, train_step
from train.upgrade import initial_layout, only, with_layout

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture
def saved(tmp_path):
    """A head without a term, on disk."""
    save_draft_head(tmp_path, models(True)[1])
    return str(tmp_path)


@pytest.mark.usefixtures("optax_promotes")
def test_an_upgrade_trains_the_term_and_changes_nothing_else(saved):
    """The start is the saved head, drafting as before; the loss falls, no other weight changes and none has optimizer
    state; U and E both learn."""
    config = DistillConfig(init_head=saved, train_only="parent", parent_rank=3, mixed_fill=0.0)
    model, _ = models(True)
    layout = initial_layout(config)
    assert layout == dataclasses.replace(models(True)[1].config, parent_rank=3)
    head = new_head(config, layout, Target(model, None, (), pathlib.Path("target")))
    before = jax.tree.map(np.array, hf_tensors(head))
    for name, weight in hf_tensors(models(True)[1]).items():
        np.testing.assert_array_equal(before[name], weight)
    assert not before["parent.unembed.weight"].any() and before["parent.embed.weight"].all()
    optimizer = only(make_optimizer(OptimizerConfig(learning_rate=0.05, warmup_steps=1), 20), layout, "parent")
    state = new_state(head, optimizer)
    assert (
        sum(x.size for x in jax.tree.leaves(state.optimizer)) < 2.1 * 2 * TARGET.vocab_size * 3
    )  # two moments of two tables
    _, start = drawn_loss(models(True)[1], model, packed(), outputs().taps, outputs().hidden, blocks_of(filled=False),
                          gamma=0.0, temperature=1.0)  # fmt: skip
    grads, _ = drawn_grad(head, model, packed(), outputs().taps, outputs().hidden, blocks_of(filled=False),
                          gamma=0.0, temperature=1.0)  # fmt: skip
    losses, norms = [], []
    for _ in range(20):
        options = {"optimizer": optimizer, "objective": Objective(train_only="parent")}
        state, metrics = train_step(state, model, packed(), blocks_of(filled=False), **options)
        losses.append(float(metrics.blocks.loss))
        norms.append(float(metrics.gradient_norm))
    np.testing.assert_allclose(norms[0], optax.tree.norm(grads.parent), rtol=1e-4)  # the frozen part has no gradient
    np.testing.assert_allclose(losses[0], start.loss, rtol=1e-5)
    assert losses[-1] < 0.9 * losses[0]
    for name, weight in hf_tensors(state.head).items():
        assert np.array_equal(weight, before[name]) == (not name.startswith("parent.")), name


def test_the_heads_own_layout_counts(saved):
    """Not the config's block size, layers and taps; all of it is trained when nothing is named."""
    config = DistillConfig(init_head=saved, block_size=16, num_hidden_layers=7, target_layer_ids=(5,), mixed_fill=0.5)
    layout = initial_layout(config)
    config = with_layout(config, layout)
    assert (config.block_size, config.num_hidden_layers, config.target_layer_ids) == (BLOCK, 2, (0, 1))
    assert (layout.parent_rank, layout.mixed_fill) == (0, 0.5)
    optimizer = make_optimizer(OptimizerConfig(), 1)
    assert only(optimizer, layout, "") is optimizer


def test_without_a_head_to_start_from_there_is_no_layout_and_nothing_to_freeze():
    assert initial_layout(DistillConfig()) is None
    with pytest.raises(ValueError, match=r"--config.train_only=parent freezes .* name one with --config.init_head"):
        initial_layout(DistillConfig(train_only="parent"))


def test_what_cannot_be_trained_is_refused_by_name(tmp_path, saved):
    """A part that the head lacks, a second term, true tokens in a bidirectional head's blocks, a head elsewhere."""
    with pytest.raises(ValueError, match=r"train_only=parent is no part of the head; parts are fc, hidden_norm, lay"):
        only(make_optimizer(OptimizerConfig(), 1), models(True)[1].config, "parent")
    with_term = fresh_models(True, layers=1, parent_rank=3)[1]
    save_draft_head(tmp_path / "term", with_term)
    with pytest.raises(ValueError, match=r"has a parent term of rank 3; --config.parent_rank=4 would start another"):
        initial_layout(DistillConfig(init_head=str(tmp_path / "term"), parent_rank=4))
    assert initial_layout(DistillConfig(init_head=str(tmp_path / "term"))).parent_rank == 3
    save_draft_head(tmp_path / "both", fresh_models(False, layers=1)[1])
    with pytest.raises(ValueError, match=r"--config\.mixed_fill needs a causal head"):
        initial_layout(DistillConfig(init_head=str(tmp_path / "both"), mixed_fill=0.5))
    with pytest.raises(ValueError, match="nowhere"):
        initial_layout(DistillConfig(init_head=str(tmp_path / "nowhere")))


def test_the_upgrades_config_trains_a_term_alone(saved):
    """Of the rank that it states, whatever head it is given."""
    config = dataclasses.replace(parent_term.get_config(), init_head=saved)
    layout = initial_layout(config)
    assert layout.parent_rank == 64
    only(make_optimizer(config.optimizer, config.steps), layout, config.train_only)
