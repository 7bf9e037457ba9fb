"""A tiny random target, data and config of a training run that takes seconds."""

import json

import numpy as np
from tiny import random_module, target_config

import jetspec_jax
from jetspec_jax.models import EMBEDDED_TARGET
from jetspec_jax.target import TargetModel

VOCAB = 1024
CONFIG = """
from train.config import DistillConfig, OptimizerConfig


def get_config():
    return DistillConfig(
        target={target!r}, data={data!r}, out={out!r}, seed=3, steps={steps}, batch_size=4, length=32, anchors=2,
        block_size=4, num_hidden_layers=1, target_layer_ids=(0, 1), packed={packed}, mixed_fill=0.5, log_every=5,
        save_every=2,
        optimizer=OptimizerConfig(learning_rate=1e-2, matrix_learning_rate=1e-2, warmup_steps=2),
    )
"""


def write_case(root, steps, packed=False):
    """Writes a target (with the embedded one's tokenizer), documents and a config file under `root`; gives the last.

    The run directory that it names is `root / "run"`.
    """
    tokenizer = jetspec_jax.load_target(EMBEDDED_TARGET).tokenizer
    model = random_module(TargetModel, target_config(VOCAB), 0)
    jetspec_jax.save_target(root / "target", model, eos_token_ids=(tokenizer.eos_token_id,), tokenizer=tokenizer)
    rng = np.random.default_rng(0)
    with open(root / "data.jsonl", "w") as data:
        for _ in range(50):
            ids = rng.integers(4, VOCAB, rng.integers(12, 33)).tolist()
            print(json.dumps({"prompt_ids": ids[:4], "token_ids": ids[4:]}), file=data)
    config = root / "case.py"
    paths = {"target": str(root / "target"), "data": str(root / "data.jsonl"), "out": str(root / "run")}
    config.write_text(CONFIG.format(**paths, steps=steps, packed=packed))
    return config
