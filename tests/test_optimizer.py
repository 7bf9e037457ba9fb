"""Learning rates, which weights Muon has, and checks of configs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_case import models

from train.config import DistillConfig, OptimizerConfig, check_positive
from train.optimizer import make_optimizer, schedule

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.mark.usefixtures("optax_promotes")
@pytest.mark.parametrize(("warmup", "peak_at"), [(10, 10), (0, 0), (500, 50)])
def test_the_schedule_rises_to_the_peak_and_falls_to_its_final_share(warmup, peak_at):
    """Warmup takes half of a short run at most; every step is between the end points."""
    config = OptimizerConfig(warmup_steps=warmup, final_scale=0.1)
    rates = np.array(jax.jit(jax.vmap(schedule(config, 2.0, 100)))(np.arange(101)))
    assert rates[0] == (0 if peak_at else 2)
    np.testing.assert_allclose([rates[peak_at], rates[100]], [2, 0.2], rtol=1e-6)
    assert np.all(np.diff(rates[: peak_at + 1]) > 0) and np.all(np.diff(rates[peak_at:]) < 0)


@pytest.mark.usefixtures("optax_promotes")
@pytest.mark.parametrize("index", [0, 1], ids=["target", "head"])
@pytest.mark.parametrize("matrix_rate", [0.0, 0.02])
def test_muon_has_the_layers_matrices_and_adam_all_else(index, matrix_rate):
    """Adam's first step is one size with the gradient's sign, about the learning rate. Muon's is a matrix with singular
    values about the rate times sqrt(out / in), or times 1 where it is wider than tall. Embeddings, lm_head and `fc` are
    Adam's, and without a matrix rate everything is."""
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
            rows, columns = update.shape
            expected = matrix_rate * max(1, rows / columns) ** 0.5
            assert 0.5 * expected < values.min() and values.max() < 1.5 * expected
            assert 0.8 * expected < values.mean() < 1.1 * expected
        else:
            size = np.abs(update).max()
            assert 0.9e-3 < size < 1.6e-3  # Muon's own Adam takes Nesterov steps
            np.testing.assert_allclose(update, -size * np.sign(gradient), rtol=1e-2)
    assert kinds["adam"] > 0 and (kinds["muon"] > 0) == (matrix_rate > 0)


@pytest.mark.usefixtures("optax_promotes")
@pytest.mark.parametrize("matrix_rate", [0.0, 0.02])
def test_weight_decay_shrinks_every_weight(matrix_rate):
    """By its optimizer's rate, Adam's share and Muon's alike; seen without a gradient."""
    head = models(True)[1]
    config = OptimizerConfig(learning_rate=1e-3, matrix_learning_rate=matrix_rate, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(config, 100)
    updates = jax.jit(lambda m: optimizer.update(jax.tree.map(jnp.zeros_like, m), optimizer.init(m), m)[0])(head)
    pairs = zip(jax.tree_util.tree_flatten_with_path(updates)[0], jax.tree.leaves(head), strict=True)
    for (path, update), weight in pairs:
        muon = matrix_rate > 0 and "layers[" in jax.tree_util.keystr(path) and update.ndim == 2
        rate = matrix_rate if muon else 1e-3
        np.testing.assert_allclose(update, -0.5 * rate * weight, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("value", [0, -1])
def test_a_field_that_must_be_positive_is_named(value):
    """The first wrong one is; others are not looked at."""
    config = DistillConfig(steps=3, anchors=value, length=value)
    check_positive(config, "steps", "batch_size")
    with pytest.raises(ValueError, match=rf"--config\.anchors must be above 0, got {value}"):
        check_positive(config, "steps", "anchors", "length")
