"""Where a checkpoint lies: in a directory, or in a repository of the Hugging Face hub by way of its local cache."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from typing import Any

from jetspec_jax.checkpoint import INDEX, WEIGHTS, CheckpointError, weight_map

_EXPECTED_TEXT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")  # a target may have others
_TEXT = (
    *_EXPECTED_TEXT,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
# Never *.bin, *.pt or other pickles: loading those can run code.
_FILES = ("config.json", "*.safetensors", INDEX, *_TEXT)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SUBFOLDER = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


def find_checkpoint(path: str | os.PathLike[str], revision: str | None = None, *, text: bool = False) -> pathlib.Path:
    """The directory of a checkpoint.

    Args:
        path: a directory, or a hub id `org/name`, whose files are taken from the hub's cache when they are there and
            downloaded otherwise. `::subfolder` after either is a folder inside it.
        revision: a hub repository's branch, tag or commit; None is its main branch.
        text: whether the tokenizer and generation_config.json belong to it. Where the cache lacks one of them, the hub
            is asked for them; a repository need not have them.

    Raises:
        CheckpointError: there is no such directory, and no such repository can be had; the message says what was tried.
    """
    name, separator, subfolder = os.fspath(path).partition("::")
    if separator and not _SUBFOLDER.fullmatch(subfolder):
        raise CheckpointError(f"{path}: expected a folder's name after '::', got {subfolder!r}")
    directory = pathlib.Path(name).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise CheckpointError(f"{name} is a directory; revision {revision!r} is for hub ids only")
        if not (directory / subfolder).is_dir():
            raise CheckpointError(f"{directory} has no folder {subfolder}")
        return directory / subfolder
    if directory.exists() or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{path} is not a directory; expected a checkpoint directory with a config.json, "
            "or a hub id such as Qwen/Qwen3-8B"
        )
    return _from_hub(name, subfolder, revision, text)


def _from_hub(name: str, subfolder: str, revision: str | None, text: bool) -> pathlib.Path:
    """The folder of a snapshot in the hub's cache, downloaded unless it is there."""
    from huggingface_hub import constants, snapshot_download  # here, as directories do not need it

    prefix = f"{subfolder}/" if subfolder else ""
    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": [prefix + pattern for pattern in _FILES],
        "ignore_patterns": [f"{prefix}*/*"],  # other subfolders hold other checkpoints
    }
    asked = f"{name} at revision {revision}" if revision else name
    try:
        snapshot = pathlib.Path(snapshot_download(name, local_files_only=True, **options))
        found = snapshot / subfolder
        if not _missing(found):
            if text and not all((found / file).exists() for file in _EXPECTED_TEXT):
                # Others cache weights alone. Of the same commit, as the branch may have moved on.
                texts = {**options, "revision": snapshot.name, "allow_patterns": [prefix + file for file in _TEXT]}
                with contextlib.suppress(Exception):  # the repository has none, or offline: what is there must do
                    snapshot_download(name, **texts)
            return found
    except (OSError, ValueError):
        pass  # not in the cache, or only in part: the hub is asked, and what it says is the error
    try:
        found = pathlib.Path(snapshot_download(name, **options)) / subfolder
    except Exception as error:  # the HTTP client's own errors have no base class that is stable over its versions
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _one_line(error.__cause__ or error)
        raise CheckpointError(
            f"{asked} is not a directory, not (or not wholly) in the hub's cache {constants.HF_HUB_CACHE}, and could "
            f"not be downloaded ({reason}); check the name, run once with network access to fill the cache, "
            "or give a directory"
        ) from None
    missing = _missing(found)
    if missing:
        raise CheckpointError(
            f"{asked}: {found} lacks {', '.join(missing)}; if the cache holds only a part, run once with network "
            "access; weights are needed as safetensors, pickled ones (.bin, .pt) are not read"
        )
    return found


def _missing(directory: pathlib.Path) -> list[str]:
    """The files without which a checkpoint cannot be read and that are not there."""
    names = {"config.json"}
    if (directory / INDEX).exists() and not (directory / WEIGHTS).exists():
        names.update(weight_map(directory / INDEX).values())
    else:
        names.add(WEIGHTS)
    return sorted(name for name in names if not (directory / name).exists())


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
