"""A head for Qwen3-8B as the paper trains it, on eight GPUs of 80 GB (docs/training_plans.md)."""

from train.config import DistillConfig, OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="Qwen/Qwen3-8B",
        data="runs/qwen3_8b_regenerated",
        out="runs/qwen3_8b_head",
        steps=25_000,
        batch_size=32,
        length=3072,
        anchors=256,
        num_hidden_layers=5,
        logit_chunk=128,
        mesh="fsdp=8",
        target_dtype="bfloat16",
        compute_dtype="bfloat16",
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=1000),
    )
