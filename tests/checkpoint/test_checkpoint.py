"""Checkpoint files: what is written is read back to the byte, and what cannot be used is refused by file and tensor."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_case import HEAD, INDEX, LLAMA, MOE, TARGET, edit, edit_layout, filled, refused, same_bytes
from safetensors import safe_open
from safetensors.flax import load_file, save_file

from jetspec_jax.checkpoint import (
    CheckpointError,
    eos_ids,
    hf_tensors,
    load_head_model,
    load_target_model,
    save_draft_head,
    save_target,
)
from jetspec_jax.head import DraftHead
from jetspec_jax.rope_scaling import Llama3Scaling, YarnScaling
from jetspec_jax.target import TargetModel


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


def test_rotary_frequencies_stored_as_tensors_are_read_past(target):
    """Checkpoints of Llama 2's time hold them in every layer; they follow from the config."""
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    save_file(tensors | {name: jnp.ones(2)}, target / "model.safetensors")
    same_bytes(tensors, hf_tensors(load_target_model(target, None)))
