"""Optimizers from configs, as optax transformations over a module's arrays."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib

from train.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW or Muon with AdamW, over `steps` steps in all."""
    inner = optax.adamw(schedule(config, config.learning_rate, steps), b2=0.95, weight_decay=config.weight_decay)
    if config.matrix_learning_rate:
        inner = optax.contrib.muon(
            schedule(config, config.matrix_learning_rate, steps),
            adam_learning_rate=schedule(config, config.learning_rate, steps),
            weight_decay=config.weight_decay,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=_matrices,
            adam_b2=0.95,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), inner)


def schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """Linear warmup to `peak`, then cosine decay to `final_scale * peak` at `steps`."""
    warmup = min(config.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, config.final_scale * peak)


def _matrices(params: Any) -> Any:
    """Muon's dimension numbers for weights of linear layers inside the decoder layers; None is AdamW's."""

    def label(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        inside = ".layers" in jax.tree_util.keystr(path)
        # Weights are [out, in], and Muon's numbers are the axis that is summed over and the one that comes out.
        return optax.contrib.MuonDimensionNumbers(1, 0) if inside and leaf.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(label, params)
