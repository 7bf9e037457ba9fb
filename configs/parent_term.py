"""A parent term for a draft head that has none: the head is frozen, the term's two tables alone are trained.

For a head of your own: --config.target=, --config.data= and --config.init_head=, and in place of what suits the small
target --config.length= (256 by default), --config.packed=True, --config.target_dtype=bfloat16 and
--config.eval_prompts=. The head named here is of the small target, by `python -m train.distill --config configs/tiny.py
--config.parent_rank=0 --config.out=runs/plain`.
"""

from jetspec_jax.models import EMBEDDED_TARGET
from train.config import DistillConfig, OptimizerConfig


def get_config() -> DistillConfig:
    return DistillConfig(
        target=str(EMBEDDED_TARGET),
        data="runs/regenerated",
        out="runs/upgraded",
        init_head="runs/plain",
        train_only="parent",
        parent_rank=64,
        steps=500,
        packed=False,
        eval_every=500,
        eval_prompts=str(EMBEDDED_TARGET.parent / "held_out.jsonl"),
        eval_count=200,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50),
    )
