"""A run that is killed, however often and whenever, ends as one that was not."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
from run_case import write_case
from safetensors.numpy import load_file

KILLS = int(os.environ.get("JETSPEC_TEST_KILLS", "2"))
STEPS = 30 + 15 * KILLS


def start(config, out, cache):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "train.distill", "--config", str(config), f"--config.out={out}", "--resume=auto"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def wait_for(condition, process, seconds):
    """Returns when `condition` holds, the process has ended, or time is up."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def test_a_run_that_is_killed_again_and_again_gives_the_same_head(tmp_path):
    """SIGKILL at random moments, from the imports to the end; SIGTERM once. Weights are equal to the bit. (More kills:
    JETSPEC_TEST_KILLS=10.)"""
    config, cache = write_case(tmp_path, STEPS), tmp_path / "cache"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    finish(start(config, whole, cache))
    seconds = time.monotonic() - began

    rng, reached = random.Random(os.environ.get("JETSPEC_TEST_SEED", "0")), []
    for kill in range(KILLS):
        process, before = start(config, killed, cache), newest(killed)
        if kill % 3 == 2:  # before the first step, as often as not
            wait_for(lambda: False, process, rng.uniform(0, seconds / 2))
        else:  # while steps are taken and checkpoints are written
            wait_for(lambda before=before: newest(killed) > before, process, 60)
            time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        reached.append(newest(killed))
    print(f"newest of {STEPS} after each kill: {reached}; uninterrupted {seconds:.1f} s")
    assert 0 < reached[0] <= reached[-1] < STEPS

    process = start(config, killed, cache)
    before = newest(killed)
    wait_for(lambda: newest(killed) > before, process, 60)
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == 143 and "ended by SIGTERM; saved" in output, output
    assert before < newest(killed) < STEPS
    assert f"continuing after step {newest(killed)} of {STEPS}" in finish(start(config, killed, cache))
    have, want = (load_file(out / "model.safetensors") for out in (killed, whole))
    for name in want:
        np.testing.assert_array_equal(have[name], want[name], err_msg=name)


def newest(out):
    return max((int(path.name) for path in (out / "checkpoints").glob("*") if path.name.isdecimal()), default=0)
