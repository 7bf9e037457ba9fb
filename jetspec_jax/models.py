"""Loading what people use: a target with its tokenizer, and a draft head that fits it."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jetspec_jax.checkpoint import (
    CheckpointError,
    eos_ids,
    head_config,
    load_head_model,
    load_target_model,
    load_tokenizer,
    read_json,
    target_config,
)
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.hub import find_checkpoint
from jetspec_jax.sampling import Sampling
from jetspec_jax.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASSETS = pathlib.Path(__file__).parent / "assets"
EMBEDDED_TARGET = _ASSETS / "target"
EMBEDDED_HEAD = _ASSETS / "head"
_RUN = "run.json"  # what train.distill writes before its first step


@dataclasses.dataclass(frozen=True)
class Target:
    """A target ready for use.

    model: the network. tokenizer: None for a checkpoint without one. eos_token_ids: every id that ends a text.
    path: the checkpoint's directory. name: the hub id that it was asked for by, else the directory's name.
    sampling_defaults: what generation_config.json recommends; for the caller to pass on, `generate` does not read it.
    mesh: the devices that the network is split over; None is the default device.
    """

    model: TargetModel
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: tuple[int, ...]
    path: pathlib.Path
    sampling_defaults: Sampling = dataclasses.field(default_factory=Sampling)
    name: str = ""
    mesh: jax.sharding.Mesh | None = None

    @property
    def config(self) -> TargetConfig:
        """The network's architecture."""
        return self.model.config


def load_target(
    path: str | os.PathLike[str] = EMBEDDED_TARGET,
    *,
    dtype: jnp.dtype | str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    revision: str | None = None,
) -> Target:
    """A target in Hugging Face format; without arguments the small one that ships here.

    Args:
        path: a directory with config.json, safetensors and, optionally, tokenizer files; or a hub id such as
            Qwen/Qwen3-8B, read from the hub's cache when it is there. `::subfolder` after either is a folder inside.
        dtype: of the weights and the computation; None is config.json's, without one the weights'.
        mesh: devices to split the weights over, from `jetspec_jax.make_mesh`; None is the default device.
        revision: a branch, tag or commit of a hub repository; None is its main branch.

    Raises:
        CheckpointError: the checkpoint cannot be found or used; the message says what is wrong.
    """
    directory = find_checkpoint(path, revision, text=True)
    # The small files first: what is wrong with them need not wait for the weights.
    size, ends, sampling = target_config(directory).vocab_size, eos_ids(directory), sampling_defaults(directory)
    outside = [i for i in ends if not 0 <= i < size]
    if outside:
        raise CheckpointError(f"{directory}: eos_token_id {outside} outside the vocabulary of {size}")
    tokenizer = load_tokenizer(directory)
    model = load_target_model(directory, None if dtype is None else jnp.dtype(dtype), mesh)
    local = pathlib.Path(os.fspath(path).partition("::")[0]).expanduser().is_dir()
    name = directory.name if local else os.fspath(path)
    return Target(model, tokenizer, ends, directory, sampling, name, mesh)


def load_draft_head(
    path: str | os.PathLike[str] = EMBEDDED_HEAD,
    target: Target | None = None,
    *,
    dtype: jnp.dtype | str | None = None,
    revision: str | None = None,
) -> DraftHead:
    """A draft head in the published format; without arguments the one of the embedded target.

    Args:
        path: a directory (config.json with `dflash_config`, safetensors), that of a training run included; or a hub
            id. `::subfolder` as for `load_target`.
        target: checked against the head when given; its mesh is the head's, and its dtype where `dtype` is None.
        dtype: of the weights and the computation; None without a target as for `load_target`.
        revision: a branch, tag or commit of a hub repository; None is its main branch.

    Raises:
        CheckpointError: the checkpoint cannot be found or used, or the head is not this target's.
    """
    directory = find_checkpoint(path, revision)
    if (directory / _RUN).exists() and not (directory / "config.json").exists():
        raise CheckpointError(f"{directory} is a training run without a checkpoint so far; its first one has the head")
    if dtype is None and target is not None:
        dtype = target.model.model.norm.weight[...].dtype
    if target is not None:
        mismatch = head_mismatch(head_config(directory), target.config)
        if mismatch:
            raise CheckpointError(
                f"draft head {directory} was made for another target than {target.path}: {'; '.join(mismatch)}"
            )
    mesh = None if target is None else target.mesh
    return load_head_model(directory, None if dtype is None else jnp.dtype(dtype), mesh)


def head_mismatch(head: HeadConfig, target: TargetConfig) -> list[str]:
    """Why a head cannot draft for a target; empty when it can."""
    pairs = {
        "hidden_size": (head.hidden_size, target.hidden_size),
        "vocab_size": (head.vocab_size, target.vocab_size),
        "num_target_layers": (head.num_target_layers, target.num_hidden_layers),
    }
    return [f"{name} is {ours}, the target's is {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def check_head(head: DraftHead, target: Target) -> None:
    """Raises ValueError, with all reasons, unless a head can draft for a target: its sizes, dtype and devices."""
    ours, theirs = head.norm.weight[...], target.model.model.norm.weight[...]
    reasons = head_mismatch(head.config, target.config)
    if ours.dtype != theirs.dtype:
        reasons.append(f"dtype is {ours.dtype}, the target's is {theirs.dtype}")
    if ours.sharding.device_set != theirs.sharding.device_set:
        reasons.append("it lies on other devices than the target")
    if reasons:
        raise ValueError(
            f"the draft head does not fit {target.path}: {'; '.join(reasons)}; "
            "load_draft_head(path, target) checks sizes and takes the target's dtype and mesh"
        )


# Settings of a generation_config.json that would change the text and are not there; each with the values that are off.
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "min_new_tokens": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "num_beams": (1,),
}


def sampling_defaults(directory: pathlib.Path) -> Sampling:
    """The sampling that a checkpoint's generation_config.json recommends; greedy unless it says `do_sample`.

    A field that is left out is off (temperature: 1), and so is vLLM's `top_k` -1. Filters of greedy decoding, which
    have no effect, are off as well where they are impossible. Fields that would change the text and are not supported
    are logged as warnings.

    Raises:
        CheckpointError: a value is not a number or out of range, and the file says `do_sample`.
    """
    path = directory / "generation_config.json"
    data = read_json(path) if path.exists() else {}
    for name, neutral in _NOT_APPLIED.items():
        if data.get(name) is not None and data[name] not in neutral:
            logging.getLogger(__name__).warning("%s: %s=%r is not supported and not applied", path, name, data[name])
    try:
        sampling = _sampling(data)
    except ValueError as error:
        if data.get("do_sample"):
            raise CheckpointError(f"{path}: {error}") from None
        return Sampling()
    return sampling if data.get("do_sample") else dataclasses.replace(sampling, temperature=0.0)


def _sampling(data: dict[str, Any]) -> Sampling:
    """The fields of a generation_config.json that choose how to sample."""
    off = dataclasses.asdict(Sampling(temperature=1.0))
    values = {name: default if data.get(name) is None else data[name] for name, default in off.items()}
    wrong = [name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise ValueError(f"expected numbers for {', '.join(f'{n}={values[n]!r}' for n in wrong)}")
    values["top_k"] = 0 if values["top_k"] == -1 else int(values["top_k"])
    return Sampling(**values)
