"""One training step as one compiled program: the target's forward, the head's gradient, the optimizer.

On a mesh (`jetspec_jax.sharding`) the batch's rows are split by "data" and "fsdp", target and head as their parameters'
names say, and the optimizer's moments as the parameters that they belong to.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jetspec_jax.checkpoint import parameter_name
from jetspec_jax.head import DraftHead
from jetspec_jax.sharding import constrain, parameter_spec, spec
from jetspec_jax.target import TargetModel
from train.data import Packed
from train.objective import BlockMetrics, Blocks, distillation_loss
from train.packed import target_forward
from train.upgrade import frozen_but

MAX_SKIPPED = 10
"""Steps in a row that may be skipped for not being finite."""


class Objective(NamedTuple):
    """What a step compiles for, besides shapes; the first fields are `distillation_loss`'s.

    micro_batches: equal parts of the batch, one after another, whose gradients add up to the whole batch's.
    train_only: the part of the head that has a gradient; "" is all of it.
    """

    gamma: float = 0.0
    temperature: float = 1.0
    loss: str = "forward_kl"
    compute_dtype: jnp.dtype | None = None
    logit_chunk: int = 0
    micro_batches: int = 1
    train_only: str = ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes. It is donated from step to step, and is what a checkpoint holds.

    step: int32 `[]`, batches taken, skipped ones included.
    head: the float32 master weights.
    optimizer: optax's state.
    skipped, skipped_in_a_row: int32 `[]`, steps that were not finite, in all and since the last finite one.
    """

    step: jax.Array
    head: DraftHead
    optimizer: optax.OptState
    skipped: jax.Array
    skipped_in_a_row: jax.Array


class StepMetrics(NamedTuple):
    """What a step reports, each array whole on every device.

    blocks: sums over the batch's blocks.
    gradient_norm: float32 `[]`, global, before clipping.
    finite: bool `[]`; false for a step that changed no weights.
    tokens: int32 `[]`, of the batch, padding left out.
    skipped, skipped_in_a_row: as in the `TrainState` after the step.
    """

    blocks: BlockMetrics
    gradient_norm: jax.Array
    finite: jax.Array
    tokens: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def new_state(head: DraftHead, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; `head` becomes its own."""
    zero = lambda: jnp.zeros((), jnp.int32)  # noqa: E731 - each is donated, so that each must be an array of its own
    return TrainState(zero(), head, optimizer.init(head), zero(), zero())


def state_specs(state: Any) -> Any:
    """The partition of every array of a `TrainState` (or of its shapes), in its structure."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _leaf_spec(path, leaf.shape), state)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """As `state_specs`, on a mesh."""
    return jax.tree.map(lambda part: NamedSharding(mesh, part), state_specs(state))


@functools.partial(jax.jit, static_argnames=("optimizer", "objective"), donate_argnames="state")
def train_step(
    state: TrainState,
    target: TargetModel,
    batch: Packed,
    blocks: Blocks,
    *,
    optimizer: optax.GradientTransformation,
    objective: Objective,
) -> tuple[TrainState, StepMetrics]:
    """The state after one batch. A loss or gradient that is not finite changes nothing but the counts.

    `MAX_SKIPPED` such steps in a row are an end: no later step changes anything either, so that whoever runs the steps
    may look at the counts now and then only.

    Args:
        batch: `[B, L]`; B is a multiple of `micro_batches` on every device.
        blocks: `[B, A]`.
    """
    grads, blocks_metrics = _gradient(state.head, target, batch, blocks, objective)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(blocks_metrics.total) & (state.skipped_in_a_row < MAX_SKIPPED)
    updates, moments = optimizer.update(grads, state.optimizer, state.head)
    changed = optax.apply_updates(state.head, updates), moments
    head, moments = jax.tree.map(functools.partial(jnp.where, finite), changed, (state.head, state.optimizer))
    bad = 1 - finite.astype(jnp.int32)
    after = TrainState(state.step + 1, head, moments, state.skipped + bad, (state.skipped_in_a_row + bad) * bad)
    tokens = jnp.sum(batch.documents > 0, dtype=jnp.int32)
    metrics = StepMetrics(blocks_metrics, norm, finite, tokens, after.skipped, after.skipped_in_a_row)
    return _laid_out(after), jax.tree.map(constrain, metrics)


def _gradient(
    head: DraftHead, target: TargetModel, batch: Packed, blocks: Blocks, objective: Objective
) -> tuple[DraftHead, BlockMetrics]:
    """The gradient of the batch's mean loss, and the batch's sums."""
    parts = objective.micro_batches
    if parts == 1:
        return _part_gradient(head, target, batch, blocks, objective)

    def split(x: jax.Array) -> jax.Array:
        # Every part takes rows of every device: neighbours stay together, so that none moves to another device.
        return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)

    def add(total: Any, part: tuple[Packed, Blocks]) -> tuple[Any, None]:
        grads, metrics = _part_gradient(head, target, *part, objective)
        weighted = jax.tree.map(lambda x: x * metrics.weight, grads)
        return jax.tree.map(jnp.add, total, (weighted, metrics)), None

    micro = jax.tree.map(split, (batch, blocks))
    shapes = jax.eval_shape(
        functools.partial(_part_gradient, objective=objective), head, target, *jax.tree.map(lambda x: x[0], micro)
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (grads, metrics), _ = jax.lax.scan(add, zeros, micro)
    return jax.tree.map(lambda x: x / jnp.maximum(metrics.weight, 1e-6), grads), metrics


def _part_gradient(
    head: DraftHead, target: TargetModel, batch: Packed, blocks: Blocks, objective: Objective
) -> tuple[DraftHead, BlockMetrics]:
    options = objective._asdict()
    del options["micro_batches"], options["train_only"]
    with jax.named_scope("target"):
        out = target_forward(target, batch, head.config.target_layer_ids)

    def loss(head: DraftHead) -> tuple[jax.Array, BlockMetrics]:
        head = frozen_but(head, objective.train_only)
        return distillation_loss(head, target, batch, out.taps, out.hidden, blocks, **options)

    return jax.grad(loss, has_aux=True)(head)


def _laid_out(state: TrainState) -> TrainState:
    """`state`, each array where `state_specs` says: what one step gives, the next one takes in the same place."""
    if jax.sharding.get_abstract_mesh().empty:
        return state
    return jax.tree.map(jax.lax.with_sharding_constraint, state, state_specs(state))


def _leaf_spec(path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """A parameter's partition, or that of the moment of a parameter: both end in its name. Else whole everywhere."""
    try:
        found = parameter_spec(parameter_name(path))
    except ValueError:
        return spec()
    return found if len(found) == len(shape) else spec()
