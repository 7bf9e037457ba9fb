"""Mixture of experts: all ways through the experts against a plain sum, whatever the router does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetspec_jax.config import TargetConfig
from jetspec_jax.moe import SparseMLP

CONFIG = TargetConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, architecture="Qwen3MoeForCausalLM", num_experts=5, num_experts_per_tok=2,
    moe_intermediate_size=6,
)  # fmt: skip
ROWS = 9


@pytest.fixture(scope="module")
def block():
    return SparseMLP(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)


def inputs(seed=1):
    return jax.random.normal(jax.random.key(seed), (ROWS, CONFIG.hidden_size))


def plain_sum(experts, x, weights, chosen):
    """One row and one expert at a time, in float64."""
    gate, up, down = (
        np.swapaxes(np.asarray(part.weight[...], np.float64), 1, 2)
        for part in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    out = np.zeros(x.shape)
    for r, row in enumerate(np.asarray(x, np.float64)):
        for weight, e in zip(np.asarray(weights)[r], np.asarray(chosen)[r]):
            inner = row @ gate[e]
            out[r] += weight * ((inner / (1 + np.exp(-inner)) * (row @ up[e])) @ down[e])
    return out


ROUTES = {
    "spread": np.stack([np.arange(ROWS) % 5, (np.arange(ROWS) + 2) % 5], 1),
    "all on two experts": np.tile([4, 1], (ROWS, 1)),
    "an expert without rows": np.stack([np.arange(ROWS) % 2, 3 + np.arange(ROWS) % 2], 1),
}


@pytest.mark.parametrize("way", ["by_group", "by_tile", "by_round"])
@pytest.mark.parametrize("route", ROUTES)
def test_experts_give_the_weighted_sum_of_the_chosen(block, way, route):
    """No row is dropped, however many share an expert, and experts without rows change nothing."""
    chosen, x = jnp.asarray(ROUTES[route], jnp.int32), inputs()
    weights = jax.random.uniform(jax.random.key(2), chosen.shape)
    out = getattr(block.experts, way)(x, weights, chosen)
    np.testing.assert_allclose(out, plain_sum(block.experts, x, weights, chosen), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["by_group", "by_tile", "by_round"])
def test_a_row_depends_on_itself_alone(block, way):
    """Neither other rows nor NaN and infinity in padding rows change a row by a bit."""
    x = inputs()
    spoilt = x.at[4:].set(jnp.stack([x[4] * 100, x[5] * jnp.nan, x[6] * jnp.inf, -x[7], x[8] * 0]))
    one, other = (getattr(block.experts, way)(rows, *block.route(rows)) for rows in (x, spoilt))
    assert np.isfinite(other[:4]).all()
    np.testing.assert_array_equal(one[:4], other[:4])


@pytest.mark.parametrize("way", ["by_group", "by_tile", "by_round"])
def test_experts_that_are_elsewhere_add_nothing(block, way):
    """As on a device that holds a part of them: choices of number `num_experts`, all of one row and some of others."""
    chosen, x = np.array(ROUTES["spread"], np.int32), inputs()
    chosen[0], chosen[3:6, 1] = CONFIG.num_experts, CONFIG.num_experts
    weights = jnp.where(chosen < CONFIG.num_experts, jax.random.uniform(jax.random.key(2), chosen.shape), 0.0)
    out = getattr(block.experts, way)(x, weights, jnp.asarray(chosen))
    here = np.minimum(chosen, CONFIG.num_experts - 1)
    np.testing.assert_allclose(out, plain_sum(block.experts, x, weights, here), rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
def test_weights_are_probabilities_over_all_experts(block, normalise):
    """The softmax is over all, in float32; what is kept sums to 1 only when it is normalised."""
    block.normalise = normalise
    x = inputs().astype(jnp.bfloat16)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), block)
    weights, chosen = half.route(x)
    logits = np.asarray(half.gate(x), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    kept = np.sort(chances, -1)[:, ::-1][:, :2]
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights, kept / kept.sum(-1, keepdims=True) if normalise else kept, rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(chances, np.asarray(chosen), -1), kept, rtol=1e-12)
    block.normalise = False


def test_blocks_of_tokens_keep_their_shape(block):
    """`[B, N, E]` in, `[B, N, E]` out, each token for itself."""
    x = inputs().reshape(3, 3, -1)
    weights, chosen = block.route(inputs())
    expected = plain_sum(block.experts, inputs(), weights, chosen).reshape(x.shape)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(block, x), expected, rtol=0, atol=1e-5)
