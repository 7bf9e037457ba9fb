"""Where arrays live on several devices: logical axes of every array, and one table from them to mesh axes.

"model" splits heads, MLPs and vocabulary (tensor parallelism), "expert" experts, "data" the batch, and "fsdp" both the
batch and, for memory, every matrix. A mesh always has the axes of `MESH_AXES`, most of size 1. Code that computes
names logical axes only (`constrain`, `sharded`), and without a mesh in force (`use`) both do nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig

MESH_AXES = ("data", "fsdp", "model", "expert")

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "vocab": ("model",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "mlp": ("model",),
    "taps": ("model",),
    "expert": ("expert",),
    "embed": ("fsdp",),
}
"""Logical axis to the mesh axes that split it; what is not here is whole on every device."""

Axes = tuple[str | None, ...]

# The end of a parameter's name to the logical axes of its array; the first that fits counts.
_PARAMETERS: tuple[tuple[str, Axes], ...] = (
    ("experts.gate_proj.weight", ("expert", "mlp", "embed")),
    ("experts.up_proj.weight", ("expert", "mlp", "embed")),
    ("experts.down_proj.weight", ("expert", "embed", "mlp")),
    ("embed_tokens.weight", ("vocab", "embed")),
    ("lm_head.weight", ("vocab", "embed")),
    ("q_proj.weight", ("heads", "embed")),
    ("q_proj.bias", ("heads",)),
    ("k_proj.weight", ("kv_heads", "embed")),
    ("k_proj.bias", ("kv_heads",)),
    ("v_proj.weight", ("kv_heads", "embed")),
    ("v_proj.bias", ("kv_heads",)),
    ("o_proj.weight", ("embed", "heads")),
    ("o_proj.bias", (None,)),
    ("gate_proj.weight", ("mlp", "embed")),
    ("up_proj.weight", ("mlp", "embed")),
    ("down_proj.weight", ("embed", "mlp")),
    ("gate.weight", (None, "embed")),
    ("fc.weight", ("embed", "taps")),
    ("parent.embed.weight", ("vocab", None)),
    ("parent.unembed.weight", ("vocab", None)),
    ("norm.weight", (None,)),
)


def make_mesh(sizes: str | Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh such as "data=1,model=4"; axes that are left out have size 1.

    Args:
        sizes: axes of `MESH_AXES` and their sizes, as text or as a mapping.
        devices: to take from, in order; all of this process's backend by default.

    Raises:
        ValueError: an axis is unknown or given twice, a size is no positive integer, or there are too few devices.
    """
    if not isinstance(sizes, str):
        sizes = ",".join(f"{name}={size}" for name, size in sizes.items()) or "data=1"
    shape = parse_mesh(sizes)
    devices = jax.devices() if devices is None else devices
    needed = math.prod(shape.values())
    if needed > len(devices):
        raise ValueError(
            f"mesh {describe(shape)} needs {needed} devices, there are {len(devices)} ({devices[0].platform}); "
            "lower a size"
        )
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape), devices=tuple(devices[:needed])
    )


def parse_mesh(text: str) -> dict[str, int]:
    """The size of every axis of `MESH_AXES` in a text such as "data=1,model=4".

    Raises:
        ValueError: an axis is unknown or given twice, or a size is no positive integer.
    """
    shape = dict.fromkeys(MESH_AXES, 1)
    seen: set[str] = set()
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: expected AXIS=SIZE,... with axes {', '.join(MESH_AXES)} and sizes from 1 on, "
                f"got {part!r}"
            )
        if name in seen:
            raise ValueError(f"mesh {text!r} gives the axis {name} twice")
        seen.add(name)
        shape[name] = int(size)
    return shape


def describe(shape: Mapping[str, int]) -> str:
    """ "data=2,model=4": a mesh's axes, those of size 1 left out unless all are."""
    return ",".join(f"{name}={size}" for name, size in shape.items() if size > 1) or "data=1"


def spec(*axes: str | None) -> PartitionSpec:
    """The partition of an array with these logical axes.

    Raises:
        ValueError: an axis is not in `RULES`, or two axes of the array would be split by the same mesh axis.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"no rule for the logical axis {unknown[0]!r}; known are {', '.join(RULES)}")
    parts = [() if axis is None else RULES[axis] for axis in axes]
    used = [name for part in parts for name in part]
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise ValueError(f"logical axes {axes} would split one array twice by the mesh axis {', '.join(twice)}")
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))


def parameter_spec(name: str) -> PartitionSpec:
    """The partition of the parameter with this (Hugging Face) name; experts are one array, without their number.

    Raises:
        ValueError: the table knows no such parameter.
    """
    for end, axes in _PARAMETERS:
        if name.endswith(end):
            return spec(*axes)
    raise ValueError(f"no logical axes are stated for the parameter {name}")


def parameter_sharding(name: str, mesh: Mesh | None) -> jax.sharding.Sharding:
    """Where the parameter of this name lies on a mesh; without one, on the default device."""
    if mesh is None:
        return SingleDeviceSharding(default_device())
    return NamedSharding(mesh, parameter_spec(name))


def default_device() -> jax.Device:
    """Where arrays without a mesh lie: JAX's `jax_default_device`, a device or a platform, else the process's first."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def misfits(config: DecoderConfig, mesh: Mesh) -> list[str]:
    """Why a model's arrays cannot be split evenly over a mesh; empty when they can."""
    sizes: dict[str, tuple[str, int]] = {
        "num_attention_heads": ("heads", config.num_attention_heads),
        "num_key_value_heads": ("kv_heads", config.num_key_value_heads),
        "intermediate_size": ("mlp", config.intermediate_size),
        "hidden_size": ("embed", config.hidden_size),
        "vocab_size": ("vocab", config.vocab_size),
    }
    if isinstance(config, TargetConfig) and config.num_experts:
        sizes["num_experts"] = ("expert", config.num_experts)
        sizes["moe_intermediate_size"] = ("mlp", config.moe_intermediate_size)
    if isinstance(config, HeadConfig):
        sizes["len(target_layer_ids) * hidden_size"] = ("taps", len(config.target_layer_ids) * config.hidden_size)
    found = []
    for field, (axis, size) in sizes.items():
        ways = math.prod(mesh.shape[name] for name in RULES[axis])
        if size % ways:
            found.append(f"{field} {size} is not a multiple of {'*'.join(RULES[axis])}={ways}")
    return found


def batch_ways(mesh: Mesh | None) -> int:
    """How many parts a mesh splits a batch's rows into; 1 without one."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in RULES["batch"])


def check_batch(rows: int, mesh: Mesh) -> None:
    """Raises ValueError unless a batch of so many rows can be split evenly over a mesh."""
    ways = batch_ways(mesh)
    if rows % ways:
        raise ValueError(
            f"a batch of {rows} cannot be split over {'*'.join(RULES['batch'])}={ways} of the mesh "
            f"{describe(mesh.shape)}; make --batch-size a multiple of {ways}, or lower the mesh's axis"
        )


def use(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """`mesh` in force; None changes nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def place(x: Any, mesh: Mesh | None, *axes: str | None) -> Any:
    """Host array `x` on the devices of `mesh`, with these logical axes; as it is without a mesh."""
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, spec(*axes)))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, which the compiler is to split by its logical axes over the mesh in force."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))


def parts(axis: str) -> int:
    """Into how many parts the mesh in force splits a logical axis; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in RULES[axis])


def part_index(axis: str) -> jax.Array | int:
    """Inside `sharded`, which part of a logical axis this device holds; 0 without a mesh in force."""
    return 0 if jax.sharding.get_abstract_mesh().empty else jax.lax.axis_index(RULES[axis])


def total(x: jax.Array, *axes: str) -> jax.Array:
    """Inside `sharded`, the sum of every device's `x` over the parts of logical axes; `x` without a mesh in force."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.psum(x, tuple(name for axis in axes for name in RULES[axis]))


def sharded(function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Callable[..., Any]:
    """`function` run on every device's part of its arguments; as it is without a mesh in force.

    Args:
        inputs: per argument a `PartitionSpec` or a pytree of them.
        outputs: likewise of the result, whose parts must be complete (`total` inside, where they are sums).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)
