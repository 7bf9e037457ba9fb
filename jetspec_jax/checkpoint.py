"""Checkpoints in Hugging Face format: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import json
import os
import pathlib
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Module = TypeVar("Module", bound=nnx.Module)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which file, what is wrong and what was expected."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face checkpoint directory with a config.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, expected a JSON object")
    return data


def hf_tensors(module: nnx.Module) -> dict[str, Any]:
    """Every parameter of a module (arrays or shapes) by its Hugging Face name, in Hugging Face's layout.

    Names are attribute paths, but for a linear layer's `kernel` `[in, out]`, which is stored as `weight` `[out, in]`,
    and for the experts' `[X, in, out]`, which are X such tensors.
    """
    tensors: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]:
        names = _tensor_names(path, leaf)
        if not _is_kernel(path):
            tensors[names[0]] = leaf
        elif leaf.ndim == 2:
            tensors[names[0]] = _transposed(leaf)
        else:
            tensors |= {name: _transposed(leaf, index) for index, name in enumerate(names)}
    return tensors


def load_module(abstract: Module, directory: pathlib.Path, dtype: jnp.dtype | None) -> Module:
    """`abstract` (from `jax.eval_shape`) filled from the directory's safetensors files.

    Raises:
        CheckpointError: a file cannot be read, or tensors are missing, unexpected or mis-shaped (all are listed).
    """
    files = _tensor_files(directory)
    wanted = hf_tensors(abstract)
    if getattr(getattr(abstract, "config", None), "tie_word_embeddings", False):
        files.pop("lm_head.weight", None)  # some writers store the embedding table a second time under this name
    problems = [f"missing {name} {tuple(leaf.shape)}" for name, leaf in wanted.items() if name not in files]
    problems += [f"unexpected {name}" for name in files if name not in wanted]
    arrays: dict[str, jax.Array] = {}
    for path in sorted(set(files.values())):
        with _open_safetensors(path) as file:
            held = set(file.keys())
            named = [n for n in wanted if files.get(n) == path]
            problems += [f"missing {n} in {path}, where the index says it is" for n in named if n not in held]
            for name in (n for n in named if n in held):
                shape = tuple(file.get_slice(name).get_shape())
                if shape == tuple(wanted[name].shape):
                    arrays[name] = jnp.asarray(file.get_tensor(name), dtype)
                else:
                    problems.append(f"{name} has shape {shape}, expected {tuple(wanted[name].shape)}")
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(problems))

    def placed(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        parts = [arrays.pop(name) for name in _tensor_names(path, leaf)]
        if not _is_kernel(path):
            return parts[0]
        return parts[0].T if leaf.ndim == 2 else jnp.stack([part.T for part in parts])

    return jax.tree_util.tree_map_with_path(placed, abstract)


def load_target_model(directory: pathlib.Path, dtype: jnp.dtype | None) -> TargetModel:
    """The target in a checkpoint directory; `dtype` None keeps the file's."""
    config = _parse(TargetConfig, directory)
    abstract = jax.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0)))
    return load_module(abstract, directory, dtype)


def load_head_model(directory: pathlib.Path, dtype: jnp.dtype | None) -> DraftHead:
    """The draft head in a checkpoint directory; `dtype` None keeps the file's."""
    config = _parse(HeadConfig, directory)
    abstract = jax.eval_shape(lambda: DraftHead(config, rngs=nnx.Rngs(0)))
    return load_module(abstract, directory, dtype)


def eos_ids(directory: pathlib.Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, else config.json's, else none."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def load_tokenizer(directory: pathlib.Path) -> PreTrainedTokenizerBase | None:
    """The directory's tokenizer, None when it has no tokenizer files."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    # Imported here: it takes a second, which token ids alone do not need, and warns that torch is missing, which
    # tokenizers do not need either.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def save_target(
    directory: str | pathlib.Path,
    model: TargetModel,
    *,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    directory = pathlib.Path(directory)
    _save(directory, model, {**model.config.to_hf(), "dtype": str(model.model.norm.weight[...].dtype)})
    generation = {"eos_token_id": list(eos_token_ids)} if eos_token_ids else {}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def save_draft_head(directory: str | pathlib.Path, head: DraftHead) -> None:
    """Writes a draft head in the published layout: config.json with `dflash_config`, model.safetensors."""
    _save(pathlib.Path(directory), head, {**head.config.to_hf(), "dtype": str(head.norm.weight[...].dtype)})


def _save(directory: pathlib.Path, module: nnx.Module, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(hf_tensors(module), directory / "model.safetensors", metadata={"format": "pt"})


def _parse(kind: type[Any], directory: pathlib.Path) -> Any:
    data = read_json(directory / "config.json")
    try:
        return kind.from_hf(data)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None


def _tensor_names(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """`[model.layers.0.mlp.up_proj.weight]` for the key path of that parameter's array; of experts, one name each."""
    parts = [str(getattr(key, "name", getattr(key, "idx", key))) for key in path]
    parts.pop()  # the last key is the NNX variable's own "value"
    if not _is_kernel(path):
        return [".".join(parts)]
    *module, layer = parts[:-1]
    if leaf.ndim == 2:
        return [".".join([*module, layer, "weight"])]
    return [".".join([*module, str(expert), layer, "weight"]) for expert in range(leaf.shape[0])]


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return getattr(path[-2], "name", None) == "kernel"


def _transposed(leaf: Any, expert: int | None = None) -> Any:
    """A kernel, or one expert's of several, as it is stored."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[-2:][::-1], leaf.dtype)
    return (leaf if expert is None else leaf[expert]).T


def _tensor_files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name to the safetensors file that holds it, by the index or the single file."""
    index = directory / INDEX
    if index.exists():
        files = {name: directory / file for name, file in read_json(index).get("weight_map", {}).items()}
        absent = sorted({str(path) for path in files.values() if not path.exists()})
        if absent:
            raise CheckpointError(f"{index} names files that do not exist: {', '.join(absent)}")
        return files
    single = directory / WEIGHTS
    if not single.exists():
        message = f"{directory} has neither {WEIGHTS} nor {INDEX}"
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            message += (
                f"; it has {', '.join(pickles)}, but pickled weights are not read, since loading them can run code: "
                "safetensors are needed"
            )
        raise CheckpointError(message)
    with _open_safetensors(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open_safetensors(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="flax")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
