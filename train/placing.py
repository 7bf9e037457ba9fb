"""A batch's rows on the devices of a mesh, and the processes that read them."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding

from jetspec_jax.sharding import RULES, batch_ways, describe, make_mesh, spec

Arrays = TypeVar("Arrays")


class Share(NamedTuple):
    """Which of `of` equal parts of every batch this process reads."""

    part: int
    of: int


def training_mesh(text: str) -> Mesh | None:
    """The mesh that `--config.mesh` names; None for "" , which is one device.

    Raises:
        ValueError: it is no mesh, needs more devices than there are, or leaves out devices of other processes.
    """
    if not text:
        if jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes need a mesh of their {jax.device_count()} devices: "
                f"--config.mesh=data={jax.device_count()}, for example"
            )
        return None
    mesh = make_mesh(text)
    if jax.process_count() > 1 and mesh.size != jax.device_count():
        raise ValueError(
            f"--config.mesh {describe(mesh.shape)} has {mesh.size} devices, and the {jax.process_count()} processes "
            f"have {jax.device_count()}; every one must be used"
        )
    return mesh


def check_rows(batch_size: int, micro_batches: int, mesh: Mesh | None) -> None:
    """Raises ValueError unless every device gets as many rows of every part of a batch."""
    ways = batch_ways(mesh)
    if batch_size % (ways * micro_batches):
        split = f"{ways * micro_batches} ({'*'.join(RULES['batch'])}={ways} of the mesh, {micro_batches} micro-batches)"
        raise ValueError(f"--config.batch_size {batch_size} must be a multiple of {split}")


def share_of_rows(batch_size: int, mesh: Mesh | None) -> Share:
    """The part of each batch whose rows lie on this process's devices.

    Processes whose devices hold the same rows (the mesh splits weights over them) read the same part.

    Raises:
        ValueError: this process's rows are no such part.
    """
    if mesh is None:
        return Share(0, 1)
    places = NamedSharding(mesh, spec("batch")).addressable_devices_indices_map((batch_size,))
    rows = sorted({row for index in places.values() for row in range(*_slice(index).indices(batch_size))})
    if batch_size % len(rows) or rows[0] % len(rows) or rows[-1] - rows[0] + 1 != len(rows):
        raise ValueError(
            f"--config.mesh {describe(mesh.shape)} gives process {jax.process_index()} rows {rows} of {batch_size}, "
            "which lie apart; let data*fsdp be a multiple of the number of processes, or divide it"
        )
    return Share(rows[0] // len(rows), batch_size // len(rows))


def _slice(index: tuple[slice, ...] | None) -> slice:
    assert index is not None  # the device is of the sharding's mesh
    return index[0]


def place_rows(arrays: Arrays, mesh: Mesh | None) -> Arrays:
    """This process's rows, NumPy arrays `[b, ...]`, as its part of arrays `[B, ...]` over all devices of a mesh."""
    if mesh is None:
        return arrays
    sharding = NamedSharding(mesh, spec("batch"))
    placed: Arrays = jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), arrays)
    return placed
