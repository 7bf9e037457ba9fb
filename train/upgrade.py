"""Training that starts from a head there is: what it is in shape, its weights, and which of them are trained.

So a published head gets a parent term: the head frozen, the term's two tables trained (`configs/parent_term.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jetspec_jax.checkpoint import head_config, hf_tensors, parameter_name
from jetspec_jax.config import HeadConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.hub import find_checkpoint
from jetspec_jax.models import Target, load_draft_head
from train.config import DistillConfig, check_fill

_LAYOUT = ("num_hidden_layers", "block_size", "target_layer_ids", "causal_head")


def initial_layout(config: DistillConfig) -> HeadConfig | None:
    """The layout of the head in `config.init_head`, with the parent term that is asked for; None without such a head.

    Raises:
        ValueError: the head has a term of another rank or cannot be trained so, or there is none to train a part of.
    """
    if config.train_only and not config.init_head:
        raise ValueError(
            f"--config.train_only={config.train_only} freezes the rest of a head that is not trained yet; "
            "name one with --config.init_head"
        )
    if not config.init_head:
        return None
    layout = head_config(find_checkpoint(config.init_head))
    rank = config.parent_rank or layout.parent_rank
    if layout.parent_rank not in (0, rank):
        raise ValueError(
            f"{config.init_head} has a parent term of rank {layout.parent_rank}; --config.parent_rank={rank} would "
            "start another, leave it at 0 to train the one there is"
        )
    check_fill(config.mixed_fill, layout.causal_head)
    mixed_fill = layout.mixed_fill if config.train_only else config.mixed_fill
    return dataclasses.replace(layout, parent_rank=rank, mixed_fill=mixed_fill)


def with_layout(config: DistillConfig, layout: HeadConfig) -> DistillConfig:
    """`config` with the block size, layers, taps and causality of `layout`."""
    return dataclasses.replace(config, **{name: getattr(layout, name) for name in _LAYOUT})


def with_weights(head: DraftHead, source: str, target: Target) -> DraftHead:
    """`head` with all weights that the head in `source`, a directory or hub id, has; in float32, where they lie.

    Raises:
        ValueError: that head cannot be read, or was made for another target.
    """
    held = hf_tensors(load_draft_head(source, target, dtype=jnp.float32))
    return jax.tree_util.tree_map_with_path(lambda path, leaf: held.get(parameter_name(path), leaf), head)


def only(optimizer: optax.GradientTransformation, layout: HeadConfig, part: str) -> optax.GradientTransformation:
    """`optimizer` over a head's parameters whose names begin with `part`; others never change and have no state.

    Raises:
        ValueError: there are no such parameters.
    """
    if not part:
        return optimizer

    def label(path: tuple[Any, ...], _: jax.Array) -> str:
        return "trained" if _inside(path, part) else "frozen"

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(label, params)

    head = jax.eval_shape(lambda: DraftHead(layout, rngs=nnx.Rngs(0)))
    if "trained" not in jax.tree.leaves(labels(head)):
        raise ValueError(
            f"--config.train_only={part} is no part of the head; parts are "
            f"{', '.join(sorted({name.partition('.')[0] for name in hf_tensors(head)}))}"
        )
    return optax.multi_transform({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


def frozen_but(head: DraftHead, part: str) -> DraftHead:
    """`head`, of which only the parameters whose names begin with `part` have a gradient; "" is all of them."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if _inside(path, part) else jax.lax.stop_gradient(leaf), head
    )


def _inside(path: tuple[Any, ...], part: str) -> bool:
    return not part or f"{parameter_name(path)}.".startswith(f"{part}.")
