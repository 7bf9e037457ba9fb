"""Loading what people use: a target with its tokenizer, and a draft head that fits it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jetspec_jax.checkpoint import (
    CheckpointError,
    eos_ids,
    load_head_model,
    load_target_model,
    load_tokenizer,
)
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSETS = pathlib.Path(__file__).parent / "assets"
EMBEDDED_TARGET = _ASSETS / "target"
EMBEDDED_HEAD = _ASSETS / "head"


@dataclasses.dataclass(frozen=True)
class Target:
    """A target ready for use.

    model: the network. tokenizer: None for a checkpoint without one. eos_token_ids: every id that ends a text.
    path: the checkpoint's directory.
    """

    model: TargetModel
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    path: pathlib.Path

    @property
    def config(self) -> TargetConfig:
        """The network's architecture."""
        return self.model.config


def load_target(path: str | os.PathLike[str] = EMBEDDED_TARGET, *, dtype: jnp.dtype | str | None = None) -> Target:
    """The target in a Hugging Face checkpoint directory; without arguments the small one that ships here.

    Args:
        path: a directory with config.json, safetensors and, optionally, tokenizer files.
        dtype: of the weights and the computation; None keeps the checkpoint's.

    Raises:
        CheckpointError: the directory cannot be used; the message says what is wrong.
    """
    directory = _directory(path)
    model = load_target_model(directory, None if dtype is None else jnp.dtype(dtype))
    ends = eos_ids(directory)
    outside = [i for i in ends if not 0 <= i < model.config.vocab_size]
    if outside:
        raise CheckpointError(
            f"{directory}: eos_token_id {outside} outside the vocabulary of {model.config.vocab_size}"
        )
    return Target(model, load_tokenizer(directory), ends, directory)


def load_draft_head(
    path: str | os.PathLike[str] = EMBEDDED_HEAD, target: Target | None = None, *, dtype: jnp.dtype | str | None = None
) -> DraftHead:
    """The draft head in a checkpoint directory; without arguments the one of the embedded target.

    Args:
        path: a directory in the published format (config.json with `dflash_config`, safetensors).
        target: checked against the head when given, and source of the dtype when `dtype` is None.
        dtype: of the weights and the computation.

    Raises:
        CheckpointError: the directory cannot be used, or the head is not this target's.
    """
    directory = _directory(path)
    if dtype is None and target is not None:
        dtype = target.model.model.norm.weight[...].dtype
    head = load_head_model(directory, None if dtype is None else jnp.dtype(dtype))
    if target is not None:
        mismatch = head_mismatch(head.config, target.config)
        if mismatch:
            raise CheckpointError(
                f"draft head {directory} was made for another target than {target.path}: {'; '.join(mismatch)}"
            )
    return head


def head_mismatch(head: HeadConfig, target: TargetConfig) -> list[str]:
    """Why a head cannot draft for a target; empty when it can."""
    pairs = {
        "hidden_size": (head.hidden_size, target.hidden_size),
        "vocab_size": (head.vocab_size, target.vocab_size),
        "num_target_layers": (head.num_target_layers, target.num_hidden_layers),
    }
    return [f"{name} is {ours}, the target's is {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def _directory(path: str | os.PathLike[str]) -> pathlib.Path:
    directory = pathlib.Path(path).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"{path} is not a directory; expected a checkpoint directory with a config.json")
    return directory
