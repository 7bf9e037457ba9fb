"""Several processes are one run: they meet, read rows of their own, and take the step that one process takes."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from train import distributed

ROOT = pathlib.Path(__file__).parents[1]
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def start(devices, *arguments):
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    env = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    command = [sys.executable, str(ROOT / "tests" / "distributed_worker.py"), *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(processes):
    """Waits for all; fails with the output of one that fails, and leaves none behind."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def test_two_processes_of_two_devices_take_the_step_of_one_process(tmp_path):
    """Loss and gradients, to 1e-5: of one process with four devices, and of one device."""
    mesh, coordinator = "data=2,fsdp=2", f"127.0.0.1:{free_port()}"
    end([start(2, tmp_path / "two", mesh, coordinator, i, 2) for i in range(2)])
    end([start(4, tmp_path / "four", mesh), start(1, tmp_path / "one")])
    two, four, one = (np.load(tmp_path / f"{name}.npz") for name in ("two", "four", "one"))
    assert [int(results["devices"]) for results in (two, four, one)] == [4, 4, 1]
    assert float(np.abs(one["arr_0"]).max()) > 0
    for other in (four, one):
        assert other.files == two.files
        for name in two.files:
            if name != "devices":
                np.testing.assert_allclose(two[name], other[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (SLURM, "slurm"),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}, None),  # an allocation, without srun
        ({"OMPI_MCA_orte_hnp_uri": "x", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "ompi"),
        (KUBERNETES, "k8s"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
    ],
)
def test_a_cluster_is_found_by_what_it_sets_for_every_process(environment, found, monkeypatch):
    """And only then are others waited for."""
    calls = []
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    assert distributed.join(environment=environment) == (found is not None)
    told = {"cluster_detection_method": found} if found not in (None, "k8s") else {}  # JAX has no name for that one
    assert [{k: v for k, v in call.items() if k != "initialization_timeout"} for call in calls] == [told] * bool(found)


def test_flags_come_before_what_the_cluster_sets(monkeypatch):
    calls = []
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    assert distributed.join("10.0.0.1:1234", 0, 2, environment=SLURM)
    assert not distributed.join(cluster="none", environment=SLURM)
    [call] = calls
    assert (call["coordinator_address"], call["process_id"], call["num_processes"]) == ("10.0.0.1:1234", 0, 2)
    assert "cluster_detection_method" not in call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1:1234", None, 2), "--process_id must be given too"),
        ((None, 0, None), "--coordinator, --num_processes must be given too"),
        (("10.0.0.1", 0, 2), "--coordinator must be HOST:PORT"),
        (("10.0.0.1:1234", 2, 2), "--process_id must be below --num_processes=2"),
    ],
)
def test_flags_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        distributed.join(*arguments)


def test_processes_that_are_not_met_are_an_error_that_says_what_to_do(monkeypatch):
    def late(**arguments):
        raise RuntimeError("DEADLINE_EXCEEDED")

    monkeypatch.setattr(distributed.jax.distributed, "initialize", late)
    with pytest.raises(ValueError, match=r"did not meet .*10\.0\.0\.1:1234.*DEADLINE_EXCEEDED.*--cluster=none"):
        distributed.join("10.0.0.1:1234", 0, 2)
