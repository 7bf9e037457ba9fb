"""Shapes of small checkpoints, and ways to spoil them and to look at them: what the tests of this folder share."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetspec_jax.checkpoint import CheckpointError
from jetspec_jax.config import HeadConfig, TargetConfig

SIZES = {
    "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4,
}  # fmt: skip
TARGET = TargetConfig(**SIZES, num_hidden_layers=3)
HEAD = HeadConfig(
    **SIZES, num_hidden_layers=2, block_size=5, num_target_layers=3, target_layer_ids=(0, 2), mask_token_id=10,
    causal_head=True,
)  # fmt: skip
MOE = dataclasses.replace(
    TARGET, architecture="Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=(1,),
)  # fmt: skip
LLAMA = dataclasses.replace(TARGET, architecture="LlamaForCausalLM", attention_bias=True)
INDEX = "model.safetensors.index.json"


def filled(kind, config, dtype=jnp.float32):
    """A module with random parameters of a size at which every field matters."""
    rng = np.random.default_rng(0)
    abstract = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape).astype(np.float32), dtype), abstract)


def edit(directory, **fields):
    """Sets fields of config.json; None removes one."""
    path = directory / "config.json"
    data = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def edit_layout(directory, **fields):
    """Sets fields of the head's dflash_config; None removes one. vLLM's mirror of causal_head goes with it."""
    mirror = {"causal": fields["causal_head"]} if "causal_head" in fields else {}
    layout = {**json.loads((directory / "config.json").read_text())["dflash_config"], **mirror, **fields}
    edit(directory, dflash_config={k: v for k, v in layout.items() if v is not None})


def same_bytes(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (value.dtype, value.shape) == (right[name].dtype, right[name].shape)
        assert np.asarray(value).tobytes() == np.asarray(right[name]).tobytes()


def refused(load, directory, *parts):
    """Loading fails with one CheckpointError that names all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        load(directory, None)
    for part in parts:
        assert str(part) in str(caught.value)
    return str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
