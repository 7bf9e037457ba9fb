"""One training step: the same on every mesh and in micro-batches, in place, and without effect when it is not finite.

The process that pytest starts has one device. It tests what needs no other, and runs this module once more with eight.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import virtual_devices
from packed_case import HEAD, MASK, SIZES, TARGET, blocks_of, packed
from tiny import random_module

from jetspec_jax.checkpoint import parameter_name
from jetspec_jax.config import HeadConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.sharding import make_mesh, parameter_sharding, use
from jetspec_jax.target import TargetModel
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.placing import check_rows, place_rows, share_of_rows, training_mesh
from train.step import MAX_SKIPPED, Objective, new_state, state_shardings, train_step

pytestmark = [pytest.mark.usefixtures("compile_quickly"), pytest.mark.usefixtures("optax_promotes")]
one_device = pytest.mark.skipif(virtual_devices.inside(), reason="the other process runs it")
eight_devices = pytest.mark.skipif(not virtual_devices.inside(), reason="runs where there are eight devices")

MOE = dataclasses.replace(
    TARGET, architecture="Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    norm_topk_prob=True,
)  # fmt: skip
KEEPS_GRADIENTS = optax.trace(decay=0.0)  # its state is the last gradient
ADAPTIVE = make_optimizer(OptimizerConfig(learning_rate=1e-2, matrix_learning_rate=1e-2, warmup_steps=0), 100)


@one_device
def test_on_eight_devices():
    """Every test of this module that needs them."""
    virtual_devices.run_again(__file__)


@functools.cache
def models(moe=False):
    head = HeadConfig(**SIZES, **HEAD, num_hidden_layers=1, causal_head=True, parent_rank=3)
    return random_module(TargetModel, MOE if moe else TARGET, 0), random_module(DraftHead, head, 1)


@functools.cache
def rows(count):
    """A batch of so many rows, all different, and its blocks, some of which are not live."""
    rng = np.random.default_rng(0)
    batch, blocks = jax.tree.map(lambda x: np.tile(x, (count // 2, 1)), (packed(), blocks_of()))
    live = rng.random(blocks.live.shape) < 0.8
    return batch._replace(tokens=rng.integers(0, MASK, batch.tokens.shape).astype(np.int32)), blocks._replace(live=live)


def placed(mesh, moe=False, optimizer=KEEPS_GRADIENTS):
    """A fresh state, which a step may take for its own, and the target, on a mesh."""
    target, head = models(moe)
    state = jax.tree.map(jnp.array, new_state(head, optimizer))
    if mesh is None:
        return state, target
    put = lambda path, x: jax.device_put(x, parameter_sharding(parameter_name(path), mesh))  # noqa: E731
    return jax.device_put(state, state_shardings(state, mesh)), jax.tree_util.tree_map_with_path(put, target)


@functools.cache
def gradients(mesh=None, moe=False, parts=1):
    """The gradients of a step over eight rows by their arrays, and its metrics."""
    mesh = training_mesh(mesh or "")
    state, target = placed(mesh, moe)
    objective = Objective(gamma=3.0, temperature=2.0, micro_batches=parts)
    with use(mesh):
        batch, blocks = place_rows(rows(8), mesh)
        state, metrics = train_step(state, target, batch, blocks, optimizer=KEEPS_GRADIENTS, objective=objective)
    return jax.device_get((state.optimizer.trace, metrics))


def assert_equal(have, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5), have, want)
    counts = lambda metrics: [np.asarray(x).tolist() for x in jax.tree.leaves(metrics) if x.dtype.kind in "ib"]  # noqa: E731
    assert counts(have[1]) == counts(want[1])
    assert max(np.abs(x).max() for x in jax.tree.leaves(want[0])) > 1e-2  # the tolerance is far below the gradients


@eight_devices
@pytest.mark.parametrize("mesh", ["data=2,fsdp=4", "data=2,fsdp=2,model=2"])
def test_loss_and_gradients_do_not_depend_on_the_mesh(mesh):
    """With a dense target, split by rows, weights, heads and vocabulary; every count of the metrics is equal."""
    assert_equal(gradients(mesh), gradients())


@eight_devices
@pytest.mark.parametrize("mesh", ["data=2,expert=2,model=2"])
def test_loss_and_gradients_do_not_depend_on_where_experts_lie(mesh):
    assert_equal(gradients(mesh, moe=True), gradients(moe=True))


@eight_devices
def test_micro_batches_on_a_mesh_add_up_to_the_whole_batch():
    """Each takes rows of every device."""
    assert_equal(gradients("data=2,fsdp=2", parts=2), gradients())


@one_device
@pytest.mark.parametrize("parts", [2, 8])
def test_micro_batches_add_up_to_the_whole_batch(parts):
    """Their slots differ in number and weigh alike."""
    assert_equal(gradients(parts=parts), gradients())


@one_device
def test_bfloat16_is_computed_in_and_float32_kept():
    """Weights, moments and gradients are float32, and the gradients are near those of float32."""
    target, head = models()
    target = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    state = jax.tree.map(jnp.array, new_state(head, KEEPS_GRADIENTS))
    objective = Objective(gamma=3.0, temperature=2.0, compute_dtype=jnp.dtype("bfloat16"))
    state, metrics = train_step(state, target, *rows(8), optimizer=KEEPS_GRADIENTS, objective=objective)
    assert {x.dtype for x in jax.tree.leaves((state.head, state.optimizer))} == {jnp.dtype("float32")}
    want, exact = gradients()
    error = optax.tree.norm(jax.tree.map(lambda x, y: x - y, jax.device_get(state.optimizer.trace), want))
    assert 1e-4 < error / exact.gradient_norm < 0.1
    assert not np.array_equal(metrics.blocks.total, exact.blocks.total)


def check_in_place(mesh):
    """A step gives the state back where it was, without a copy: every byte of a device's part is aliased."""
    state, target = placed(mesh, optimizer=ADAPTIVE)
    with use(mesh):
        lowered = train_step.lower(state, target, *place_rows(rows(8), mesh), optimizer=ADAPTIVE, objective=Objective())
        program = lowered.compile()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= held
    return state, program.output_shardings[0]


@one_device
def test_the_state_is_updated_in_place():
    check_in_place(None)


@eight_devices
def test_the_state_is_split_and_updated_in_place():
    """Weights and both optimizers' moments of matrices lie in parts, and stay where they are."""
    state, after = check_in_place(make_mesh("data=2,fsdp=2,model=2"))
    jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim) or pytest.fail(str(place)), state, after)
    matrices = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(state) if x.ndim == 2}
    assert len(matrices) > 2 * len([x for x in jax.tree.leaves(state.head) if x.ndim == 2])
    for name, x in matrices.items():  # a parent term's tables are split by words alone
        assert x.addressable_shards[0].data.size * (2 if "parent" in name else 4) == x.size, name


@one_device
def test_a_step_that_is_not_finite_changes_nothing_but_the_counts():
    """A finite one goes on as if it had not been; ten in a row end the training, whatever comes after."""
    target, head = models()
    broken = jax.tree.map(lambda x: x * jnp.float32(np.nan), target)
    run = functools.partial(train_step, optimizer=ADAPTIVE, objective=Objective())
    state, _ = run(jax.tree.map(jnp.array, new_state(head, ADAPTIVE)), target, *rows(8))
    counts = lambda state: (int(state.step), int(state.skipped), int(state.skipped_in_a_row))  # noqa: E731
    kept = jax.device_get((state.head, state.optimizer))
    equal = lambda state: jax.tree.map(np.testing.assert_array_equal, (state.head, state.optimizer), kept)  # noqa: E731
    for skipped in (1, 2):
        state, metrics = run(state, broken, *rows(8))
        assert counts(state) == (1 + skipped, skipped, skipped) and not metrics.finite
        equal(state)
    once = run(jax.tree.map(jnp.array, state), target, *rows(8))[0]
    assert counts(once) == (4, 2, 0)
    assert not np.array_equal(once.head.fc.weight[...], kept[0].fc.weight[...])

    for _ in range(MAX_SKIPPED - 2):
        state, _ = run(state, broken, *rows(8))
    state, metrics = run(state, target, *rows(8))
    assert counts(state) == (MAX_SKIPPED + 2, MAX_SKIPPED + 1, MAX_SKIPPED + 1)
    assert metrics.skipped_in_a_row == MAX_SKIPPED + 1
    equal(state)


@eight_devices
def test_a_batch_that_devices_and_micro_batches_do_not_divide_is_refused():
    mesh = make_mesh("data=2,fsdp=2")
    check_rows(8, 2, mesh)
    with pytest.raises(ValueError, match=r"batch_size 12 must be a multiple of 8 \(data\*fsdp=4 .*, 2 micro-batches\)"):
        check_rows(12, 2, mesh)


@one_device
def test_one_device_takes_all_rows():
    check_rows(6, 3, None)
    with pytest.raises(ValueError, match=r"--config.batch_size 8 must be a multiple of 3 "):
        check_rows(8, 3, None)
    assert share_of_rows(6, None) == (0, 1)
