"""Several processes as one run: found in what the cluster sets, or told by flags.

Every process starts the same command. Each then sees the devices of all, reads its own share of the data, and takes
part in every step; process 0 writes the metrics.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
from absl import flags

# What each launcher sets for every process of a run, and where it says how many there are, if it does. A pod of
# Kubernetes is a part of a run only if its Job is indexed.
_CLUSTERS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "slurm": (("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"), "SLURM_NTASKS"),
    "ompi": (("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE"),
    "k8s": (("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"), None),
}
FLAGS = ("coordinator", "process_id", "num_processes", "cluster")
"""The flags of `define_flags`, as arguments of `join`."""

_TIMEOUT = 300  # seconds that processes wait for one another


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """`--coordinator`, `--process_id`, `--num_processes` and `--cluster`, the arguments of `join`."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where all meet.", flag_values=values)
    flags.DEFINE_integer("process_id", None, "This process, from 0.", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("num_processes", None, "How many run together.", lower_bound=1, flag_values=values)
    flags.DEFINE_enum(
        "cluster", "auto", ["auto", "none", *_CLUSTERS, "mpi4py"],
        "What started the processes, where --coordinator is not given; mpi4py is not found by itself.",
        flag_values=values,
    )  # fmt: skip


def join(
    coordinator: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    cluster: str = "auto",
    *,
    environment: Mapping[str, str] | None = None,
    timeout: int = _TIMEOUT,
) -> bool:
    """Joins the run's other processes, and returns whether there are any. Call it before anything uses a device.

    Args:
        coordinator: HOST:PORT at which process 0 listens; with it the two numbers must be given, and nothing is looked
            for.
        process_id, num_processes: this process, from 0, of how many.
        cluster: "auto" (Slurm, Open MPI and indexed Jobs of Kubernetes), "none", or one by name.
        environment: variables to look in; this process's by default.
        timeout: seconds to wait for the others.

    Raises:
        ValueError: flags are missing or do not fit, or the others were not met.
    """
    told = {"--coordinator": coordinator, "--process_id": process_id, "--num_processes": num_processes}
    missing = [name for name, value in told.items() if value is None]
    if not missing:
        _check(str(coordinator), int(process_id or 0), int(num_processes or 0))
        _initialize(timeout, coordinator_address=coordinator, num_processes=num_processes, process_id=process_id)
        return True
    if len(missing) < len(told):
        raise ValueError(f"{', '.join(missing)} must be given too: several processes need all of {', '.join(told)}")
    found = _found(os.environ if environment is None else environment) if cluster == "auto" else cluster
    if found in (None, "none"):
        return False
    # JAX finds Kubernetes by itself, and has no name for it.
    _initialize(timeout, **({} if found == "k8s" else {"cluster_detection_method": found}))
    return True


def _check(coordinator: str, process_id: int, num_processes: int) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator must be HOST:PORT, such as 10.0.0.1:1234; got {coordinator!r}")
    if process_id >= num_processes:
        raise ValueError(f"--process_id must be below --num_processes={num_processes}, got {process_id}")


def _found(environment: Mapping[str, str]) -> str | None:
    """The cluster whose variables are all set, unless it says that there is one process only."""
    for name, (marks, count) in _CLUSTERS.items():
        if all(mark in environment for mark in marks) and (count is None or environment[count] != "1"):
            return name
    return None


def _initialize(timeout: int, **arguments: Any) -> None:
    try:
        jax.distributed.initialize(initialization_timeout=timeout, **arguments)
    except (RuntimeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise ValueError(
            f"the processes of the run did not meet ({given}): {error}; start as many as there should be, with one "
            "--coordinator that all can reach, or --cluster=none for a run of one process"
        ) from error
