"""What regenerated data was made from: written before the first answer, and held against the flags at every resume."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from jetspec_jax.chat import thinking_mode
from jetspec_jax.engine import GenerationConfig
from jetspec_jax.models import Target
from train.files import differences, write_json

MANIFEST = "manifest.json"
DATA = "data.jsonl"
_FORMAT = 1
_IDENTITY = ("config.json", "generation_config.json", "*.safetensors", "tokenizer*", "chat_template*")


@dataclasses.dataclass
class Manifest:
    """The contents of manifest.json.

    settings: all that decides the text of the answers; a resume with others is refused.
    run: how they were computed, which changes no text (up to rounding in bfloat16): draft head, method, batches.
    counts: answers, their tokens, how many ended by themselves, and prompts left out. finished: all are answered.
    """

    settings: dict[str, Any]
    run: dict[str, Any]
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    finished: bool = False
    format: int = _FORMAT

    @classmethod
    def read(cls, directory: pathlib.Path) -> Manifest:
        """The manifest of a directory.

        Raises:
            ValueError: it cannot be read, or another version wrote it.
        """
        path = directory / MANIFEST
        try:
            data = json.loads(path.read_text())
            manifest = cls(**data)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if manifest.format != _FORMAT:
            raise ValueError(f"{path} has format {manifest.format}, expected {_FORMAT}; regenerate the data")
        return manifest

    def write(self, directory: pathlib.Path) -> None:
        """Replaces the directory's manifest in one step, so that a reader never sees half of it."""
        write_json(directory / MANIFEST, dataclasses.asdict(self))

    def check_same(self, directory: pathlib.Path, settings: dict[str, Any]) -> None:
        """Raises ValueError, naming every field that differs, unless `settings` are the ones of this manifest."""
        if differing := differences(self.settings, settings):
            raise ValueError(
                f"{directory} holds answers made with other settings: {'; '.join(differing)}; "
                "resume with the same ones, or give another --out"
            )

    def check_finished(self, directory: pathlib.Path) -> None:
        """Raises ValueError unless every prompt has its answer."""
        if not self.finished:
            raise ValueError(
                f"{directory} is not finished; run train.regenerate again with the same flags to complete it, "
                f"or give {directory / DATA} to train on the answers that are there"
            )


def text_settings(
    target: Target,
    dtype: str,
    config: GenerationConfig,
    prompts: list[Any],
    *,
    system: str | None,
    enable_thinking: bool | None,
) -> dict[str, Any]:
    """All that decides the text of answers.

    Args:
        prompts: what is asked, before the chat template.
        system, enable_thinking: as for `chat_prompt`.
    """
    tokenizer = target.tokenizer
    template = None if tokenizer is None else tokenizer.chat_template
    sampling = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    if config.sampling.greedy:
        sampling = {"temperature": 0.0}  # the others are without effect
    return {
        "model": target.name,
        "revision": _revision(target.path),
        "model_sha256": model_digest(target.path),
        "dtype": dtype,
        "chat_template_sha256": None if template is None else _sha256(json.dumps(template)),
        "enable_thinking": thinking_mode(target, enable_thinking),
        "system": system,
        "prompts_sha256": _sha256(json.dumps(prompts)),
        "prompt_count": len(prompts),
        "max_new_tokens": config.max_new_tokens,
        **sampling,
    }


def _revision(path: pathlib.Path) -> str | None:
    """The commit of a hub snapshot."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None


def model_digest(path: pathlib.Path) -> str:
    """Digest of the files that make a model, so that a retrained one in the same place is another."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _IDENTITY for file in path.glob(pattern)}):
        digest.update(file.name.encode())
        state = file.stat()
        digest.update(_file_digest(file, state.st_size, state.st_mtime_ns))
    return digest.hexdigest()


@functools.cache
def _file_digest(file: pathlib.Path, size: int, changed: int) -> bytes:
    """Of a file of this size and time of change: weights are read once in a process."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def answered(path: pathlib.Path, order: np.ndarray, batch_size: int) -> tuple[int, int, dict[str, int]]:
    """How far a data file goes: what a resume keeps of it.

    Answers are kept up to the last whole batch, so that the batches to come are those of an uninterrupted run. A last
    line that a kill cut off is not an answer.

    Args:
        order: the prompt index of every line of the finished file.

    Returns:
        The number of answers to keep, their size in bytes, and their counts.

    Raises:
        ValueError: a line is not the answer that belongs there; file and line are named.
    """
    counts = new_counts()
    kept = (0, 0, dict(counts))
    if not path.exists():
        return kept
    size = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
                right = number <= len(order) and row["index"] == order[number - 1]
                count_answer(counts, row)
            except (ValueError, KeyError, TypeError):
                right = False
            if not right:
                expected = f"the answer to prompt {order[number - 1]}" if number <= len(order) else "the end"
                raise ValueError(f"{path}:{number}: expected {expected}; the file was changed, so give another --out")
            size += len(line)
            if number % batch_size == 0 or number == len(order):
                kept = (number, size, dict(counts))
    return kept


def new_counts() -> dict[str, int]:
    """The counts of no answers."""
    return {"answers": 0, "tokens": 0, "ended": 0, "cut": 0}


def count_answer(counts: dict[str, int], row: dict[str, Any]) -> None:
    """Adds one line of a data file to `counts`."""
    counts["answers"] += 1
    counts["tokens"] += len(row["token_ids"])
    counts["ended" if row["finish_reason"] == "stop" else "cut"] += 1
