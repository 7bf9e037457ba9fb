"""The decode loop compiles for GPUs that this machine has not, and updates its state in place there."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kernels.topology import CHIPS, gpu_devices

SCRIPT = """
import json
import jax.numpy as jnp
from infer.plan import plan_decode
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.tree import TreeShape
from kernels.topology import gpu_devices

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16)
target = TargetConfig(**sizes, num_hidden_layers=2)
head = HeadConfig(**sizes, num_hidden_layers=1, block_size=4, num_target_layers=2, target_layer_ids=(0, 1),
                  mask_token_id=63, causal_head=True)
[device] = gpu_devices("h100")
plan = plan_decode(target, head, batch=2, capacity=4096, tree=TreeShape(8, 4, 3), device=device, dtype=jnp.bfloat16)
print(json.dumps(plan._asdict()))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin's wheels: pip install -e '.[plan]'",
)
def test_the_loop_on_an_h100_updates_its_state_in_place():
    """The whole state is aliased, and nothing as large as a cache array is copied in a round. A process of its own: the
    plugin is loaded once, before any test could say how."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["aliased"] == plan["state"]
    assert plan["copies"] == []


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown chip 'h3'") as error:
        gpu_devices("h3")
    assert all(chip in str(error.value) for chip in CHIPS)
