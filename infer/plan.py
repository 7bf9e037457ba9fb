"""`python -m infer.plan`: compiles the decode loop for a GPU that need not be there, and prints the memory it takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetspec_jax.cache import KVCache
from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig, default_target_layer_ids
from jetspec_jax.decode import Drafter, LoopSpec, NoDrafter, decode, prefill
from jetspec_jax.head import DraftHead
from jetspec_jax.ops import argmax
from jetspec_jax.sampling import Sampling
from jetspec_jax.target import TargetModel
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import BACKENDS, Backend
from kernels.topology import CHIPS, compiling_for, gpu_devices

_QWEN3_8B = DecoderConfig(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
)  # fmt: skip
TARGETS = {"qwen3-8b": TargetConfig(**dataclasses.asdict(_QWEN3_8B))}
HEADS = {
    "qwen3-8b": HeadConfig(
        **(dataclasses.asdict(_QWEN3_8B) | {"num_hidden_layers": 5}),
        block_size=16, num_target_layers=36, mask_token_id=151_669, causal_head=True,
        target_layer_ids=default_target_layer_ids(36, 5),
    )
}  # fmt: skip


class Plan(NamedTuple):
    """Bytes of one compiled decode loop, and the copies inside it.

    weights, state: arguments. aliased: of the state, updated in place. temporaries: XLA's scratch at its peak.
    copies: "dtype[shape]" of each copy, inside the loop, of at least `threshold` bytes.
    """

    weights: int
    state: int
    aliased: int
    temporaries: int
    copies: list[str]


def plan_decode(
    target: TargetConfig,
    head: HeadConfig | None,
    *,
    batch: int,
    capacity: int,
    tree: TreeShape,
    device: jax.Device | None,
    dtype: jnp.dtype = jnp.bfloat16,
    attention: Backend = "auto",
    threshold: int | None = None,
) -> Plan:
    """Compiles `decode` from shapes alone.

    Args:
        device: from `gpu_devices`; None compiles for this machine.
        attention: the backend of `tree_attention`.
        threshold: bytes from which a copy is listed; the smallest cache array by default.
    """
    model, drafter, state = _shapes(target, head, batch, capacity, tree, dtype, attention)
    spec = LoopSpec(tree, (target.vocab_size - 1,), Sampling().mode)
    args = (model, drafter, state, jax.ShapeDtypeStruct((), jnp.int32), Sampling().knobs)
    compiled = _compile(decode, args, device, spec=spec)
    memory = compiled.memory_analysis()
    cache = min(_bytes(leaf) for leaf in jax.tree.leaves(state.cache))
    return Plan(
        weights=sum(map(_bytes, jax.tree.leaves((model, drafter)))),
        state=sum(map(_bytes, jax.tree.leaves(state))),
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        copies=large_copies(compiled.as_text(), threshold or cache),
    )


def plan_verify(
    target: TargetConfig,
    *,
    batch: int,
    capacity: int,
    nodes: int,
    device: jax.Device | None,
    tap_ids: tuple[int, ...] = (),
    dtype: jnp.dtype = jnp.bfloat16,
    attention: Backend = "auto",
) -> int:
    """XLA's temporaries, in bytes, of one verify step: the target over `nodes` behind a cache, and its choices."""

    def verify(model: TargetModel, tokens: jax.Array, cache: KVCache, lengths: jax.Array, mask: jax.Array) -> Any:
        out = model(tokens, lengths[:, None] + tokens, cache, lengths, mask, tap_ids)
        return argmax(model.logits(out.hidden)), out.taps, out.rows

    args = (
        jax.eval_shape(lambda: TargetModel(target, rngs=nnx.Rngs(0), dtype=dtype)),
        jax.ShapeDtypeStruct((batch, nodes), jnp.int32),
        jax.eval_shape(lambda: KVCache.zeros(target, batch, capacity, dtype, attention)),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, nodes, -(-nodes // 32)), jnp.uint32),
    )
    return _compile(jax.jit(verify), args, device).memory_analysis().temp_size_in_bytes


def _compile(function: Any, args: Any, device: jax.Device | None, **static: Any) -> Any:
    """`function` compiled for the shapes of `args` on `device`, from `gpu_devices`, or on this machine."""
    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), args)
    if device is None:
        return function.trace(*args, **static).lower().compile()
    with compiling_for(device.device_kind):
        return function.trace(*args, **static).lower(lowering_platforms=("cuda",)).compile()


def large_copies(text: str, threshold: int) -> list[str]:
    """Copies of at least `threshold` bytes in the computations of an optimised HLO module, entry excepted.

    What the entry copies it copies once a call; everything else here belongs to the loop.
    """
    inside = re.sub(r"^ENTRY .*?^}", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"= \(?(\w+)\[([\d,]*)\][^\n=]* copy(?:-start)?\(", inside)
    sized = [(f"{dtype}[{dims}]", _hlo_bytes(dtype, dims)) for dtype, dims in found]
    return [name for name, size in sized if size >= threshold]


def _shapes(
    target: TargetConfig,
    head: HeadConfig | None,
    batch: int,
    capacity: int,
    tree: TreeShape,
    dtype: jnp.dtype,
    attention: Backend,
) -> tuple[Any, Any, Any]:
    model = jax.eval_shape(lambda: TargetModel(target, rngs=nnx.Rngs(0), dtype=dtype))
    drafter: Drafter = NoDrafter()
    if head is not None:
        drafter = jax.eval_shape(lambda: DraftHead(head, rngs=nnx.Rngs(0), dtype=dtype))
    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((batch, capacity), jnp.int32)
    seeds = jax.ShapeDtypeStruct((batch,), jnp.uint32)
    state = jax.eval_shape(
        lambda *x: prefill(
            *x, Sampling().knobs, eos_ids=(), mode=Sampling().mode, chunk=min(512, capacity), attention=attention
        ),
        model, drafter, tokens, row, row, seeds,
    )  # fmt: skip
    return model, drafter, state


def _bytes(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8 * math.prod(leaf.shape)
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _hlo_bytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(int(d) for d in dims.split(",") if d) * (int(bits[0]) if bits else 8) // 8


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m infer.plan", description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="h100")
    parser.add_argument("--model", choices=sorted(TARGETS), default="qwen3-8b")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096, help="capacity of a row in tokens")
    parser.add_argument("--budget", type=int, default=256, help="0 plans plain decoding")
    parser.add_argument("--tree-width", type=int, default=8)
    parser.add_argument("--attention", choices=BACKENDS, default="auto", help="default: a kernel where one serves")
    parser.add_argument("--verify-step", action="store_true", help="plan one verify step in place of the whole loop")
    args = parser.parse_args()
    head = HEADS[args.model] if args.budget else None
    tree = TreeShape(args.budget, args.tree_width, head.block_size - 1) if head else TreeShape(0, 1, 0)
    try:
        [device] = gpu_devices(args.chip)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.verify_step:
        sizes = {"batch": args.batch_size, "capacity": args.context, "nodes": tree.nodes}
        taps = head.target_layer_ids if head else ()
        options = {"device": device, "tap_ids": taps, "attention": args.attention}
        temporaries = plan_verify(TARGETS[args.model], **sizes, **options)
        print(json.dumps({"chip": args.chip, "model": args.model, **sizes, "attention": args.attention,
                          "temporaries": temporaries}, indent=2))  # fmt: skip
        return
    plan = plan_decode(
        TARGETS[args.model], head, batch=args.batch_size, capacity=args.context, tree=tree, device=device,
        attention=args.attention,
    )  # fmt: skip
    total = plan.weights + plan.state + plan.temporaries
    print(json.dumps({"chip": args.chip, "model": args.model, "batch_size": args.batch_size, "context": args.context,
                      "nodes": tree.nodes, "attention": args.attention, **plan._asdict(), "total": total,
                      "fits": total <= CHIPS[args.chip].memory}, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
