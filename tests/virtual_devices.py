"""Eight virtual CPU devices: a test module that needs them runs itself once more, in a process that has them."""

import os
import pathlib
import subprocess
import sys

COUNT = 8
_MARK = "JETSPEC_TEST_DEVICES"


def inside():
    """Whether this process has the devices."""
    return os.environ.get(_MARK) == str(COUNT)


def run_again(module):
    """Runs the tests of `module` (a path) in a process with the devices; fails with its output where one fails."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={COUNT}"
    env = {**os.environ, _MARK: str(COUNT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(module)]
    done = subprocess.run(command, env=env, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
