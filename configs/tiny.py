"""The draft head of the small target that ships with the project: 2 causal layers, mixed fill."""

from train.config import DistillConfig, OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="runs/target",
        data="runs/regenerated",
        steps=3000,
        packed=False,  # its documents are of like length: at as many blocks a step, packed rows take longer
        target_layer_ids=(0, 1, 2),
        eval_every=1000,
        eval_prompts="jetspec_jax/assets/held_out.jsonl",
        optimizer=OptimizerConfig(learning_rate=2e-3, matrix_learning_rate=0.02, warmup_steps=100),
    )
