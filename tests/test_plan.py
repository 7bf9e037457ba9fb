"""Plans of training runs: the configs for 8B and 30B-A3B fit eight H100s, and what does not fit says what to change.

Compiling for GPUs needs the CUDA plugin; it is done in a process of its own, since the plugin is loaded once.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from configs import moe, qwen3_8b
from jetspec_jax.shapes import target_shape
from jetspec_jax.sharding import make_mesh
from kernels.hlo import Work
from kernels.topology import CHIPS
from train.config import DistillConfig
from train.plan import USABLE, StepPlan, advice, plan_step, report

ROOT = pathlib.Path(__file__).parents[1]
H100 = CHIPS["h100"]
PLAN = StepPlan(
    target=2 * 10**9, head=10**9, optimizer=2 * 10**9, batch=0, outputs=10**9, temporaries=20 * 10**9,
    parameters=(8 * 10**9, 10**9), chunk=128, work=Work({"bf16": 989e12, "f32": 989e12}, 3.35232e12, {"all-gather": 9},
    {"all-gather": 45e9}), model_flops=989e12, seconds=30.0,
)  # fmt: skip
PLANNED = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin's wheels: pip install -e '.[plan]'",
)

# Two of the target's layers stand for all: of a layer more, a device holds its part of the weights, and up to a third
# of them gathered (XLA gathers o_proj and down_proj of all layers first). docs/training_plans.md has whole targets.
SCRIPT = """
import dataclasses, importlib, json, sys
from jetspec_jax.shapes import target_shape
from jetspec_jax.sharding import make_mesh
from kernels.topology import gpu_devices
from train.plan import plan_step

config = importlib.import_module("configs." + sys.argv[1]).get_config()
config.target_layer_ids = (0, 0, 1, 1, 1)
target = dataclasses.replace(target_shape(config.target), num_hidden_layers=2)
plan = plan_step(config, target, make_mesh(config.mesh, gpu_devices("h100", 8)))
fields = plan._replace(work=dataclasses.asdict(plan.work))._asdict()
print(json.dumps({**fields, "total": plan.total}))
"""


def run(*command):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@PLANNED
@pytest.mark.parametrize("config", [qwen3_8b, moe], ids=["8B", "30B-A3B"])
def test_the_papers_sizes_fit_eight_h100s(config):
    """And the program is what the method needs: few more products (experts in rounds multiply up to three rows for
    one), and lm_head gathered once, not per chunk."""
    done = run("-c", SCRIPT, config.__name__.removeprefix("configs."))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    settings = config.get_config()
    assert (settings.length, settings.block_size, settings.num_hidden_layers) == (3072, 16, 5)
    assert settings.anchors >= 256
    target = target_shape(settings.target)
    words = 2 * target.vocab_size * target.hidden_size * 2 / 8  # embeddings and lm_head
    layer = (plan["target"] - words) / 2
    assert plan["total"] + (target.num_hidden_layers - 2) * layer * (1 + 8 / 3) <= USABLE * H100.memory
    assert plan["model_flops"] < plan["work"]["flops"]["bf16"] < 1.5 * plan["model_flops"]
    assert plan["work"]["moved"]["all-gather"] < 3 * (plan["target"] + plan["head"]) * 7


@PLANNED
def test_a_run_that_does_not_fit_exits_1_and_says_what_to_change(tmp_path):
    """256 rows of two layers of Qwen3-8B's size on one H100."""
    target = target_shape("qwen3-8b").to_hf() | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(target))
    changed = {"target": tmp_path, "mesh": "", "num_hidden_layers": 1, "target_layer_ids": "(0,1)", "batch_size": 256}
    flags = [f"--config.{name}={value}" for name, value in changed.items()]
    done = run("-m", "train.distill", "--config=configs/qwen3_8b.py", *flags, "--plan", "--chip=h100", "--devices=1")
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout and "--config.micro_batches, 1: raise it (256 rows" in done.stdout


def test_the_report_has_memory_work_and_tokens():
    """24 rows of 1000 tokens in three seconds at best."""
    config = DistillConfig(target="some/target", batch_size=24, length=1000)
    text = "\n".join(report(config, PLAN, H100, make_mesh("data=1")))
    for part in ("some/target on 1 x NVIDIA H100", "optimizer", "25.00", "all-gather, 9 times", "450 GB/s", "NVLink",
                 "all at once: 3000 ms, 8,000 tokens/s, MFU 33%"):  # fmt: skip
        assert part in text


def test_advice_names_what_can_still_be_changed():
    """Where arguments alone do not fit, fewer rows or anchors would not help."""
    config, mesh = DistillConfig(batch_size=4), make_mesh("data=1")
    large = "\n".join(advice(config, PLAN._replace(temporaries=90 * 10**9), H100, mesh))
    for field in ("micro_batches, 1: raise", "batch_size, 4", "anchors, 8", "logit_chunk, 128", "raise fsdp"):
        assert field in large
    heavy = "\n".join(advice(config, PLAN._replace(target=90 * 10**9), H100, mesh))
    assert "raise fsdp" in heavy and "anchors" not in heavy and "batch_size" not in heavy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 6, "micro_batches": 4}, r"batch_size 6 must be a multiple of 4 .*4 micro-batches"),
        ({"anchors": 0}, "--config.anchors must be above 0"),
        ({"loss": "none"}, "none"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_compiled(fields, message):
    config = DistillConfig(target="Qwen/Qwen3-8B", **fields)
    with pytest.raises(ValueError, match=message):
        plan_step(config, target_shape(config.target), make_mesh("data=1"))
