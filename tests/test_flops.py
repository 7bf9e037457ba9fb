"""Model FLOPs of a training step, against XLA's own count of the compiled step and by how they grow."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel
from train.data import Packed
from train.flops import step_flops
from train.objective import Blocks
from train.step import Objective, new_state, train_step

SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
TARGET = TargetConfig(**SIZES, num_hidden_layers=3)
HEAD = HeadConfig(
    **SIZES, num_hidden_layers=2, block_size=8, num_target_layers=3, target_layer_ids=(0, 1), mask_token_id=1,
    causal_head=True, mixed_fill=1.0,
)  # fmt: skip
BATCH = {"rows": 2, "length": 192, "anchors": 24}


def counted_by_xla(rows, length, anchors):
    """FLOPs of the step before optimisation, with all of a row's slots in one chunk: a loop's body counts once."""
    shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    optimizer = optax.sgd(1e-3)
    target = jax.eval_shape(lambda: TargetModel(TARGET, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(lambda: new_state(DraftHead(HEAD, rngs=nnx.Rngs(0)), optimizer))
    batch = Packed(*[shape(rows, length)] * 3, response=shape(rows, length, dtype=jnp.bool_))
    blocks = Blocks(shape(rows, anchors), shape(rows, anchors), shape(rows, anchors, dtype=jnp.bool_))
    objective = Objective(logit_chunk=anchors * HEAD.block_size)
    lowered = train_step.trace(state, target, batch, blocks, optimizer=optimizer, objective=objective).lower()
    return lowered.cost_analysis()["flops"]


@pytest.mark.parametrize("changed", [{}, {"length": 32}, {"anchors": 2}], ids=["as it is", "short rows", "few anchors"])
def test_model_flops_are_most_of_what_xla_counts(changed):
    """XLA counts what masks hide (half of attention's pairs) and elementwise work too, here 2% to 6%; each of the
    three sizes gives another part of the step the largest share."""
    sizes = BATCH | changed
    ratio = counted_by_xla(**sizes) / step_flops(TARGET, HEAD, **sizes)
    assert 1.0 < ratio < 1.07


def test_of_experts_only_the_chosen_ones_count():
    """As a dense MLP as wide as them together, and the router's product."""
    moe = dataclasses.replace(
        TARGET, architecture="Qwen3MoeForCausalLM", num_experts=16, num_experts_per_tok=3, moe_intermediate_size=256
    )
    router = 2 * BATCH["rows"] * BATCH["length"] * 3 * TARGET.hidden_size * 16
    assert step_flops(moe, HEAD, **BATCH) == step_flops(TARGET, HEAD, **BATCH) + router


def test_unfilled_blocks_have_one_slot_less_with_a_loss():
    """Their anchor learns nothing, so that lm_head's three products leave it out."""
    unfilled = step_flops(TARGET, dataclasses.replace(HEAD, mixed_fill=0.0), **BATCH)
    words = 6 * BATCH["rows"] * BATCH["anchors"] * TARGET.hidden_size * TARGET.vocab_size
    assert step_flops(TARGET, HEAD, **BATCH) - unfilled == words


def test_a_parent_terms_rank_counts_as_features_of_lm_head():
    """Its product with the vocabulary, and the gradients of both its tables."""
    with_term = step_flops(TARGET, dataclasses.replace(HEAD, parent_rank=32), **BATCH)
    words = 6 * BATCH["rows"] * BATCH["anchors"] * HEAD.block_size * 32 * TARGET.vocab_size
    assert with_term - step_flops(TARGET, HEAD, **BATCH) == words
