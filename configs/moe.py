"""A head for Qwen3-30B-A3B as the paper trains it, on eight GPUs of 80 GB (docs/training_plans.md)."""

import dataclasses

from configs import qwen3_8b
from train.config import DistillConfig


def get_config() -> DistillConfig:
    return dataclasses.replace(
        qwen3_8b.get_config(),
        target="Qwen/Qwen3-30B-A3B",
        data="runs/qwen3_30b_a3b_regenerated",
        out="runs/qwen3_30b_a3b_head",
    )
