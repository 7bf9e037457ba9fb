"""Memory of a step's loss and attention at the paper's sizes, compiled from shapes alone and never run.

151,936 words, 256 blocks of 16 slots, one row of 3072 tokens, 4096 features, 32 heads, bfloat16.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import training_memory

from train.losses import LOSSES

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_stay_under_one_and_a_half_gigabytes(name):
    """Compiled for this machine's CPU from shapes alone; all logits at once would take ten times that."""
    assert training_memory.loss_bytes(loss=name) < 1.5e9


def test_a_parent_term_adds_little_more_than_its_gradient():
    """Of rank 64, its gradient is 78 MB in float32, summed over the chunks in place."""
    added = training_memory.loss_bytes(parent_rank=64) - training_memory.loss_bytes()
    assert added < 0.3e9


def test_without_chunks_the_loss_would_not_fit():
    """What is measured above is what chunks bound."""
    assert training_memory.loss_bytes(chunk=4096) > 10e9


def test_scores_of_blocks_are_held_a_chunk_at_a_time():
    """Forward and backward of a layer; all scores of one head group at once would take over 3 GB."""
    assert training_memory.block_attention_bytes() < 0.8e9


def test_scores_of_the_target_are_held_a_chunk_at_a_time():
    """All of a row at once would take over 2 GB."""
    assert training_memory.document_attention_bytes() < 0.5e9


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin's wheels: pip install -e '.[plan]'",
)
def test_on_an_h100_loss_and_attention_stay_under_one_and_a_half_gigabytes():
    """A process of its own: the plugin is loaded once, before any test could say how."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(ROOT / "tests" / "training_memory.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout)
    parts = {"loss_bytes", "loss_bytes_with_parent_term", "block_attention_bytes", "document_attention_bytes"}
    assert set(sizes) == parts
    assert max(sizes.values()) < 1.5e9, sizes
