"""Several devices give what one gives, each holds its part only, and what does not fit is refused first.

The process that pytest starts has one device. It tests the tables, and runs this module once more with eight.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import virtual_devices
from flax import nnx
from jax.sharding import PartitionSpec

import jetspec_jax
from jetspec_jax.compiled import compiled
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.decode import LoopSpec, decode, prefill
from jetspec_jax.engine import top_two_gap
from jetspec_jax.head import DraftHead
from jetspec_jax.sampling import Sampling
from jetspec_jax.sharding import default_device, describe, make_mesh, misfits, parameter_spec, parse_mesh, spec, use
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import TreeShape

one_device = pytest.mark.skipif(virtual_devices.inside(), reason="the other process runs it")
eight_devices = pytest.mark.skipif(not virtual_devices.inside(), reason="runs where there are eight devices")

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 128,
}  # fmt: skip
DENSE = TargetConfig(**SIZES, num_hidden_layers=2)
MOE = TargetConfig(
    **SIZES, num_hidden_layers=2, architecture="Qwen3MoeForCausalLM", num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=16, norm_topk_prob=True,
)  # fmt: skip
HEAD = HeadConfig(
    **SIZES, num_hidden_layers=1, block_size=5, num_target_layers=2, target_layer_ids=(0, 1), mask_token_id=47,
    causal_head=True,
)  # fmt: skip
TERM = dataclasses.replace(HEAD, parent_rank=4)
PROMPTS = [np.random.default_rng(i).integers(0, 47, n).tolist() for i, n in enumerate((9, 3, 17, 30))]


@one_device
def test_on_eight_devices():
    """Every test of this module that needs them."""
    virtual_devices.run_again(__file__)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Random targets, dense and of experts, and a head, on disk; logits are scaled so that none nearly tie."""
    root, rng = tmp_path_factory.mktemp("sharded"), np.random.default_rng(0)

    def random(kind, config):
        draw = lambda x: rng.normal(size=x.shape) / np.sqrt(x.shape[-1]) if x.ndim > 1 else np.ones(x.shape)  # noqa: E731
        shapes = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
        return jax.tree.map(lambda x: jnp.asarray(draw(x).astype(np.float32)), shapes)

    for name, config in (("dense", DENSE), ("moe", MOE)):
        model = random(TargetModel, config)
        model.lm_head.weight[...] = model.lm_head.weight[...] * 8
        jetspec_jax.save_target(root / name, model)
    jetspec_jax.save_draft_head(root / "head", random(DraftHead, HEAD))
    jetspec_jax.save_draft_head(root / "head_with_term", random(DraftHead, TERM))
    return root


def load(saved, name, mesh, head="head"):
    target = jetspec_jax.load_target(saved / name, mesh=None if mesh is None else make_mesh(mesh))
    return target, jetspec_jax.load_draft_head(saved / head, target)


@functools.cache
def texts(saved, name, mesh, head="head", **options):
    """What four prompts in one batch are answered with, and how they were accepted."""
    target, head = load(saved, name, mesh, head)
    options = {"method": "jetspec", "budget": 9, "tree_width": 3, "max_new_tokens": 20, "batch_size": 4, **options}
    results = jetspec_jax.generate(target, head, PROMPTS, **options)
    return [(result.token_ids, result.accepted_lengths) for result in results]


@eight_devices
@pytest.mark.parametrize("mesh", ["data=4", "model=4", "data=2,model=4", "data=2,fsdp=2,model=2"])
def test_a_dense_target_gives_the_tokens_of_one_device(saved, mesh):
    """Also the same trees: the rounds accept the same numbers of tokens."""
    assert texts(saved, "dense", mesh) == texts(saved, "dense", None)


@eight_devices
@pytest.mark.parametrize("mesh", ["model=4", "data=2,fsdp=2,model=2"])
def test_a_head_with_a_parent_term_drafts_the_same_trees(saved, mesh):
    """Its tables are split by words, as the logits are: what counts is the tree, which rounds depend on."""
    assert texts(saved, "dense", mesh, "head_with_term") == texts(saved, "dense", None, "head_with_term")
    assert texts(saved, "dense", None, "head_with_term") != texts(saved, "dense", None)


@eight_devices
@pytest.mark.parametrize("mesh", ["expert=8", "expert=2,model=4", "data=2,fsdp=2,expert=2"])
def test_a_target_of_experts_gives_the_tokens_of_one_device(saved, mesh):
    """Experts, and the inner features of each, are split."""
    assert texts(saved, "moe", mesh) == texts(saved, "moe", None)


@eight_devices
def test_sampling_does_not_depend_on_the_mesh(saved):
    """Equal seeds, equal text."""
    options = {"temperature": 1.0, "top_k": 8, "top_p": 0.9, "seed": 3}
    assert texts(saved, "dense", "data=2,model=2", **options) == texts(saved, "dense", None, **options)


@eight_devices
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_every_device_holds_its_part_of_the_weights_only(saved, name):
    """And the parts, put together, are the file's."""
    whole, split = load(saved, name, None)[0].model, load(saved, name, "fsdp=2,model=2,expert=2")[0].model
    experts = 2 if name == "moe" else 1
    for path, leaf in jax.tree_util.tree_flatten_with_path(split)[0]:
        parts = leaf.size // leaf.addressable_shards[0].data.size
        assert parts == (1 if leaf.ndim == 1 else 4 * experts if leaf.ndim == 3 else 2 if leaf.shape[0] == 8 else 4), (
            path
        )
    jax.tree.map(np.testing.assert_array_equal, whole, split)


@eight_devices
def test_caches_are_split_and_updated_in_place(saved):
    """By rows and by heads; the program takes its state back as it gave it, and copies no part of a cache."""
    target, head = load(saved, "dense", "data=2,model=4")
    ints = jax.ShapeDtypeStruct((4,), jnp.int32)
    tokens, seeds = jax.ShapeDtypeStruct((4, 2048), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.uint32)
    mode, knobs = Sampling().mode, Sampling().knobs
    with use(target.mesh):
        first = compiled(prefill, target.model, head, tokens, ints, ints, seeds, knobs, eos_ids=(), mode=mode, chunk=16)
        state, rounds = first.out_info, jax.ShapeDtypeStruct((), jnp.int32)
        loop = compiled(decode, target.model, head, state, rounds, knobs, spec=LoopSpec(TreeShape(9, 3, 4), (), mode))
    for layer in (*state.cache.layers, *state.context.layers):
        assert layer.key.sharding.spec[:2] == layer.value.sharding.spec[:2] == ("data", "model")
    assert jax.tree.map(lambda x: x.sharding, loop.out_info) == jax.tree.map(lambda x: x.sharding, state)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.cache, state.context))) // 8
    memory = loop.memory_analysis()
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 2


@eight_devices
@pytest.mark.parametrize("mesh", ["data=4", "data=2,fsdp=2,model=2"])
def test_the_gap_between_the_best_logits_is_one_devices(saved, mesh):
    """`--verify-lossless` looks at one prompt, which a mesh of several batch ways cannot split."""
    plain, split = (top_two_gap(load(saved, "dense", each)[0], PROMPTS[0]) for each in (None, mesh))
    assert split == pytest.approx(plain, rel=1e-3)


@eight_devices
def test_a_head_on_other_devices_is_refused(saved):
    """It was loaded without the target."""
    target = load(saved, "dense", "data=4")[0]
    with pytest.raises(ValueError, match=r"it lies on other devices than the target; load_draft_head\(path, target\)"):
        jetspec_jax.generate(target, jetspec_jax.load_draft_head(saved / "head"), PROMPTS, batch_size=4)


@eight_devices
def test_without_a_mesh_weights_lie_on_the_default_device(saved):
    """JAX's setting of it, as a device or as a platform."""
    with jax.default_device(jax.devices()[5]):
        assert load(saved, "dense", None)[0].model.model.norm.weight[...].devices() == {jax.devices()[5]}
    with jax.default_device("cpu"):
        assert default_device() == jax.devices("cpu")[0]
    assert default_device() == jax.devices()[0]


@eight_devices
def test_a_batch_that_cannot_be_split_is_refused(saved):
    target, head = load(saved, "dense", "data=4")
    with pytest.raises(ValueError, match=r"a batch of 2 cannot be split over data\*fsdp=4"):
        jetspec_jax.generate(target, head, PROMPTS, batch_size=2)


@eight_devices
def test_a_model_that_cannot_be_split_is_refused(saved):
    with pytest.raises(
        jetspec_jax.CheckpointError, match="dense cannot be split over the mesh model=8: num_key_value_heads 4 "
    ):
        load(saved, "dense", "model=8")


@one_device
def test_every_parameter_has_a_rule_and_matrices_are_split():
    for kind, config in ((TargetModel, DENSE), (TargetModel, MOE), (DraftHead, HEAD), (DraftHead, TERM)):
        for name, leaf in jetspec_jax.checkpoint.hf_tensors(
            jax.eval_shape(lambda kind=kind, config=config: kind(config, rngs=nnx.Rngs(0)))
        ).items():
            assert any(parameter_spec(name)) == (leaf.ndim > 1), name
    with pytest.raises(
        ValueError, match="no logical axes are stated for the parameter model.conv.weight".replace(".", "[.]")
    ):
        parameter_spec("model.conv.weight")


@one_device
def test_an_array_split_twice_by_a_mesh_axis_is_refused():
    assert spec("batch", None, "heads") == PartitionSpec(("data", "fsdp"), None, "model")
    with pytest.raises(ValueError, match=r"\('heads', 'mlp'\) would split one array twice by the mesh axis model"):
        spec("heads", "mlp")
    with pytest.raises(ValueError, match="no rule for the logical axis 'head'; known are batch"):
        spec("head")


@one_device
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle=2", "got 'modle=2'"), ("model", "got 'model'"), ("model=0", "got 'model=0'"), ("", "got ''"),
        ("model=2,model=2", "gives the axis model twice"), ("model=two", "sizes from 1 on"),
    ],
)  # fmt: skip
def test_a_mesh_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


@one_device
@pytest.mark.parametrize(
    ("sizes", "part"), [({"tensor": 1}, "tensor=1"), ({"data": 0}, "data=0"), ({"data": 1.5}, "data=1.5")]
)
def test_a_mapping_that_is_no_mesh_is_refused_as_its_text_is(sizes, part):
    with pytest.raises(ValueError, match=f"expected AXIS=SIZE,.* got '{part}'"):
        make_mesh(sizes)
    assert dict(make_mesh({"data": 1}).shape) == dict(make_mesh({}).shape) == parse_mesh("data=1")


@one_device
def test_meshes_are_written_as_they_are_read():
    assert parse_mesh("model=4, data=2") == {"data": 2, "fsdp": 1, "model": 4, "expert": 1}
    assert describe(parse_mesh("model=4,data=2")) == "data=2,model=4"
    assert describe(parse_mesh("data=1")) == "data=1"


@one_device
def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"mesh model=64 needs 64 devices, there are 1 \(cpu\); lower a size"):
        make_mesh("model=64")


@one_device
def test_sizes_that_a_mesh_does_not_divide_are_all_named():
    mesh = types.SimpleNamespace(shape={"data": 1, "fsdp": 3, "model": 5, "expert": 3})
    assert [reason.split()[0] for reason in misfits(MOE, mesh)] == [
        "num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "vocab_size", "num_experts",
        "moe_intermediate_size",
    ]  # fmt: skip
