"""`python -m train.distill --config configs/tiny.py`: trains a draft head for a frozen target."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from ml_collections import config_flags

import jetspec_jax
from jetspec_jax.config import HeadConfig, default_target_layer_ids
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from jetspec_jax.target import TargetModel
from train.config import DistillConfig, check_fill, check_positive
from train.data import Packed, bucketed_batches, packed_batches
from train.losses import check_loss
from train.objective import BlockMetrics, Blocks, distillation_loss, sample_blocks
from train.optimizer import make_optimizer
from train.packed import target_forward
from train.sources import open_documents
from train.upgrade import initial_head, initial_layout, only, with_layout


def head_config(config: DistillConfig, target: Target) -> HeadConfig:
    """The head that `config` describes, in the shape of the target's own layers.

    Raises:
        ValueError: the tokenizer has no mask token, or the taps do not fit the target.
    """
    shape = target.config
    check_fill(config.mixed_fill, config.causal_head)
    mask = None if target.tokenizer is None else target.tokenizer.mask_token_id
    if mask is None:
        raise ValueError(f"{target.path}: the tokenizer has no mask_token, which the head's empty slots need")
    taps = tuple(config.target_layer_ids) or default_target_layer_ids(shape.num_hidden_layers, config.num_hidden_layers)
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    )
    return HeadConfig(
        **{name: getattr(shape, name) for name in shared},
        num_hidden_layers=config.num_hidden_layers,
        block_size=config.block_size,
        num_target_layers=shape.num_hidden_layers,
        target_layer_ids=taps,
        mask_token_id=mask,
        causal_head=config.causal_head,
        mixed_fill=config.mixed_fill,
        parent_rank=config.parent_rank,
    )


@functools.partial(
    jax.jit,
    static_argnames=("optimizer", "gamma", "temperature", "loss", "compute_dtype", "logit_chunk"),
    donate_argnames=("head", "state"),
)
def train_step(
    head: DraftHead,
    state: optax.OptState,
    target: TargetModel,
    batch: Packed,
    blocks: Blocks,
    *,
    optimizer: optax.GradientTransformation,
    gamma: float,
    temperature: float,
    loss: str = "forward_kl",
    compute_dtype: jnp.dtype | None = None,
    logit_chunk: int = 0,
) -> tuple[DraftHead, optax.OptState, BlockMetrics]:
    """One step: the target's forward without gradients, then the head's with (options: `distillation_loss`)."""
    out = target_forward(target, batch, head.config.target_layer_ids)
    objective = functools.partial(
        distillation_loss,
        gamma=gamma,
        temperature=temperature,
        loss=loss,
        compute_dtype=compute_dtype,
        logit_chunk=logit_chunk,
    )
    grads, metrics = jax.grad(objective, has_aux=True)(head, target, batch, out.taps, out.hidden, blocks)
    updates, state = optimizer.update(grads, state, head)
    return optax.apply_updates(head, updates), state, metrics


def distill(config: DistillConfig) -> pathlib.Path:
    """Trains the head that `config` describes; returns the directory it was saved in."""
    check_positive(config, "steps", "batch_size", "length", "anchors", "num_hidden_layers", "temperature", "log_every")
    check_loss(config.loss, config.temperature)
    target = jetspec_jax.load_target(config.target, dtype=jnp.float32)
    layout = initial_layout(config) or head_config(config, target)
    config = with_layout(config, layout)
    documents = open_documents(config.data, target)
    for warning in documents.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    layout = dataclasses.replace(layout, enable_thinking=documents.enable_thinking)
    head = initial_head(config, layout, target)
    optimizer = only(make_optimizer(config.optimizer, config.steps), head, config.train_only)
    state = optimizer.init(head)
    in_rows = packed_batches if config.packed else bucketed_batches
    batches = in_rows(documents, length=config.length, batch_size=config.batch_size, seed=config.seed)
    out = pathlib.Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    start, recent = time.perf_counter(), []
    with open(out / "log.jsonl", "w") as log:
        for step, batch in zip(range(1, config.steps + 1), batches, strict=False):
            # A function of the step, so that a resumed run draws the same blocks.
            rng = np.random.default_rng((config.seed, step))
            blocks = sample_blocks(batch, config.anchors, config.block_size, config.mixed_fill, rng)
            head, state, metrics = train_step(
                head,
                state,
                target.model,
                batch,
                blocks,
                optimizer=optimizer,
                gamma=config.gamma,
                temperature=config.temperature,
                loss=config.loss,
                logit_chunk=config.logit_chunk,
            )
            recent.append(metrics)
            if step % config.log_every == 0 or step == config.steps:
                means = jax.tree.map(lambda *values: sum(values), *jax.device_get(recent))
                recent = []
                line = {
                    "step": step,
                    "loss": round(float(means.loss), 4),
                    "agreement": [round(float(share), 4) for share in means.agreement],
                    "chain_accepted": round(float(means.accepted), 3),
                    "coverage": round(float(means.coverage), 4),
                    "seconds": round(time.perf_counter() - start),
                }
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
    jetspec_jax.save_draft_head(out, head)
    return out


def main(argv: list[str]) -> None:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        out = distill(flags.FLAGS.config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"saved {out}")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/tiny.py", "Config file with get_config().")
    app.run(main)
