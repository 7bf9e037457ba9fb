"""NVIDIA GPUs to compile for on a machine that has none.

XLA compiles from a description of the chip. With the CUDA plugin's wheels installed (`pip install -e '.[plan]'`; no
driver, no GPU) this gives devices to lower for: the result answers `memory_analysis()` and `as_text()`, may be sharded
over any number of GPUs, and cannot run.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """What XLA must know of a GPU. Sizes in bytes, bandwidth in bytes/s, clock in GHz.

    `accelerated` says whether the architecture has instructions of its own (sm_90a, sm_100a). Two are for us, from data
    sheets: `tensor`, dense bfloat16 FLOP/s, and `link`, NVLink's bytes/s from a GPU to the others of its host.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    memory: int
    bandwidth: int
    l2: int
    shared_per_core: int
    shared_per_block: int
    fpus_per_core: int
    clock: float
    tensor: float
    link: float

    @property
    def architecture(self) -> str:
        """As compilers call it: sm_80, sm_90a."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.accelerated else "")

    @property
    def float32(self) -> float:
        """Float32 FLOP/s outside tensor cores."""
        return 2e9 * self.cores * self.fpus_per_core * self.clock


CHIPS = {
    "a100": Chip(
        "NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 85_100_068_864, 2_039_040_000_000, 41_943_040, 167_936, 166_912,
        64, 1.41, 312e12, 300e9,
    ),
    "h100": Chip(
        "NVIDIA H100 80GB HBM3", (9, 0), True, 132, 84_942_979_072, 3_352_320_000_000, 52_428_800, 233_472, 232_448,
        128, 1.98, 989e12, 450e9,
    ),
    "h200": Chip(
        "NVIDIA H200", (9, 0), True, 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 233_472, 232_448,
        128, 1.98, 989e12, 450e9,
    ),
    "b200": Chip(
        "NVIDIA B200", (10, 0), True, 148, 191_514_411_008, 7_672_320_000_000, 132_644_864, 233_472, 232_448, 128,
        1.965, 2250e12, 900e9,
    ),
}  # fmt: skip


def gpu_devices(chip: str, count: int = 1) -> list[jax.Device]:
    """Compile-only devices: `count` GPUs of one host.

    Raises:
        ValueError: the chip is unknown, or the CUDA plugin is not installed.
    """
    if chip not in CHIPS:
        raise ValueError(f"unknown chip {chip!r}; known are {', '.join(CHIPS)}")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax.experimental import topologies

    shape = f"1x{count}x1"  # hosts x GPUs per host x 1
    try:
        description = topologies.get_topology_desc(
            topology_name=shape, platform="cuda", topology=shape, target_config=_target_config(CHIPS[chip])
        )
    except RuntimeError as error:
        raise ValueError(f"cannot describe GPUs: {error}; install the extra: pip install -e '.[plan]'") from None
    return list(description.devices)


def compiling_for(kind: str) -> contextlib.AbstractContextManager[object]:
    """While entered, what is traced and lowered is for this kind of GPU (the name of a chip, a device's `device_kind`).

    Kernels choose their tiles for it, and Pallas, which from JAX 0.11 on wants to know a GPU, lowers for it.
    """
    [chip] = [chip for chip in CHIPS.values() if chip.name == kind]
    abstract = jax.sharding.AbstractDevice(chip.name, chip.cores, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=abstract))


def chip_in_use() -> Chip:
    """The GPU that is being traced for: `compiling_for`'s, else this machine's, else an H100."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform == "gpu":
        known = [chip for chip in CHIPS.values() if chip.name == described.device_kind]
        if known:
            return known[0]
    if jax.default_backend() == "gpu":
        return _described(jax.devices()[0])
    return CHIPS["h100"]


def _described(device: jax.Device) -> Chip:
    """A GPU of this machine; of one that is not in `CHIPS`, what it says of itself, and otherwise an A100's figures.

    One that is not NVIDIA's (AMD's say gfx942) has capability (0, 0).
    """
    for chip in CHIPS.values():
        if chip.name == device.device_kind:
            return chip
    numbers = str(device.compute_capability).split(".")
    major, minor = map(int, numbers) if len(numbers) == 2 and all(map(str.isdecimal, numbers)) else (0, 0)
    like = CHIPS["a100"]
    return like._replace(
        name=device.device_kind,
        capability=(major, minor),
        cores=device.core_count,
        shared_per_block=getattr(device, "shared_memory_per_block_optin", like.shared_per_block),
    )


def _target_config(chip: Chip) -> str:
    """The chip as XLA's GpuTargetConfigProto, in text form; limits that all of these chips share are literal."""
    extension = "ACCELERATED_FEATURES" if chip.accelerated else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: {chip.shared_per_core}
  shared_memory_per_block_optin: {chip.shared_per_block}
  core_count: {chip.cores} fpus_per_core: {chip.fpus_per_core} clock_rate_ghz: {chip.clock}
  memory_bandwidth: {chip.bandwidth} l2_cache_size: {chip.l2} device_memory_size: {chip.memory}
  cuda_compute_capability {{
    major: {chip.capability[0]} minor: {chip.capability[1]} feature_extension: {extension}
  }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.name}"
"""
