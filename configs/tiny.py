"""The draft head of the small target that ships with the project: 2 causal layers, blocks of 32 and a parent term."""

from jetspec_jax.models import EMBEDDED_TARGET
from train.config import DistillConfig, OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target=str(EMBEDDED_TARGET),
        data="runs/regenerated",
        steps=3000,
        packed=False,  # its documents are of like length: at as many blocks a step, packed rows take longer
        block_size=32,  # beyond the paper's 16, which the term makes worth it (docs/path-conditioning.md)
        target_layer_ids=(0, 1, 2),
        parent_rank=64,
        eval_every=1000,
        eval_prompts=str(EMBEDDED_TARGET.parent / "held_out.jsonl"),
        eval_count=200,
        optimizer=OptimizerConfig(learning_rate=2e-3, matrix_learning_rate=0.02, warmup_steps=100),
    )
