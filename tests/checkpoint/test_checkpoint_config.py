"""config.json: every field counts or is refused by name, and nothing is guessed."""

import dataclasses
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_case import HEAD, LLAMA, MOE, SIZES, TARGET, YARN, edit, edit_layout, filled, refused

from jetspec_jax.cache import KVCache
from jetspec_jax.checkpoint import (
    CheckpointError,
    head_config,
    load_head_model,
    load_target_model,
    save_target,
)
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.rope import rope_at
from jetspec_jax.rope_scaling import Llama3Scaling, YarnScaling
from jetspec_jax.target import TargetModel
from kernels.pallas.tree_attention import causal_mask


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_the_sizes_of_experts_are_required_where_there_are_experts_and_unknown_elsewhere(tmp_path, target, field):
    """No default is guessed, and a dense model has no such field."""
    save_target(tmp_path / "moe", filled(TargetModel, MOE))
    edit(tmp_path / "moe", **{field: None})
    refused(load_target_model, tmp_path / "moe", "missing fields", field)
    edit(target, **{field: 2})
    refused(load_target_model, target, "unsupported fields", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_experts", 0), ("num_experts_per_tok", 5), ("norm_topk_prob", 1), ("decoder_sparse_step", 0),
     ("mlp_only_layers", 1), ("mlp_only_layers", [-1])],
)  # fmt: skip
def test_impossible_experts_are_refused_by_name(tmp_path, field, value):
    """Counts of zero, more experts a token than there are, and lists that are none."""
    save_target(tmp_path, filled(TargetModel, MOE))
    edit(tmp_path, **{field: value})
    refused(load_target_model, tmp_path, tmp_path / "config.json", field)


def test_architectures_have_transformers_defaults_for_what_old_files_leave_out(tmp_path):
    """head_dim by the hidden size except in dense Qwen3, one kv head a head in Llama, and a rope base of 10000."""
    plain = dataclasses.replace(LLAMA, head_dim=2, num_key_value_heads=4, attention_bias=False, rope_theta=10_000.0)
    for config, dropped in (
        (plain, ["head_dim", "num_key_value_heads"]),
        (dataclasses.replace(MOE, head_dim=2), ["head_dim"]),
    ):
        directory = tmp_path / config.architecture
        save_target(directory, filled(TargetModel, config))
        edit(directory, **dict.fromkeys([*dropped, "rope_theta"]))
        assert load_target_model(directory, None).config == dataclasses.replace(config, rope_theta=10_000.0)
    directory = tmp_path / MOE.architecture
    edit(directory, num_experts=None, num_local_experts=4)
    assert load_target_model(directory, None).config.num_experts == 4


UNSUPPORTED = {
    "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6, "factor": 4.0},
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "quantization_config": {"quant_method": "fp8"},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 30.0,  # unknown
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_and_unknown_fields_are_refused_by_name(target, head, field):
    """No field of a config.json is silently ignored, in targets and in heads."""
    for directory, load in ((target, load_target_model), (head, load_head_model)):
        edit(directory, **{field: UNSUPPORTED[field]})
        refused(load, directory, directory / "config.json", field)


def test_all_refused_and_missing_fields_are_in_one_error(target):
    """Not the first one only."""
    edit(target, mlp_bias=True, rope_scaling={"type": "linear", "factor": 2.0}, hidden_size=None, vocab_size=None)
    refused(load_target_model, target, "mlp_bias=True", "linear", "hidden_size", "vocab_size")


def test_quantized_checkpoints_are_told_that_no_quantization_is_supported(target):
    """The field is not only named: the reader learns which kinds there are."""
    edit(target, quantization_config={"quant_method": "awq"})
    refused(load_target_model, target, "quantization_config", "awq", "no quantization is supported")


def test_heads_have_no_attention_bias(head):
    """The published layout has none, unlike targets."""
    edit(head, attention_bias=True)
    refused(load_head_model, head, head / "config.json", "attention_bias=True")


@pytest.mark.parametrize(
    "scaling",
    [YARN | {"factor": None}, YARN | {"factor": "4"}, YARN | {"factor": 0}, YARN | {"truncate": 1},
     YARN | {"beta_fast": -1}, YARN | {"mscale": True}, YARN | {"short_factor": [1.0]},
     YARN | {"original_max_position_embeddings": 0.5}, YARN | {"partial_rotary_factor": 0.5},
     {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
     {"rope_type": "default", "factor": 2.0}, {"factor": 2.0}, {"rope_type": ["yarn"]}, "yarn"],
)  # fmt: skip
def test_impossible_rope_scalings_are_refused(target, head, scaling):
    """Missing, unknown and impossible values of it, in targets and in heads."""
    for directory, load in ((target, load_target_model), (head, load_head_model)):
        edit(directory, rope_scaling=scaling)
        refused(load, directory, directory / "config.json", "rope_scaling=")


def test_rope_scaling_is_read_wherever_it_stands(target):
    """Beside rope_theta (also under the old key `type`) or with it in rope_parameters; not in both, if they differ."""
    expected = YarnScaling(4.0, 16)
    edit(target, rope_scaling=YARN)
    assert load_target_model(target, None).config.rope_scaling == expected
    edit(target, rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=16)
    assert load_target_model(target, None).config.rope_scaling == expected
    edit(target, rope_theta=None, rope_scaling=None, rope_parameters=YARN | {"rope_theta": 500.0})
    config = load_target_model(target, None).config
    assert (config.rope_scaling, config.rope_theta) == (expected, 500.0)
    edit(target, rope_scaling=YARN | {"factor": 2.0})
    refused(load_target_model, target, "rope_scaling", "rope_parameters")


@pytest.mark.parametrize("field", [*SIZES, "num_hidden_layers"])
def test_a_missing_size_is_refused_by_name(target, field):
    """Sizes have no defaults, except head_dim, which is transformers' 128 and does not fit here."""
    edit(target, **{field: None})
    if field == "head_dim":
        refused(load_target_model, target, "self_attn.q_proj.weight has shape (16, 8), expected (512, 8)")
    else:
        refused(load_target_model, target, target / "config.json", field)


@pytest.mark.parametrize("field", ["target_layer_ids", "mask_token_id", "block_size", "num_target_layers"])
def test_a_head_without_a_layout_key_is_refused_by_name(head, field):
    """The layout decides what slots mean; it is not guessed."""
    edit(head, **{field: None})
    edit_layout(head, **{field: None})
    refused(load_head_model, head, head / "config.json", field)


@pytest.mark.parametrize(
    ("field", "value"), [("target_layer_ids", [0, 3]), ("target_layer_ids", []), ("mask_token_id", 11),
                         ("mask_token_id", -1), ("draft_shift", True), ("parent_rank", -1), ("parent_rank", "64")]
)  # fmt: skip
def test_an_impossible_or_unknown_layout_is_refused_by_name(head, field, value):
    """Layers that the target lacks, a mask outside the vocabulary, no rank, a layout that is not understood."""
    edit_layout(head, **{field: value})
    refused(load_head_model, head, head / "config.json", field)


def test_a_block_needs_a_slot_after_its_anchor(head):
    """block_size 1 drafts nothing."""
    edit(head, block_size=1)
    refused(load_head_model, head, head / "config.json", "block_size")


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "8"), ("num_hidden_layers", 3.0), ("num_key_value_heads", 3), ("head_dim", 3),
     ("num_attention_heads", 0), ("vocab_size", -1)],
)  # fmt: skip
def test_impossible_sizes_are_refused_by_name(target, field, value):
    """Strings, fractions, zero, and head counts or dimensions that do not divide."""
    edit(target, **{field: value})
    refused(load_target_model, target, target / "config.json", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_size", "4"), ("num_target_layers", "3"), ("mask_token_id", "10"), ("target_layer_ids", ["0", "2"]),
     ("target_layer_ids", 2), ("causal_head", "false"), ("rms_norm_eps", "1e-6"), ("rope_theta", "1e6")],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_by_name(head, field, value):
    """A JSON string is no number and no truth value."""
    (edit_layout if field in ("mask_token_id", "target_layer_ids", "causal_head") else edit)(head, **{field: value})
    refused(load_head_model, head, head / "config.json", field)


@pytest.mark.parametrize("names", [["Qwen3NextForCausalLM"], ["MistralForCausalLM"], None])
def test_other_architectures_are_refused(target, head, names):
    """Both loaders name what they found and what they expect."""
    edit(target, architectures=names)
    refused(load_target_model, target, target / "config.json", "architecture", *(names or ()), "Qwen3ForCausalLM")
    edit(head, architectures=names)
    refused(load_head_model, head, head / "config.json", "architecture", *(names or ()), "DFlashDraftModel")


def test_rope_parameters_of_newer_configs_are_the_same_as_rope_theta(saved, target):
    """transformers 5 writes rope_theta inside rope_parameters."""
    edit(target, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 12345.0})
    assert load_target_model(target, None).config == dataclasses.replace(TARGET, rope_theta=12345.0)


def target_forward(directory):
    """A target, its logits for a prompt, and the outputs of its layers."""
    model = load_target_model(directory, None)
    tokens, zero = jnp.int32([[1, 2, 3, 4, 5]]), jnp.int32([0])
    cache = KVCache.zeros(model.config, 1, 5, jnp.float32)
    out = model(tokens, jnp.arange(5, dtype=jnp.int32)[None], cache, zero, causal_mask(5), (0, 1, 2))
    return model, np.asarray(model.logits(out.hidden)), np.split(np.asarray(out.taps), 3, axis=-1)


def draft_logits(model, layers, directory):
    """Draft logits after that prompt, as the loop computes them."""
    head = load_head_model(directory, None)
    taps = jnp.asarray(np.concatenate([layers[i] for i in head.tap_ids], -1))
    count = jnp.int32([5])
    context = head.extend_context(head.new_context(1, 5, jnp.float32), taps, jnp.int32([0]), count)
    hidden = head(model.embed(head.block_tokens(jnp.int32([6]))), context, count)
    return np.asarray(model.logits(hidden))


def test_no_field_of_a_target_is_dead(saved, target):
    """Every field that says how to compute changes what is computed; the unchanged file gives it back."""
    _, base, _ = target_forward(saved / "target")
    for fields in ({"rope_theta": 100.0}, {"rms_norm_eps": 0.1}, {"rope_scaling": YARN}):
        edit(target, **fields)
        assert np.abs(target_forward(target)[1] - base).max() > 1e-3, fields
        shutil.copytree(saved / "target", target, dirs_exist_ok=True)
    np.testing.assert_array_equal(target_forward(target)[1], base)


def test_no_field_of_experts_is_dead(tmp_path):
    """Each way to route changes what is computed."""
    config = dataclasses.replace(MOE, moe_intermediate_size=12)
    save_target(tmp_path, filled(TargetModel, config))
    base = target_forward(tmp_path)[1]
    for fields in ({"norm_topk_prob": False}, {"num_experts_per_tok": 1}):
        edit(tmp_path, **fields)
        assert np.abs(target_forward(tmp_path)[1] - base).max() > 1e-3, fields
        edit(tmp_path, norm_topk_prob=True, num_experts_per_tok=2)
    np.testing.assert_array_equal(target_forward(tmp_path)[1], base)
    edit(tmp_path, mlp_only_layers=[])
    refused(
        load_target_model, tmp_path, "unexpected model.layers.1.mlp.up_proj.weight", "missing model.layers.1.mlp.gate"
    )
    edit(tmp_path, mlp_only_layers=[1], decoder_sparse_step=2)
    refused(load_target_model, tmp_path, "missing model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("fields", [
    {"attention_factor": 2.0}, {"beta_fast": 2.0}, {"beta_slow": 0.25}, {"factor": 8.0}, {"truncate": False},
    {"original_max_position_embeddings": 8}, {"mscale": 2.0, "mscale_all_dim": 0.5},
])  # fmt: skip
def test_no_field_of_yarn_is_dead(fields):
    """Each changes the angles of a position, or what their cosines are scaled by."""
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=64)
    one = dataclasses.replace(TARGET, head_dim=32, rope_theta=100.0, rope_scaling=scaling)
    other = dataclasses.replace(one, rope_scaling=dataclasses.replace(scaling, **fields))
    angles, changed = (rope_at(jnp.int32([[1, 7]]), config).first for config in (one, other))
    assert np.abs(angles - changed).max() > 1e-3


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_no_field_of_llama3_scaling_is_dead(field):
    """Each changes the angles of a position."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 64)
    one = dataclasses.replace(TARGET, head_dim=32, rope_theta=100.0, rope_scaling=scaling)
    double = dataclasses.replace(scaling, **{field: 2 * getattr(scaling, field)})
    other = dataclasses.replace(one, rope_scaling=double)
    angles, changed = (rope_at(jnp.int32([[1, 7]]), config).first for config in (one, other))
    assert np.abs(angles - changed).max() > 1e-3


def test_no_field_of_a_head_is_dead(saved, head):
    """Every field that says how to compute changes what is drafted; the unchanged file gives it back."""
    model, _, layers = target_forward(saved / "target")
    base = draft_logits(model, layers, saved / "head")
    for setter, fields in (
        (edit, {"rope_theta": 100.0}),
        (edit, {"rms_norm_eps": 0.1}),
        (edit, {"rope_scaling": YARN}),
        (edit_layout, {"causal_head": False}),
        (edit_layout, {"target_layer_ids": [0, 1]}),
        (edit_layout, {"target_layer_ids": [2, 0]}),
        (edit_layout, {"mask_token_id": 9}),
    ):
        setter(head, **fields)
        assert np.abs(draft_logits(model, layers, head) - base).max() > 1e-3, fields
        shutil.copytree(saved / "head", head, dirs_exist_ok=True)
    np.testing.assert_array_equal(draft_logits(model, layers, head), base)
    edit(head, block_size=3)
    assert load_head_model(head, None).block_tokens(jnp.int32([6])).tolist() == [[6, 10, 10]]


@pytest.mark.parametrize("own", [True, False, None])
@pytest.mark.parametrize("mirror", [True, False, None])
def test_a_head_is_causal_where_it_says_so_under_either_name(head, own, mirror):
    """vLLM's `causal` alone is enough, and without either a head is bidirectional; two that disagree are refused."""
    edit_layout(head, causal_head=own, causal=mirror)
    if None not in (own, mirror) and own != mirror:
        with pytest.raises(CheckpointError, match=f"dflash_config says causal={mirror} and causal_head={own}"):
            head_config(head)
    else:
        assert head_config(head) == dataclasses.replace(HEAD, causal_head=bool(own or mirror))


def test_the_config_of_a_published_dflash_head_is_read():
    """As z-lab writes it: no causality, fields of Qwen3 that say nothing new."""
    config = HeadConfig.from_hf({
        "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False, "attention_dropout": 0.0, "block_size": 16, "bos_token_id": 151643,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960, "max_window_layers": 5, "model_type": "qwen3", "num_attention_heads": 32,
        "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "transformers_version": "4.57.3", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    })  # fmt: skip
    assert not config.causal_head
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))


# What well-known checkpoints hold beside the architecture: SmolLM2, transformers 4.48 and Qwen3-Coder.


KNOWN = {
    "is_llama_config": True, "rope_interleaved": False, "_attn_implementation_autoset": True,
    "transformers.js_config": {"dtype": "q4"}, "qkv_bias": False, "shared_expert_intermediate_size": 0,
}  # fmt: skip


@pytest.mark.parametrize("config", [TARGET, MOE, LLAMA])
def test_fields_of_known_checkpoints_that_change_nothing_are_read_past(config):
    """Those that could change something at the one value that is understood."""
    data = {**config.to_hf(), **KNOWN, "use_qk_norm": config is not LLAMA}
    assert TargetConfig.from_hf(data) == config
    for field, value in {"rope_interleaved": True, "qkv_bias": True, "shared_expert_intermediate_size": 8,
                         "use_qk_norm": config is LLAMA}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"unsupported fields: {field}={value}"):
            TargetConfig.from_hf({**data, field: value})
