"""The training step compiled for GPUs that need not be there, from shapes alone: does it fit, and how fast can it be.

`python -m train.distill --config FILE --plan --chip h100 --devices 8` prints it. The target's config.json is enough, or
the name of one of `jetspec_jax.shapes`; weights and data are not read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.moe import ROUNDS
from jetspec_jax.shapes import target_shape
from jetspec_jax.sharding import batch_ways, describe, make_mesh, misfits, spec, use
from jetspec_jax.target import TargetModel
from kernels.hlo import Work, roofline, work
from kernels.topology import CHIPS, Chip, gpu_devices
from train.chunked import automatic_chunk
from train.config import DistillConfig
from train.data import Packed
from train.flops import step_flops
from train.objective import Blocks
from train.optimizer import make_optimizer
from train.placing import check_rows
from train.setup import check_config, check_length, head_layout, make_objective
from train.step import new_state, state_shardings, train_step
from train.upgrade import only, with_layout

USABLE = 0.92
"""The share of a GPU's memory that a step may take; CUDA, NCCL and fragmentation have the rest."""


class StepPlan(NamedTuple):
    """One step, per device; sizes in bytes.

    target, head, optimizer, batch: arguments; those of the state are updated in place. outputs: of the target, kept for
    the loss, a part of the temporaries. temporaries: XLA's scratch at its peak, and results without a place of their
    own. parameters: of target and head, on all devices together. chunk: slots of a row whose logits are held at once.
    model_flops: `step_flops`, of this device's share. seconds: what compiling took.
    """

    target: int
    head: int
    optimizer: int
    batch: int
    outputs: int
    temporaries: int
    parameters: tuple[int, int]
    chunk: int
    work: Work
    model_flops: float
    seconds: float

    @property
    def arguments(self) -> int:
        """What must be in memory before a step starts."""
        return self.target + self.head + self.optimizer + self.batch

    @property
    def total(self) -> int:
        """What a step needs of a device's memory."""
        return self.arguments + self.temporaries


def plan_run(config: DistillConfig, chip: str, devices: int) -> int:
    """Prints the plan of a run on `devices` GPUs of one host; returns 0 if it fits, else 1, after what to change.

    Raises:
        ValueError: a field cannot be, the mesh is not of so many devices, or no GPU can be compiled for.
    """
    target = target_shape(config.target)
    mesh = make_mesh(config.mesh or "data=1", gpu_devices(chip, devices))
    if mesh.size != devices:
        raise ValueError(f"--config.mesh={config.mesh!r} is of {mesh.size} devices, and --devices={devices}")
    plan = plan_step(config, target, mesh)
    print("\n".join(report(config, plan, CHIPS[chip], mesh)))
    if plan.total <= USABLE * CHIPS[chip].memory:
        return 0
    print("\n".join(advice(config, plan, CHIPS[chip], mesh)))
    return 1


def plan_step(config: DistillConfig, target: TargetConfig, mesh: Mesh) -> StepPlan:
    """Compiles `train_step` as `config` describes it for the GPUs of `mesh`.

    Raises:
        ValueError: the model or the batch cannot be split over the mesh, or a field cannot be.
    """
    check_config(config)
    head = head_layout(config, target)
    config = with_layout(config, head)
    _check(config, target, head, mesh)
    optimizer = only(make_optimizer(config.optimizer, config.steps), head, config.train_only)
    objective = make_objective(config)
    model = jax.eval_shape(lambda: TargetModel(target, rngs=nnx.Rngs(0), dtype=jnp.dtype(config.target_dtype)))
    state = jax.eval_shape(lambda: new_state(DraftHead(head, rngs=nnx.Rngs(0)), optimizer))
    model, state = (jax.tree.map(_placed, x, state_shardings(x, mesh)) for x in (model, state))
    batch, blocks = _batch(config, mesh)
    start = time.perf_counter()
    with use(mesh):
        traced = train_step.trace(state, model, batch, blocks, optimizer=optimizer, objective=objective)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    rows = config.batch_size // config.micro_batches // batch_ways(mesh)
    slots = config.anchors * config.block_size
    chunk = min(slots, config.logit_chunk or automatic_chunk(target.vocab_size // mesh.shape["model"], rows, slots))
    supervised = config.anchors * (config.block_size - 1 + (head.mixed_fill > 0))
    width = (len(head.target_layer_ids) + 1) * target.hidden_size
    return StepPlan(
        target=_bytes(model),
        head=_bytes(state.head),
        optimizer=_bytes(state) - _bytes(state.head),
        batch=_bytes((batch, blocks)),
        outputs=rows * config.length * width * jnp.dtype(config.target_dtype).itemsize,
        temporaries=memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        parameters=(_count(model), _count(state.head)),
        chunk=chunk,
        work=work(compiled.as_text(), {"logits": -(-supervised // chunk), "experts": ROUNDS}),
        model_flops=step_flops(target, head, rows=config.batch_size, length=config.length, anchors=config.anchors)
        / mesh.size,
        seconds=seconds,
    )


def report(config: DistillConfig, plan: StepPlan, chip: Chip, mesh: Mesh) -> Iterator[str]:
    """The plan's lines."""
    times, tokens = roofline(plan.work, chip), config.batch_size * config.length
    yield (
        f"{config.target} on {mesh.size} x {chip.name}, mesh {describe(mesh.shape)}; {config.batch_size} rows of "
        f"{config.length} tokens, {config.anchors} blocks of {config.block_size} a row"
    )
    yield (
        f"target {config.target_dtype}, head computes in {config.compute_dtype}, micro-batches {config.micro_batches}, "
        f"logits of {plan.chunk} slots a row at once; compiled in {plan.seconds:.0f} s"
    )
    yield from ("", "memory of a device                                   GB")
    yield _line(f"target, {plan.parameters[0] / 1e9:.2f} B parameters in all", plan.target / 1e9)
    yield _line(f"head, {plan.parameters[1] / 1e9:.2f} B parameters in all", plan.head / 1e9)
    yield _line("optimizer", plan.optimizer / 1e9)
    yield _line("batch", plan.batch / 1e9, 4)
    yield _line("activations and temporaries, at the peak", plan.temporaries / 1e9)
    yield _line("  of these the target's taps and hidden states", plan.outputs / 1e9)
    yield _line(f"total, of {chip.memory / 1e9:.1f} with {USABLE:.0%} usable", plan.total / 1e9)
    yield from ("", "work of a step on a device")
    yield _line("FLOPs that the method needs, 1e12", plan.model_flops / 1e12, 1)
    yield _line("FLOPs of the compiled products, 1e12", sum(plan.work.flops.values()) / 1e12, 1)
    yield _line("memory read and written, GB", plan.work.bytes / 1e9, 0)
    for kind, count in sorted(plan.work.counts.items()):
        yield _line(f"{kind}, {count} times, GB sent", plan.work.moved[kind] / 1e9)
    yield from ("", "least time of a step                                 ms")
    yield _line(f"products, at {chip.tensor / 1e12:.0f} TFLOP/s", times.compute * 1e3, 0)
    yield _line(f"memory, at {chip.bandwidth / 1e12:.2f} TB/s", times.memory * 1e3, 0)
    yield _line(f"collectives, at {chip.link / 1e9:.0f} GB/s a direction (NVLink)", times.collectives * 1e3, 0)
    for name, seconds in (("all at once", times.overlapped), ("one after another", times.in_turn)):
        mfu = plan.model_flops / seconds / chip.tensor
        yield f"{name}: {seconds * 1e3:.0f} ms, {tokens / seconds:,.0f} tokens/s, MFU {mfu:.0%}"


def advice(config: DistillConfig, plan: StepPlan, chip: Chip, mesh: Mesh) -> Iterator[str]:
    """Lines that say by how much a step does not fit, and what to change."""
    usable = USABLE * chip.memory
    yield f"does not fit: {plan.total / 1e9:.1f} GB of {usable / 1e9:.1f} usable; change one or more of:"
    rows = config.batch_size // config.micro_batches // batch_ways(mesh)
    if plan.arguments < usable:
        if rows > 1:
            yield f"  --config.micro_batches, {config.micro_batches}: raise it ({rows} rows a device at once)"
            yield f"  --config.batch_size, {config.batch_size}: lower it"
        yield f"  --config.anchors, {config.anchors}: lower it"
        yield f"  --config.logit_chunk, {plan.chunk}: lower it"
    yield f"  --config.mesh, {describe(mesh.shape)}: raise fsdp, with as many more --devices"


def _line(name: str, value: float, digits: int = 2) -> str:
    return f"  {name:<46}{value:>10,.{digits}f}"


def _check(config: DistillConfig, target: TargetConfig, head: HeadConfig, mesh: Mesh) -> None:
    check_length(config, target)
    check_rows(config.batch_size, config.micro_batches, mesh)
    if problems := misfits(target, mesh) + misfits(head, mesh):
        raise ValueError(f"{config.target} cannot be split over {describe(mesh.shape)}: {'; '.join(problems)}")


def _batch(config: DistillConfig, mesh: Mesh) -> tuple[Packed, Blocks]:
    """The shapes of a batch and its blocks."""
    sharding = NamedSharding(mesh, spec("batch", None))

    def shape(columns: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((config.batch_size, columns), dtype, sharding=sharding)

    tokens, anchors = shape(config.length), min(config.anchors, config.length)
    return Packed(tokens, tokens, tokens, shape(config.length, jnp.bool_)), Blocks(
        shape(anchors), shape(anchors), shape(anchors, jnp.bool_)
    )


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    """Bytes of all arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
