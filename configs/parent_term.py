"""A parent term for the draft head that ships with the project: the head is frozen, the term alone is trained."""

from train.config import DistillConfig, OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target="jetspec_jax/assets/target",
        data="runs/regenerated",
        out="runs/head_with_parent_term",
        init_head="jetspec_jax/assets/head",
        train_only="parent",
        parent_rank=64,
        steps=1000,
        packed=False,
        mixed_fill=0.0,  # decoding fills nothing
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50),
    )
