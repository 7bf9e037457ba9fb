"""The kernel compiles for GPUs that this machine has not, within their limits; so does a verify step that uses it."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from kernels.topology import CHIPS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin's wheels: pip install -e '.[plan]'",
)

INSPECT = """
import json, sys
import jax.numpy as jnp
from kernels.pallas.inspect import inspect
from kernels.pallas.tree_attention import Problem
from kernels.pallas.tree_attention.tiles import shared_bytes

for fields in json.loads(sys.argv[2]):
    problem = Problem(*fields[:-1], jnp.dtype(fields[-1]))
    report = inspect(problem, sys.argv[1])
    bound = shared_bytes(report.config, problem.head_dim, problem.dtype)
    print(json.dumps(report._asdict() | {"config": str(report.config), "shared_bound": bound, "problem": fields}))
"""

# batch, nodes, heads, kv heads, head_dim, capacity, page size, dtype: every shipped tile at its widest head.
PROBLEMS = [
    (1, 1, 32, 8, 128, 32_768, None, "bfloat16"),
    (1, 16, 32, 8, 128, 4096, None, "bfloat16"),
    (1, 256, 32, 8, 128, 32_768, None, "bfloat16"),
    (32, 256, 32, 8, 128, 4096, None, "float16"),
    (1, 256, 32, 8, 128, 4096, 16, "bfloat16"),
    (1, 1, 16, 8, 256, 4096, None, "bfloat16"),
    (1, 256, 16, 8, 256, 4096, None, "bfloat16"),
    (1, 1, 32, 8, 128, 4096, None, "float32"),
    (1, 256, 16, 8, 256, 4096, None, "float32"),
]

VERIFY = """
import json
import jax
import jax.numpy as jnp
from infer.plan import TARGETS, plan_verify
from jetspec_jax.shapes import head_shape
from jetspec_jax import cache
from kernels.pallas.tree_attention import unpack_mask
from kernels.topology import gpu_devices

def einsum_attention(query, key, value, cache_key, cache_value, lengths, mask, backend):
    batch, nodes, heads, width = query.shape
    keys = jnp.concatenate([cache_key.swapaxes(1, 2), key], 1)
    values = jnp.concatenate([cache_value.swapaxes(1, 2), value], 1)
    prefix = jnp.arange(cache_key.shape[2])[None] < lengths[:, None]
    prefix = jnp.broadcast_to(prefix[:, None], (batch, nodes, prefix.shape[1]))
    seen = jnp.concatenate([prefix, unpack_mask(mask, nodes)], -1)[:, None, None]
    grouped = query.reshape(batch, nodes, key.shape[2], -1, width)
    scores = jnp.einsum("bnkgd,bmkd->bkgnm", grouped, keys, preferred_element_type=jnp.float32) * width**-0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1).astype(value.dtype)
    return jnp.einsum("bkgnm,bmkd->bnkgd", weights, values).reshape(query.shape)

[device] = gpu_devices("h100")
taps = head_shape(TARGETS["qwen3-8b"]).target_layer_ids
sizes = dict(batch=1, capacity=32_768, nodes=256, device=device, tap_ids=taps)
found = {name: plan_verify(TARGETS["qwen3-8b"], **sizes, attention=name).temporaries for name in ("auto", "xla")}
cache.tree_attention = einsum_attention
print(json.dumps(found | {"einsum": plan_verify(TARGETS["qwen3-8b"], **sizes).temporaries}))
"""


def run(script, *args):
    """The lines that a script prints, in a process of its own: the plugin is loaded once, before tests say how."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_shipped_tiles_spill_no_register_and_use_tensor_cores(chip):
    """Every shipped tile: no spills, shared memory within the chip's and our limit, the chip's own products."""
    products = {"a100": "mma.sync", "h100": "wgmma.mma_async", "b200": "tcgen05.mma"}[chip]
    for report in run(INSPECT, chip, json.dumps(PROBLEMS)):
        assert report["spilled"] == 0, report
        assert report["shared"] <= min(report["shared_bound"], CHIPS[chip].shared_per_block), report
        nodes, dtype = report["problem"][1], report["problem"][-1]
        instructions = report["instructions"]
        if dtype == "float32":
            assert not instructions.keys() & {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}, report  # whole products
        else:
            assert (products if nodes > 1 else "mma.sync") in instructions, report
            assert "cp.async.cg" in instructions, report  # keys are fetched ahead of their use


def test_a_verify_step_of_qwen3_8b_at_32k_needs_little_memory():
    """256 nodes on an H100: below 300 MB with the kernel and with XLA's chunks, above 1 GB with one einsum."""
    [temporaries] = run(VERIFY)
    assert temporaries["auto"] < 300e6
    assert temporaries["xla"] < 300e6
    assert temporaries["einsum"] > 1e9
