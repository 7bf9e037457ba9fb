"""Checkpoints in Hugging Face format: config.json, model.safetensors, tokenizer files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.sharding import describe, misfits, parameter_sharding
from jetspec_jax.target import TargetModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Module = TypeVar("Module", bound=nnx.Module)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DERIVED = ".rotary_emb.inv_freq"  # a buffer that old checkpoints of Llama hold and that follows from the config
_DTYPES = ("float32", "bfloat16", "float16")
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


def weight_map(index: pathlib.Path) -> dict[str, str]:
    """Tensor name to the name of its file, of an index of shards.

    Raises:
        CheckpointError: the index cannot be read or its `weight_map` is none.
    """
    names = read_json(index).get("weight_map", {})
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index}: expected weight_map to be an object of tensor names and file names")
    return names


def hf_tensors(module: nnx.Module) -> dict[str, Any]:
    """Every parameter of a module (arrays or shapes) by its Hugging Face name: attribute paths.

    Only a layer's experts are one array `[X, out, in]` here and X tensors there.
    """
    tensors: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(module)[0]:
        names = _tensor_names(path, leaf)
        tensors |= {names[0]: leaf} if leaf.ndim < 3 else {name: _expert(leaf, i) for i, name in enumerate(names)}
    return tensors


def load_module(
    abstract: Module, directory: pathlib.Path, dtype: jnp.dtype | None, mesh: jax.sharding.Mesh | None = None
) -> Module:
    """`abstract` (from `jax.eval_shape`) filled from the directory's safetensors files.

    Tensors go one at a time from the file to the devices of `mesh` (without one, to the default device), each device
    getting its part only: beside the result, the host holds no more than one part of one parameter and one tensor.
    `dtype` None is config.json's, as in transformers; without one, the files', which must then be the same for all.

    Raises:
        CheckpointError: a file cannot be read, or tensors are missing, unexpected, mis-shaped or of several dtypes
            (all are listed, before any is read).
    """
    dtype = _stated_dtype(directory) if dtype is None else dtype
    locations = {name: path for name, path in _tensor_files(directory).items() if not name.endswith(_DERIVED)}
    if getattr(getattr(abstract, "config", None), "tie_word_embeddings", False):
        locations.pop("lm_head.weight", None)  # some writers store the embedding table a second time under this name
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(_open_safetensors(path)) for path in sorted(set(locations.values()))}
        problems = _misfits(hf_tensors(abstract), locations, files)
        if not problems and dtype is None:
            problems = _mixture(locations, files)
        if problems:
            raise CheckpointError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(problems))

        def read(path: tuple[Any, ...], leaf: Any) -> jax.Array:
            names = _tensor_names(path, leaf)
            parts = [(files[locations[name]], name) for name in names]
            sharding = parameter_sharding(parameter_name(path), mesh)
            callback = functools.partial(_read_part, parts, leaf, dtype)
            # Waiting keeps a single tensor on the host.
            return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, callback))

        return jax.tree_util.tree_map_with_path(read, abstract)


def load_target_model(
    directory: pathlib.Path, dtype: jnp.dtype | None, mesh: jax.sharding.Mesh | None = None
) -> TargetModel:
    """The target in a checkpoint directory; `dtype` as for `load_module`."""
    config = target_config(directory)
    _check_mesh(config, directory, mesh)
    abstract = jax.eval_shape(lambda: TargetModel(config, rngs=nnx.Rngs(0)))
    return load_module(abstract, directory, dtype, mesh)


def load_head_model(
    directory: pathlib.Path, dtype: jnp.dtype | None, mesh: jax.sharding.Mesh | None = None
) -> DraftHead:
    """The draft head in a checkpoint directory; `dtype` as for `load_module`."""
    config = head_config(directory)
    _check_mesh(config, directory, mesh)
    abstract = jax.eval_shape(lambda: DraftHead(config, rngs=nnx.Rngs(0)))
    return load_module(abstract, directory, dtype, mesh)


def target_config(directory: pathlib.Path) -> TargetConfig:
    """The architecture of the target in a checkpoint directory."""
    return _parse(TargetConfig, directory)


def head_config(directory: pathlib.Path) -> HeadConfig:
    """The layout of the draft head in a checkpoint directory."""
    return _parse(HeadConfig, directory)


def eos_ids(directory: pathlib.Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, else config.json's, else none.

    Raises:
        CheckpointError: they are neither a token id nor a list of token ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
            return tuple(ids)
    return ()


def load_tokenizer(directory: pathlib.Path) -> PreTrainedTokenizerBase | None:
    """The directory's tokenizer, None when it has no tokenizer files.

    Raises:
        CheckpointError: transformers cannot read them.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    # Imported here: it takes a second, which token ids alone do not need, and warns that torch is missing, which
    # tokenizers do not need either.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # whatever its readers trip over
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(
            f"{directory}: its tokenizer cannot be loaded ({reason}); tokenizer.json, tokenizer_config.json or a file "
            "beside them is missing or broken"
        ) from error


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
    described, weights = directory / "config.json", directory / WEIGHTS
    described.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(hf_tensors(module), weights, metadata={"format": "pt"})
    weights.chmod(described.stat().st_mode)  # newer versions of safetensors leave it to its owner alone


def _parse(kind: type[Any], directory: pathlib.Path) -> Any:
    data = read_json(directory / "config.json")
    try:
        return kind.from_hf(data)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None


def _check_mesh(config: DecoderConfig, directory: pathlib.Path, mesh: jax.sharding.Mesh | None) -> None:
    problems = [] if mesh is None else misfits(config, mesh)
    if mesh is not None and problems:
        raise CheckpointError(
            f"{directory} cannot be split over the mesh {describe(mesh.shape)}: {'; '.join(problems)}"
        )


def parameter_name(path: tuple[Any, ...]) -> str:
    """`model.layers.0.mlp.up_proj.weight` for the key path of that parameter's array."""
    # The last key is the NNX variable's own "value".
    return ".".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path[:-1])


def _tensor_names(path: tuple[Any, ...], leaf: Any) -> list[str]:
    """The tensors that a parameter is stored as: one, or one for each of a layer's experts."""
    name = parameter_name(path)
    if leaf.ndim < 3:
        return [name]
    *module, layer, kind = name.split(".")
    return [".".join([*module, str(expert), layer, kind]) for expert in range(leaf.shape[0])]


def _expert(leaf: Any, index: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[index]


def _misfits(wanted: dict[str, Any], locations: dict[str, pathlib.Path], files: dict[pathlib.Path, Any]) -> list[str]:
    """What keeps the files' tensors from filling the wanted ones."""
    problems = [f"missing {name} {tuple(leaf.shape)}" for name, leaf in wanted.items() if name not in locations]
    problems += [f"unexpected {name}" for name in locations if name not in wanted]
    held = {path: set(file.keys()) for path, file in files.items()}
    for name, leaf in wanted.items():
        path = locations.get(name)
        if path is None:
            continue
        if name not in held[path]:
            problems.append(f"missing {name} in {path}, where the index says it is")
            continue
        shape = tuple(files[path].get_slice(name).get_shape())
        if shape != tuple(leaf.shape):
            problems.append(f"{name} has shape {shape}, expected {tuple(leaf.shape)}")
    return problems


def _stated_dtype(directory: pathlib.Path) -> jnp.dtype | None:
    """The dtype that config.json names, None without one; `torch_dtype` is its name before transformers 5."""
    data = read_json(directory / "config.json")
    stated = data.get("torch_dtype") if data.get("dtype") is None else data["dtype"]
    if stated is None:
        return None
    if stated not in _DTYPES:
        raise CheckpointError(
            f"{directory / 'config.json'}: dtype {stated!r} is none of {', '.join(_DTYPES)}; give dtype= to choose one"
        )
    return jnp.dtype(stated)


def _mixture(locations: dict[str, pathlib.Path], files: dict[pathlib.Path, Any]) -> list[str]:
    """The complaint about tensors of several dtypes; none where all have the same."""
    kinds = sorted({files[path].get_slice(name).get_dtype() for name, path in locations.items()})
    return [f"tensors are {', '.join(kinds)}, and it names no dtype; give dtype= to choose one"] if kinds[1:] else []


def _read_part(
    parts: list[tuple[Any, str]], leaf: Any, dtype: jnp.dtype | None, index: tuple[slice, ...]
) -> np.ndarray:
    """The part `index` of a parameter, of its one tensor or of its experts' tensors, in `dtype` (None: the file's)."""
    if leaf.ndim < 3:
        [(file, name)] = parts
        part = file.get_slice(name)[index]
        return part if dtype is None else part.astype(dtype, copy=False)
    chosen = parts[index[0]]
    out: np.ndarray | None = None
    for row, (file, name) in enumerate(chosen):
        part = file.get_slice(name)[index[1:]]
        if out is None:
            out = np.empty((len(chosen), *part.shape), part.dtype if dtype is None else dtype)
        out[row] = part
    assert out is not None
    return out


def _tensor_files(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Tensor name to the safetensors file that holds it, by the single file or the index.

    The single file wins, as in transformers: a model saved over shards leaves those and their index behind.
    """
    single, index = directory / WEIGHTS, directory / INDEX
    if single.exists():
        with _open_safetensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    if index.exists():
        files = {name: directory / file for name, file in weight_map(index).items()}
        absent = sorted({str(path) for path in files.values() if not path.exists()})
        if absent:
            raise CheckpointError(f"{index} names files that do not exist: {', '.join(absent)}")
        return files
    message = f"{directory} has neither {WEIGHTS} nor {INDEX}"
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        message += (
            f"; it has {', '.join(pickles)}, but pickled weights are not read, since loading them can run code: "
            "safetensors are needed"
        )
    raise CheckpointError(message)


def _open_safetensors(path: pathlib.Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
