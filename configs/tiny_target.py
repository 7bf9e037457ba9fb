"""The small target that ships with the project: 1.8M parameters, about half an hour on two CPU cores."""

from train.config import OptimizerConfig, PretrainConfig


def get_config() -> PretrainConfig:
    return PretrainConfig(
        steps=1500,
        optimizer=OptimizerConfig(learning_rate=3e-3, matrix_learning_rate=0.02, warmup_steps=100),
    )
