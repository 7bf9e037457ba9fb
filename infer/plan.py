"""`python -m infer.plan`: compiles the steps of generation for GPUs that need not be there.

Prints a JSON object a step: its memory, the work of one round (or of one chunk of prompts), and the least time that the
chip can do that in. Nothing is run, and no kernel reaches that time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
import sys
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jetspec_jax.cache import KVCache
from jetspec_jax.checkpoint import parameter_name
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.decode import Drafter, LoopSpec, NoDrafter, decode, draft_tree, prefill
from jetspec_jax.head import DraftHead
from jetspec_jax.moe import ROUNDS
from jetspec_jax.ops import argmax
from jetspec_jax.sampling import Sampling
from jetspec_jax.shapes import TARGETS, head_shape
from jetspec_jax.sharding import batch_ways, check_batch, describe, make_mesh, misfits, parameter_spec, spec, use
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import TreeShape
from kernels.hlo import Work, roofline, work
from kernels.pallas.tree_attention import BACKENDS, Backend, Problem, check_backend
from kernels.pallas.tree_attention.xla import chunk_size
from kernels.topology import CHIPS, Chip, compiling_for, gpu_devices

Where: TypeAlias = jax.Device | Mesh | None
"""What to compile for: a device or a mesh of `gpu_devices`, or (None) this machine."""


class Plan(NamedTuple):
    """Bytes of one compiled step on each device, and the copies inside its loop.

    weights, state: arguments, or for prefill its result. aliased: of the state, updated in place. temporaries: XLA's
    scratch at its peak. copies: "dtype[shape]" of each copy, inside the loop, of at least a cache array's bytes or of a
    weight's shape. work: of one round, or of one chunk of prompts, behind a cache that is full; None where compiled for
    this machine. A Pallas kernel counts with its operands and results, and without its products.
    """

    weights: int
    state: int
    aliased: int
    temporaries: int
    copies: list[str]
    work: Work | None

    @property
    def total(self) -> int:
        """What the step needs of a device's memory."""
        return self.weights + self.state + self.temporaries


def plan_steps(
    target: TargetConfig,
    head: HeadConfig | None,
    *,
    batch: int,
    capacity: int,
    tree: TreeShape,
    device: Where,
    dtype: jnp.dtype = jnp.bfloat16,
    attention: Backend = "auto",
    search_steps: int = 0,
    steps: tuple[str, ...] = ("prefill", "decode"),
) -> dict[str, Plan]:
    """Compiles prefill of full rows, the decode loop, or drafting alone, from shapes; without end-of-sequence ids.

    With ids a round writes its cache after its choices anyway; without, only the order that `ops.after` makes does.

    Args:
        head: None plans plain decoding, with a `tree` of the root alone.
        device: what to compile for.
        attention: the backend of `tree_attention`.
        search_steps: how many steps the search of a tree takes, for the work of a head with a parent term; at least its
            depth. 0 is a third more than its depth.
        steps: which plans are wanted, of "prefill", "decode" and "draft"; on a mesh, prefill is compiled anyway.
    """
    trips = {"tree": max(0, (search_steps or tree.depth * 4 // 3) - tree.depth)}
    drafter: Drafter = NoDrafter()
    model = _abstract(TargetModel, target, device, dtype)
    if head is not None:
        drafter = _abstract(DraftHead, head, device, dtype)
    row, seeds = (_on(jax.ShapeDtypeStruct((batch,), kind), device, "batch") for kind in (jnp.int32, jnp.uint32))
    tokens = _on(jax.ShapeDtypeStruct((batch, capacity), jnp.int32), device, "batch", None)
    mode, knobs = Sampling().mode, jax.tree.map(lambda x: _on(x, device), Sampling().knobs)
    options = {"eos_ids": (), "mode": mode, "chunk": min(512, capacity), "attention": attention}
    args = (model, drafter, tokens, row, row, seeds, knobs)
    plans = {}
    if "prefill" in steps or isinstance(device, Mesh):
        compiled = _compile(prefill, args, device, **options)
        state = compiled.out_info
        plans["prefill"] = _plan(compiled, (model, drafter), state, trips)
    else:
        shapes = jax.eval_shape(lambda *x: prefill(*x, **options), *args)
        state = jax.tree.map(lambda x: _on(x, device), shapes)
    if "decode" in steps:
        loop = (model, drafter, state, _on(jax.ShapeDtypeStruct((), jnp.int32), device), knobs)
        compiled = _compile(decode, loop, device, spec=LoopSpec(tree, (), mode))
        plans["decode"] = _plan(compiled, (model, drafter), state, trips)
    if "draft" in steps:
        drafting = jax.jit(functools.partial(draft_tree, shape=tree))
        plans["draft"] = _plan(_compile(drafting, (model, drafter, state), device), drafter, state.context, trips)
    return {name: plans[name] for name in steps}


def plan_verify(
    target: TargetConfig,
    *,
    batch: int,
    capacity: int,
    nodes: int,
    device: Where,
    tap_ids: tuple[int, ...] = (),
    dtype: jnp.dtype = jnp.bfloat16,
    attention: Backend = "auto",
) -> Plan:
    """One verify step: the target over `nodes` behind a cache, and its choices. Its cache is not its to update."""

    def verify(model: TargetModel, tokens: jax.Array, cache: KVCache, lengths: jax.Array, mask: jax.Array) -> Any:
        out = model(tokens, lengths[:, None] + tokens, cache, lengths, mask, tap_ids)
        return argmax(model.logits(out.hidden)), out.taps, out.rows

    model = _abstract(TargetModel, target, device, dtype)
    caches = jax.eval_shape(lambda: KVCache.zeros(target, batch, capacity, dtype, attention))
    caches = jax.tree.map(lambda x: _on(x, device, "batch", "kv_heads", None, None), caches)
    tokens = _on(jax.ShapeDtypeStruct((batch, nodes), jnp.int32), device, "batch", None)
    lengths = _on(jax.ShapeDtypeStruct((batch,), jnp.int32), device, "batch")
    mask = _on(jax.ShapeDtypeStruct((batch, nodes, -(-nodes // 32)), jnp.uint32), device, "batch", None, None)
    compiled = _compile(jax.jit(verify), (model, tokens, caches, lengths, mask), device)
    return _plan(compiled, model, caches, {})


def large_copies(text: str, threshold: int) -> list[str]:
    """Copies of at least `threshold` bytes in the computations of an optimised HLO module, entry excepted.

    What the entry copies it copies once a call; everything else here belongs to the loop. A copy of a broadcast is how
    a constant is written, and none.
    """
    inside = re.sub(r"^ENTRY .*?^}", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"= \(?(\w+)\[([\d,]*)\][^\n=]* copy(?:-start)?\((?!%broadcast)", inside)
    sized = [(f"{dtype}[{dims}]", _hlo_bytes(dtype, dims)) for dtype, dims in found]
    return [name for name, size in sized if size >= threshold]


def _plan(compiled: Any, weights: Any, state: Any, trips: dict[str, int]) -> Plan:
    memory = compiled.memory_analysis()
    caches = [_bytes(leaf) for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    matrices = {_local_shape(leaf) for leaf in jax.tree.leaves(weights) if leaf.ndim > 1}
    copied = large_copies(compiled.as_text(), 0)
    large = large_copies(compiled.as_text(), min(caches))
    large += [name for name in copied if name not in large and _dims(name) in matrices]
    [capacity] = {leaf.shape[2] for leaf in jax.tree.leaves(state) if leaf.ndim == 4}
    on_cpu = next(iter(jax.tree.leaves(weights))).sharding is None
    return Plan(
        weights=sum(map(_bytes, jax.tree.leaves(weights))),
        state=sum(map(_bytes, jax.tree.leaves(state))),
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        copies=large,
        work=None if on_cpu else work(compiled.as_text(), trips | _trips(capacity)),
    )


def _trips(capacity: int) -> dict[str, int]:
    """How often loops run whose length depends on data: over all of a cache, and once where the loop is the step."""
    return {"prefix": -(-capacity // chunk_size(capacity)), "experts": ROUNDS, "decode": 1, "prefill": 1}


def _compile(function: Any, args: Any, device: Where, **static: Any) -> Any:
    """`function` compiled for the shapes of `args`, which say where they lie."""
    if device is None:
        return function.trace(*args, **static).lower().compile()
    where: contextlib.AbstractContextManager[Any]
    where = use(device) if isinstance(device, Mesh) else compiling_for(device.device_kind)
    with where:
        return function.trace(*args, **static).lower(lowering_platforms=("cuda",)).compile()


def _abstract(kind: Any, config: Any, device: Where, dtype: jnp.dtype) -> Any:
    """The shapes of a model's parameters, where they lie."""
    shapes = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), dtype=dtype))

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not isinstance(device, Mesh):
            return _on(leaf, device)
        sharding = NamedSharding(device, parameter_spec(parameter_name(path)))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, shapes)


def _on(leaf: Any, device: Where, *axes: str | None) -> jax.ShapeDtypeStruct:
    """The shape of `leaf`, where an array with these logical axes lies."""
    sharding: jax.sharding.Sharding | None = None
    if isinstance(device, Mesh):
        sharding = NamedSharding(device, spec(*axes))
    elif device is not None:
        sharding = SingleDeviceSharding(device)
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)


def _bytes(leaf: Any) -> int:
    """Bytes of an array on each device."""
    shape = _local_shape(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _local_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _dims(name: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in name.partition("[")[2].rstrip("]").split(",") if dim)


def _hlo_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(int(d) for d in dims.split(",") if d) * (int(bits[0]) if bits else 8) // 8


def _fields(plan: Plan, chip: Chip) -> dict[str, Any]:
    """What the command prints of a plan."""
    done = plan.work or Work()
    return {
        **{name: value for name, value in plan._asdict().items() if name != "work"},
        "total": plan.total,
        "fits": plan.total <= chip.memory,
        "traffic": done.bytes,
        "flops": sum(done.flops.values()),
        "least_ms": 1e3 * roofline(done, chip).overlapped,
    }


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infer.plan", description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="h100")
    parser.add_argument("--mesh", default="data=1", help="devices, as infer.generate's (default %(default)s)")
    parser.add_argument("--model", choices=sorted(TARGETS), default="qwen3-8b")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="capacity of a row in tokens")
    parser.add_argument("--budget", type=int, default=256, help="0 plans plain decoding")
    parser.add_argument("--tree-width", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16, help="slots of the head, the anchor's included")
    parser.add_argument("--parent-rank", type=int, default=0, help="of the head's parent term; 0 is none")
    parser.add_argument(
        "--search-steps", type=int, default=0, help="of a tree with a parent term (default: 4/3 of its depth)"
    )
    parser.add_argument("--attention", choices=BACKENDS, default="auto", help="default: a kernel where one serves")
    parser.add_argument(
        "--step",
        choices=("prefill", "decode", "draft", "verify"),
        nargs="+",
        default=["prefill", "decode"],
        help="reading prompts; the whole loop; a forward of the head and its tree; a forward of the target over a tree "
        "(default: the first two)",
    )
    return parser


_LEAST = {"batch_size": 1, "context": 1, "budget": 0, "tree_width": 1, "parent_rank": 0, "search_steps": 0}


def _shapes(args: argparse.Namespace) -> tuple[HeadConfig | None, TreeShape, Mesh]:
    """The head, the trees and the mesh that the flags describe.

    Raises:
        ValueError: a flag is out of range, or model or batch cannot be split over the mesh.
    """
    for name, least in _LEAST.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not args.budget and "draft" in args.step:
        raise ValueError("--step draft has nothing to plan with --budget 0, which is plain decoding")
    target, head, tree = TARGETS[args.model], None, TreeShape(0, 1, 0)
    if args.budget:
        head = head_shape(target, block_size=args.block_size, parent_rank=args.parent_rank)
        tree = TreeShape(args.budget, min(args.tree_width, target.vocab_size), head.block_size - 1)
    mesh = make_mesh(args.mesh, gpu_devices(args.chip, 8))
    if problems := misfits(target, mesh):
        raise ValueError(f"{args.model} cannot be split over {describe(mesh.shape)}: {'; '.join(problems)}")
    check_batch(args.batch_size, mesh)
    if args.attention == "pallas":
        heads = target.num_attention_heads, target.num_key_value_heads, target.head_dim
        rows = args.batch_size // batch_ways(mesh)
        check_backend(Problem(rows, tree.nodes, *heads, args.context, None, jnp.dtype(jnp.bfloat16)), args.attention)
    return head, tree, mesh


def main() -> None:
    """The command: a JSON object a step; exit code 1 where one does not fit, 2 for flags that cannot be planned."""
    args = _make_parser().parse_args()
    target = TARGETS[args.model]
    try:
        head, tree, mesh = _shapes(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    device: Where = mesh if mesh.size > 1 else mesh.devices.flat[0]
    sizes = {"batch": args.batch_size, "capacity": args.context, "device": device, "attention": args.attention}
    steps = tuple(step for step in args.step if step != "verify")
    plans = plan_steps(target, head, tree=tree, search_steps=args.search_steps, steps=steps, **sizes) if steps else {}
    if "verify" in args.step:
        taps = head.target_layer_ids if head else ()
        plans["verify"] = plan_verify(target, nodes=tree.nodes, tap_ids=taps, **sizes)
    for step, plan in plans.items():
        print(json.dumps({"step": step, "chip": args.chip, "mesh": describe(mesh.shape), "model": args.model,
                          "batch_size": args.batch_size, "context": args.context, "nodes": tree.nodes,
                          "attention": args.attention, **_fields(plan, CHIPS[args.chip])}), flush=True)  # fmt: skip
    raise SystemExit(any(plan.total > CHIPS[args.chip].memory for plan in plans.values()))


if __name__ == "__main__":
    main()
