"""`python -m train.distill --config configs/tiny.py`: trains a draft head for a frozen target."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from ml_collections import config_flags

import jetspec_jax
from jetspec_jax.config import HeadConfig, default_target_layer_ids
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from kernels.topology import CHIPS
from train.config import DistillConfig, check_positive
from train.data import bucketed_batches, packed_batches
from train.losses import check_loss
from train.objective import sample_blocks
from train.optimizer import make_optimizer
from train.plan import plan_run
from train.sources import open_documents
from train.step import Objective, new_state, train_step


def head_config(config: DistillConfig, target: Target) -> HeadConfig:
    """The head that `config` describes, in the shape of the target's own layers.

    Raises:
        ValueError: the tokenizer has no mask token, or the taps do not fit the target.
    """
    shape = target.config
    if config.mixed_fill and not config.causal_head:
        raise ValueError(
            "--config.mixed_fill needs a causal head: a bidirectional one sees, in the next filled slot, the token "
            "that a filled slot learns; set --config.mixed_fill=0"
        )
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
    )


def distill(config: DistillConfig) -> pathlib.Path:
    """Trains the head that `config` describes; returns the directory it was saved in."""
    check_positive(config, "steps", "batch_size", "length", "anchors", "num_hidden_layers", "temperature", "log_every")
    check_loss(config.loss, config.temperature)
    target = jetspec_jax.load_target(config.target, dtype=jnp.float32)
    layout = head_config(config, target)
    documents = open_documents(config.data, target)
    for warning in documents.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    layout = dataclasses.replace(layout, enable_thinking=documents.enable_thinking)
    head = DraftHead(layout, rngs=nnx.Rngs(config.seed))
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = new_state(head, optimizer)
    objective = Objective(config.gamma, config.temperature, config.loss, logit_chunk=config.logit_chunk)
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
            state, metrics = train_step(state, target.model, batch, blocks, optimizer=optimizer, objective=objective)
            recent.append(metrics.blocks)
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
    jetspec_jax.save_draft_head(out, state.head)
    return out


def main(argv: list[str]) -> None:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        if flags.FLAGS.plan:
            raise SystemExit(plan_run(flags.FLAGS.config, flags.FLAGS.chip, flags.FLAGS.devices))
        out = distill(flags.FLAGS.config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"saved {out}")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/tiny.py", "Config file with get_config().")
    flags.DEFINE_bool(
        "plan", False, "Compile the step for GPUs that need not be there, print its memory and time, stop."
    )
    flags.DEFINE_enum("chip", "h100", sorted(CHIPS), "The GPU that --plan compiles for.")
    flags.DEFINE_integer("devices", 8, "How many of them.", lower_bound=1)
    app.run(main)
