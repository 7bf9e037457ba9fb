"""The decode loop compiles for GPUs that this machine has not, and updates its state in place there."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kernels.topology import CHIPS, gpu_devices

SCRIPT = """
import dataclasses, json
from infer.plan import plan_steps
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.sharding import make_mesh
from jetspec_jax.tree import TreeShape
from kernels.topology import gpu_devices

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16)
target = TargetConfig(**sizes, num_hidden_layers=2)
head = HeadConfig(**sizes, num_hidden_layers=1, block_size=4, num_target_layers=2, target_layer_ids=(0, 1),
                  mask_token_id=63, causal_head=True, parent_rank=4)
for device in (gpu_devices("h100")[0], make_mesh("data=2,model=2", gpu_devices("h100", 4))):
    plans = plan_steps(target, head, batch=2, capacity=4096, tree=TreeShape(8, 4, 3), device=device,
                       steps=("prefill", "decode", "draft"))
    fields = {name: plan._replace(work=dataclasses.asdict(plan.work))._asdict() for name, plan in plans.items()}
    print(json.dumps(fields))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin's wheels: pip install -e '.[plan]'",
)
def test_steps_on_h100s_update_their_state_in_place():
    """On one and on four: the whole state is aliased, and no weight or cache array is copied in a round or for a chunk
    of a prompt. A process of its own: the plugin is loaded once, before any test could say how."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    one, four = map(json.loads, done.stdout.splitlines())
    for plans in (one, four):
        assert plans["decode"]["aliased"] == plans["decode"]["state"]
        assert plans["decode"]["copies"] == plans["prefill"]["copies"] == []
        assert 0 < plans["draft"]["work"]["bytes"] < plans["decode"]["work"]["bytes"]
        assert 0 < sum(plans["draft"]["work"]["flops"].values()) < sum(plans["decode"]["work"]["flops"].values())
    assert four["decode"]["weights"] < 0.6 * one["decode"]["weights"]
    assert four["decode"]["state"] < 0.3 * one["decode"]["state"]


def test_an_unknown_chip_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown chip 'h3'") as error:
        gpu_devices("h3")
    assert all(chip in str(error.value) for chip in CHIPS)
