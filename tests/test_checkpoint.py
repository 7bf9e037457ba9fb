"""Checkpoints: what is written is read back to the byte, and what cannot be used is refused by file and field."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.flax import load_file, save_file

from jetspec_jax.cache import KVCache
from jetspec_jax.checkpoint import (
    CheckpointError,
    eos_ids,
    head_config,
    hf_tensors,
    load_head_model,
    load_target_model,
    save_draft_head,
    save_target,
)
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.rope import rope_at
from jetspec_jax.rope_scaling import Llama3Scaling, YarnScaling
from jetspec_jax.target import TargetModel
from kernels.pallas.tree_attention import causal_mask

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One target and one head on disk."""
    root = tmp_path_factory.mktemp("saved")
    save_target(root / "target", filled(TargetModel, TARGET))
    save_draft_head(root / "head", filled(DraftHead, HEAD))
    return root


@pytest.fixture
def target(saved, tmp_path):
    """A copy of the target's checkpoint, to spoil."""
    return shutil.copytree(saved / "target", tmp_path / "target")


@pytest.fixture
def head(saved, tmp_path):
    """A copy of the head's checkpoint, to spoil."""
    return shutil.copytree(saved / "head", tmp_path / "head")


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_target_is_read_back_to_the_byte(tmp_path, tied, dtype):
    """Config, tensors and dtype; the lm_head is stored exactly when it is not the embedding."""
    model = filled(TargetModel, dataclasses.replace(TARGET, tie_word_embeddings=tied, rope_theta=5e5), dtype)
    save_target(tmp_path, model, eos_token_ids=(3, 5))
    loaded = load_target_model(tmp_path, None)
    assert loaded.config == model.config
    same_bytes(hf_tensors(model), hf_tensors(loaded))
    stored = load_file(tmp_path / "model.safetensors")
    same_bytes(hf_tensors(model), stored)
    assert ("lm_head.weight" in stored) is not tied
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.2.self_attn.k_norm.weight"} <= set(stored)
    assert eos_ids(tmp_path) == (3, 5)


@pytest.mark.parametrize("config", [MOE, LLAMA, dataclasses.replace(TARGET, attention_bias=True)])
@pytest.mark.parametrize(
    "scaling", [None, YarnScaling(4.0, 16, beta_fast=8.0, truncate=False), Llama3Scaling(8.0, 1.0, 4.0, 16)]
)
def test_a_saved_target_of_any_architecture_is_read_back_to_the_byte(tmp_path, config, scaling):
    """Config and tensors, also of experts, which are stored one by one under the names that transformers writes."""
    model = filled(TargetModel, dataclasses.replace(config, rope_scaling=scaling))
    save_target(tmp_path, model)
    loaded = load_target_model(tmp_path, None)
    assert loaded.config == model.config
    stored = load_file(tmp_path / "model.safetensors")
    same_bytes(hf_tensors(loaded), stored)
    same_bytes(hf_tensors(model), stored)
    first = "model.layers.0."
    assert (f"{first}self_attn.o_proj.bias" in stored) is config.attention_bias
    assert (f"{first}self_attn.q_norm.weight" in stored) is (config is not LLAMA)
    if config is MOE:
        assert stored[f"{first}mlp.gate.weight"].shape == (4, 8)
        assert stored[f"{first}mlp.experts.3.down_proj.weight"].shape == (8, 6)
        assert stored["model.layers.1.mlp.down_proj.weight"].shape == (8, 12)
        np.testing.assert_array_equal(
            stored[f"{first}mlp.experts.3.up_proj.weight"],
            model.model.layers[0].mlp.experts.up_proj.weight[...][3],
        )


def test_experts_are_assembled_across_shards_and_missed_by_name(tmp_path):
    """The shards split every layer's experts; one that is missing is named."""
    save_target(tmp_path, filled(TargetModel, MOE))
    whole = hf_tensors(load_target_model(tmp_path, None))
    shard(tmp_path)
    same_bytes(whole, hf_tensors(load_target_model(tmp_path, None)))
    path = tmp_path / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    gone = [name for name in tensors if ".experts.2." in name]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, path)
    assert gone
    refused(load_target_model, tmp_path, *gone)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_saved_head_is_read_back_to_the_byte(tmp_path, causal, dtype):
    """Config with every layout field, tensors and dtype, in the published layout."""
    config = dataclasses.replace(HEAD, causal_head=causal, mixed_fill=0.25, enable_thinking=not causal)
    model = filled(DraftHead, config, dtype)
    save_draft_head(tmp_path, model)
    loaded = load_head_model(tmp_path, None)
    assert loaded.config == config
    same_bytes(hf_tensors(model), hf_tensors(loaded))
    stored = load_file(tmp_path / "model.safetensors")
    same_bytes(hf_tensors(model), stored)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.mlp.down_proj.weight"} <= set(stored)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["dflash_config"]["causal_head"] is written["dflash_config"]["causal"] is causal


def test_a_head_with_a_parent_term_is_read_back_with_it_and_others_are_written_as_published(saved, tmp_path):
    """The rank is stamped, the term's two tables are tensors of the file; a head without has neither."""
    save_draft_head(tmp_path, model := filled(DraftHead, dataclasses.replace(HEAD, parent_rank=3)))
    loaded = load_head_model(tmp_path, None)
    assert loaded.config == model.config
    same_bytes(hf_tensors(model), hf_tensors(loaded))
    shapes = {name: leaf.shape for name, leaf in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["parent.embed.weight"] == shapes["parent.unembed.weight"] == (11, 3)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["parent_rank"] == 3
    plain = json.loads((saved / "head" / "config.json").read_text())
    assert "parent_rank" not in plain["dflash_config"]
    assert not any("parent" in name for name in load_file(saved / "head" / "model.safetensors"))


def test_a_parent_term_that_the_config_and_the_file_do_not_agree_on_is_refused(head, tmp_path):
    """Tables that are missing, not announced or of another rank; all are named."""
    edit_layout(head, parent_rank=3)
    refused(load_head_model, head, "missing parent.embed.weight (11, 3)", "missing parent.unembed.weight (11, 3)")
    save_draft_head(tmp_path / "term", filled(DraftHead, dataclasses.replace(HEAD, parent_rank=3)))
    edit_layout(tmp_path / "term", parent_rank=2)
    refused(load_head_model, tmp_path / "term", "parent.embed.weight has shape (11, 3), expected (11, 2)")
    edit_layout(tmp_path / "term", parent_rank=None)
    refused(load_head_model, tmp_path / "term", "unexpected parent.embed.weight", "unexpected parent.unembed.weight")


def test_the_requested_dtype_wins_over_the_files(target):
    """`dtype` None is config.json's, which `save_target` makes the file's; any other is converted to."""
    leaves = hf_tensors(load_target_model(target, jnp.bfloat16)).values()
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_without_a_requested_dtype_the_configs_holds_for_every_tensor(target, field):
    """As in transformers, under either name; here the norms are stored in float32 and the matrices are not."""
    tensors = {
        n: x.astype(jnp.bfloat16) if x.ndim > 1 else x for n, x in load_file(target / "model.safetensors").items()
    }
    save_file(tensors, target / "model.safetensors")
    edit(target, **{"dtype": None, field: "bfloat16"})
    leaves = hf_tensors(load_target_model(target, None)).values()
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    edit(target, **{field: "int8"})
    refused(load_target_model, target, target / "config.json", "dtype 'int8' is none of float32", "give dtype=")


def test_tensors_of_several_dtypes_are_refused_where_nothing_says_which(target):
    """Mixed, they would fail while decoding; of one dtype, they keep it."""
    edit(target, dtype=None)
    tensors = load_file(target / "model.safetensors")
    same_bytes(tensors, hf_tensors(load_target_model(target, None)))
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name].astype(jnp.bfloat16)}, target / "model.safetensors")
    refused(load_target_model, target, target, "tensors are BF16, F32", "give dtype=")
    assert load_target_model(target, jnp.dtype("float32")).model.embed_tokens.weight.dtype == jnp.float32


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], {"id": 2}])
def test_end_of_sequence_ids_that_are_none_are_refused_by_file(target, file, value):
    """A string, a fraction, a truth value, also inside a list."""
    (target / file).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{file}: eos_token_id must be a token id or a list of them, got"):
        eos_ids(target)


def shard(directory):
    """Splits model.safetensors in two, with an index; returns the index's data."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index))
    return index


def test_shards_with_an_index_load_like_one_file(saved, target):
    """The same tensors, wherever they lie."""
    shard(target)
    whole, sharded = (hf_tensors(load_target_model(x, None)) for x in (saved / "target", target))
    same_bytes(whole, sharded)


def test_a_model_saved_over_shards_is_the_one_that_loads(target):
    """Their index stays behind; the single file wins, as in transformers."""
    shard(target)
    model = jax.tree.map(lambda x: x + 1, load_target_model(target, None))
    save_target(target, model)
    assert (target / INDEX).exists()
    same_bytes(hf_tensors(model), hf_tensors(load_target_model(target, None)))


def refused(load, directory, *parts):
    """Loading fails with one CheckpointError that names all of `parts`."""
    with pytest.raises(CheckpointError) as caught:
        load(directory, None)
    for part in parts:
        assert str(part) in str(caught.value)
    return str(caught.value)


def test_missing_unexpected_and_misshapen_tensors_are_all_listed_at_once(target):
    """One error: two missing, two unexpected, two of a wrong shape, each by name."""
    tensors = load_file(target / "model.safetensors")
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors |= {"model.layers.3.mlp.up_proj.weight": jnp.zeros((12, 8)), "extra": jnp.zeros(1)}
    tensors["model.layers.0.self_attn.q_proj.weight"] = jnp.zeros((8, 16))  # transposed
    tensors["model.layers.1.input_layernorm.weight"] = jnp.zeros(9)
    save_file(tensors, target / "model.safetensors")
    message = refused(
        load_target_model, target, target,
        "missing model.norm.weight (8,)", "missing lm_head.weight (11, 8)",
        "unexpected model.layers.3.mlp.up_proj.weight", "unexpected extra",
        "model.layers.0.self_attn.q_proj.weight has shape (8, 16), expected (16, 8)",
        "model.layers.1.input_layernorm.weight has shape (9,), expected (8,)",
    )  # fmt: skip
    assert "k_proj" not in message, "what fits is not listed"


def test_a_tied_target_may_store_its_embedding_a_second_time_as_lm_head(tmp_path):
    """Published tied Qwen3 checkpoints (0.6B among them) hold lm_head.weight although it is the embedding."""
    save_target(tmp_path, filled(TargetModel, dataclasses.replace(TARGET, tie_word_embeddings=True)))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    same_bytes(tensors, hf_tensors(load_target_model(tmp_path, None)))


def test_an_index_that_names_a_missing_file_is_refused_with_that_file(target):
    """Also when only one shard of several is missing."""
    shard(target)
    (target / "model-00002-of-00002.safetensors").unlink()
    message = refused(load_target_model, target, target / INDEX, target / "model-00002-of-00002.safetensors")
    assert "model-00001" not in message


def test_an_index_that_names_the_wrong_shard_is_refused_with_the_tensor(target):
    """The index says that a tensor is in a file that does not hold it."""
    index = shard(target)
    index["weight_map"]["model.norm.weight"] = next(
        file for file in index["weight_map"].values() if file != index["weight_map"]["model.norm.weight"]
    )
    (target / INDEX).write_text(json.dumps(index))
    refused(load_target_model, target, target, "model.norm.weight")


def test_an_index_without_a_map_lists_every_tensor_as_missing(target):
    """An empty index is not an empty model."""
    shard(target)
    (target / INDEX).write_text("{}")
    message = refused(load_target_model, target, target)
    assert message.count("missing ") == len(hf_tensors(filled(TargetModel, TARGET)))


@pytest.mark.parametrize("names", [["model.norm.weight"], {"model.norm.weight": 1}, None])
def test_an_index_whose_map_is_none_is_refused_by_name(target, names):
    """A list, a file that is no name, null."""
    shard(target)
    (target / INDEX).write_text(json.dumps({"weight_map": names}))
    refused(load_target_model, target, target / INDEX, "weight_map")


@pytest.mark.parametrize("kept", [0.0, 4, 0.02, 0.5, -1])
def test_a_truncated_file_is_refused_by_name(target, kept):
    """Nothing, half a header length, half a header, half of the tensors, all but a byte."""
    path = target / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    refused(load_target_model, target, path)


def test_missing_files_are_named(target, head):
    """A directory without tensors, without config.json, or with one that is no JSON object."""
    (target / "model.safetensors").unlink()
    refused(load_target_model, target, target, "model.safetensors")
    (head / "config.json").write_text("[1]")
    refused(load_head_model, head, head / "config.json", "JSON object")
    (head / "config.json").write_text('{"a": ')
    refused(load_head_model, head, head / "config.json", "JSON")
    (head / "config.json").unlink()
    refused(load_head_model, head, head / "config.json")


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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


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


def test_files_are_marked_as_transformers_expects(saved):
    """transformers refuses safetensors files without a format."""
    for name in ("target", "head"):
        with safe_open(saved / name / "model.safetensors", framework="flax") as file:
            assert file.metadata() == {"format": "pt"}


def test_who_may_read_the_config_may_read_the_weights(saved):
    """Whatever mode the library that writes tensors gives its files."""
    for name in ("target", "head"):
        config, weights = ((saved / name / file).stat().st_mode for file in ("config.json", "model.safetensors"))
        assert config == weights


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


def test_rotary_frequencies_stored_as_tensors_are_read_past(target):
    """Checkpoints of Llama 2's time hold them in every layer; they follow from the config."""
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: jnp.ones(2)}, target / "model.safetensors")
    same_bytes(tensors, hf_tensors(load_target_model(target, None)))
