"""What a run of `train.distill` is made of, from its config: models, data, optimizer, and where they lie."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import jetspec_jax
from jetspec_jax.checkpoint import parameter_name
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from jetspec_jax.shapes import head_shape
from jetspec_jax.sharding import default_device, describe, misfits, parameter_sharding, use
from kernels.topology import CHIPS
from train.argmax_share import argmax_share
from train.config import DistillConfig, check_fill, check_from, check_positive
from train.data import Packed, bucketed_batches, packed_batches, pad_batch
from train.flops import step_flops
from train.losses import check_loss
from train.manifest import model_digest
from train.objective import Blocks, sample_blocks
from train.optimizer import make_optimizer
from train.placing import Share, check_rows, place_rows, share_of_rows, training_mesh
from train.sources import Documents, open_documents
from train.step import Objective, TrainState, new_state, state_shardings
from train.upgrade import initial_layout, only, with_layout, with_weights

_DTYPES = ("float32", "bfloat16")
_PACKAGES = ("jetspec-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run's parts. `layout` is the head's, `share` the part of every batch that this process reads."""

    config: DistillConfig
    target: Target
    documents: Documents
    layout: HeadConfig
    mesh: Mesh | None
    optimizer: optax.GradientTransformation
    objective: Objective
    share: Share

    def new_state(self) -> TrainState:
        """The state before the first step, created where it is to lie."""
        head = new_head(self.config, self.layout, self.target)
        make = functools.partial(new_state, optimizer=self.optimizer)
        shardings = None if self.mesh is None else state_shardings(jax.eval_shape(make, head), self.mesh)
        with use(self.mesh):
            return jax.jit(make, out_shardings=shardings, donate_argnums=0)(head)

    def abstract_state(self) -> TrainState:
        """The shapes of a state, and where they lie."""
        layout = self.layout
        head = jax.eval_shape(lambda: DraftHead(layout, rngs=nnx.Rngs(0)))
        state = jax.eval_shape(functools.partial(new_state, optimizer=self.optimizer), head)
        if self.mesh is None:
            device = SingleDeviceSharding(default_device())
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)
        places = state_shardings(state, self.mesh)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places)

    def batches(self) -> grain.DatasetIterator[Packed]:
        """This process's rows of every batch, from the first one on."""
        in_rows = packed_batches if self.config.packed else bucketed_batches
        return in_rows(
            self.documents,
            length=self.config.length,
            batch_size=self.config.batch_size // self.share.of,
            seed=self.config.seed,
            process_index=self.share.part,
            process_count=self.share.of,
        )

    def blocks(self, step: int, batch: Packed) -> Blocks:
        """The blocks of this process's rows: a function of the step, so that a resumed run draws the same."""
        rng = np.random.default_rng((self.config.seed, step, self.share.part))
        return sample_blocks(batch, self.config.anchors, self.config.block_size, self.config.mixed_fill, rng)

    def flops(self, batch: Packed) -> float:
        """Of one step over all rows that are as wide as this process's."""
        return step_flops(
            self.target.config,
            self.layout,
            rows=self.config.batch_size,
            length=batch.tokens.shape[1],
            anchors=min(self.config.anchors, batch.tokens.shape[1]),
        )

    @property
    def peak(self) -> float | None:
        """Dense bfloat16 FLOP/s of all devices together; None where their data sheet is not known, or where a part of
        the head is trained, which is less than `flops` counts."""
        if self.config.train_only:
            return None
        kind = jax.devices()[0].device_kind
        chips = [chip for chip in CHIPS.values() if chip.name == kind]
        return chips[0].tensor * (1 if self.mesh is None else self.mesh.size) if chips else None

    def argmax_share(self) -> float:
        """How often the data's tokens are the target's choice, of as many documents as a micro-batch has rows."""
        rows = self.config.batch_size // self.config.micro_batches
        places = np.linspace(0, len(self.documents) - 1, rows).astype(int)
        whole = pad_batch([self.documents[int(i)] for i in places], self.config.length)
        size = rows // self.share.of
        mine = jax.tree.map(lambda x: x[self.share.part * size : (self.share.part + 1) * size], whole)
        with use(self.mesh):
            return argmax_share(self.target.model, [place_rows(mine, self.mesh)])


def make_setup(config: DistillConfig) -> Setup:
    """Everything that `config` names, loaded and checked against each other.

    Args:
        config: one that `check_config` passes.

    Raises:
        ValueError: target, data, head and mesh do not fit each other.
    """
    if not config.data:
        raise ValueError("--config.data must be given: a directory of train.regenerate, for example")
    mesh = training_mesh(config.mesh)
    check_rows(config.batch_size, config.micro_batches, mesh)
    share = share_of_rows(config.batch_size, mesh)
    target = jetspec_jax.load_target(config.target, dtype=config.target_dtype, mesh=mesh)
    check_length(config, target.config)
    config = with_mask_token(config, target)
    layout = head_layout(config, target.config)
    config = with_layout(config, layout)
    problems = [] if mesh is None else misfits(layout, mesh)
    if mesh is not None and problems:
        raise ValueError(f"the head cannot be split over --config.mesh {describe(mesh.shape)}: {'; '.join(problems)}")
    documents = open_documents(config.data, target)
    if documents.enable_thinking is not None:
        layout = dataclasses.replace(layout, enable_thinking=documents.enable_thinking)
    optimizer = only(make_optimizer(config.optimizer, config.steps), layout, config.train_only)
    return Setup(config, target, documents, layout, mesh, optimizer, make_objective(config), share)


def make_objective(config: DistillConfig) -> Objective:
    """What a step compiles for."""
    return Objective(
        config.gamma,
        config.temperature,
        config.loss,
        compute_dtype=None if config.compute_dtype == "float32" else jnp.dtype(config.compute_dtype),
        logit_chunk=config.logit_chunk,
        micro_batches=config.micro_batches,
        train_only=config.train_only,
    )


def check_config(config: DistillConfig) -> None:
    """Raises ValueError, naming the field, for what can be known to be wrong before anything is loaded."""
    if not config.target:
        raise ValueError("--config.target must be given: a checkpoint directory or a hub id")
    check_positive(
        config, "steps", "batch_size", "length", "anchors", "num_hidden_layers", "temperature", "micro_batches",
        "log_every", "save_every", "keep_last", "optimizer.learning_rate", "optimizer.clip_norm",
    )  # fmt: skip
    check_from(config, 0, "seed", "gamma", "logit_chunk", "parent_rank", "eval_every", "optimizer.warmup_steps",
               "optimizer.matrix_learning_rate", "optimizer.weight_decay", "optimizer.final_scale")  # fmt: skip
    check_from(config, 2, "block_size")
    if not 0 <= config.mixed_fill <= 1:
        raise ValueError(f"--config.mixed_fill is a share, from 0 to 1, got {config.mixed_fill}")
    check_loss(config.loss, config.temperature)
    if config.eval_every and not config.eval_prompts:
        raise ValueError("--config.eval_every needs --config.eval_prompts, a JSONL file of held-out prompts")
    for name in ("target_dtype", "compute_dtype"):
        if getattr(config, name) not in _DTYPES:
            raise ValueError(f"--config.{name} must be one of {', '.join(_DTYPES)}, got {getattr(config, name)!r}")


def check_length(config: DistillConfig, target: TargetConfig) -> None:
    """Raises ValueError where rows are longer than what the target reads."""
    if config.length > (limit := target.max_position_embeddings):
        raise ValueError(f"--config.length={config.length} is over the {limit} tokens that the target reads; lower it")


def head_layout(config: DistillConfig, shape: TargetConfig) -> HeadConfig:
    """The head that `config` describes for a target of this shape: the one that it starts from, or one in the shape of
    the target's own layers. The mask token of the latter is any, if `config` gives none.

    Raises:
        ValueError: the head to start from cannot be read or used, or the taps do not fit the target.
    """
    if layout := initial_layout(config):
        return layout
    check_fill(config.mixed_fill, config.causal_head)
    taps = tuple(config.target_layer_ids)
    layout = head_shape(shape, config.num_hidden_layers, config.block_size, taps, parent_rank=config.parent_rank)
    mask = layout.mask_token_id if config.mask_token_id < 0 else config.mask_token_id
    return dataclasses.replace(layout, causal_head=config.causal_head, mixed_fill=config.mixed_fill, mask_token_id=mask)


def with_mask_token(config: DistillConfig, target: Target) -> DistillConfig:
    """`config` with a mask token: its own, else the tokenizer's, else the first embedding that no token has.

    Raises:
        ValueError: there is none of these.
    """
    if config.mask_token_id >= 0 or config.init_head:
        return config
    tokenizer, words = target.tokenizer, target.config.vocab_size
    mask = None if tokenizer is None else tokenizer.mask_token_id
    if mask is None and tokenizer is not None and len(tokenizer) < words:
        mask = len(tokenizer)
    if mask is None:
        raise ValueError(
            f"{target.path}: the head's empty slots need a token that no text has, and the tokenizer names no "
            f"mask_token and leaves none of {words} embeddings free; set --config.mask_token_id to a reserved one"
        )
    return dataclasses.replace(config, mask_token_id=mask)


def new_head(config: DistillConfig, layout: HeadConfig, target: Target) -> DraftHead:
    """The head before the first step, with float32 weights, created where they are to lie.

    Raises:
        ValueError: the head that `config.init_head` names cannot be read, or was made for another target.
    """
    make = lambda: DraftHead(layout, rngs=nnx.Rngs(config.seed))  # noqa: E731
    places = jax.tree_util.tree_map_with_path(
        lambda path, _: parameter_sharding(parameter_name(path), target.mesh), jax.eval_shape(make)
    )
    head = jax.jit(make, out_shardings=places)()
    return with_weights(head, config.init_head, target) if config.init_head else head


def fingerprint(setup: Setup) -> dict[str, Any]:
    """What decides the run's weights: a resume with another is refused."""
    fields = dataclasses.asdict(setup.config)
    for name in FREE:
        del fields[name]
    optimizer = {f"optimizer.{name}": value for name, value in fields.pop("optimizer").items()}
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in {**fields, **optimizer}.items()},
        "target": model_digest(setup.target.path),
        "data": setup.documents.digest,
        "documents": len(setup.documents),
        "processes that share a batch": setup.share.of,
        "processes": jax.process_count(),
    }


FREE = ("out", "mesh", "micro_batches", "logit_chunk", "log_every", "save_every", "keep_last", "eval_every",
        "eval_prompts", "eval_count", "eval_batch_size", "eval_budgets", "eval_max_new_tokens")  # fmt: skip
"""Fields that change no weight, up to the order of sums: a resumed run may have others."""


def derived(setup: Setup) -> dict[str, Any]:
    """Numbers that follow from the config: for people, and kept with the run."""
    config, mesh = setup.config, setup.mesh
    layout = setup.layout
    head = jax.eval_shape(lambda: DraftHead(layout, rngs=nnx.Rngs(0)))
    count = lambda module: sum(leaf.size for leaf in jax.tree.leaves(module))  # noqa: E731
    blocks = config.batch_size * config.anchors
    return {
        "target_parameters": count(setup.target.model),
        "head_parameters": count(head),
        "target_layer_ids": list(layout.target_layer_ids),
        "documents": len(setup.documents),
        "blocks_per_step": blocks,
        "supervised_slots_per_step_at_most": blocks * (layout.block_size - 1),
        "tokens_per_step_at_most": config.batch_size * config.length,
        "devices": 1 if mesh is None else mesh.size,
        "device": jax.devices()[0].device_kind,
        "mesh": "one device" if mesh is None else describe(mesh.shape),
        "processes": jax.process_count(),
        "rows_per_device_and_micro_batch": _rows_at_once(setup),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that a run's numbers depend on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in _PACKAGES}}


def _rows_at_once(setup: Setup) -> int:
    config, mesh = setup.config, setup.mesh
    if mesh is None:
        return config.batch_size // config.micro_batches
    rows = NamedSharding(mesh, jetspec_jax.sharding.spec("batch")).shard_shape((config.batch_size,))[0]
    return rows // config.micro_batches
