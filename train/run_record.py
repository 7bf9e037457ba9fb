"""run.json: what a run was started with, held against the command at every resume."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from train.files import differences, write_json

RECORD = "run.json"
CHECKPOINTS = "checkpoints"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The contents of run.json.

    fingerprint: what decides the weights; a resume with another is refused. config: the resolved config, whole.
    derived: numbers that follow from it. versions: of Python and packages.
    """

    fingerprint: dict[str, Any]
    config: dict[str, Any]
    derived: dict[str, Any]
    versions: dict[str, str]
    format: int = _FORMAT

    @classmethod
    def read(cls, directory: pathlib.Path) -> RunRecord:
        """The record of a run directory.

        Raises:
            ValueError: it cannot be read, or another version wrote it.
        """
        path = directory / RECORD
        try:
            record = cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if record.format != _FORMAT:
            raise ValueError(f"{path} has format {record.format}, expected {_FORMAT}; start a new run")
        return record

    def write(self, directory: pathlib.Path) -> None:
        """Replaces the directory's record."""
        write_json(directory / RECORD, dataclasses.asdict(self))

    def check_same(self, directory: pathlib.Path, fingerprint: dict[str, Any]) -> None:
        """Raises ValueError, naming every field that differs, unless `fingerprint` is the one of this record."""
        if differing := differences(self.fingerprint, fingerprint):
            raise ValueError(
                f"{directory} holds a run that was started otherwise: {'; '.join(differing)}; resume it with the same "
                "config and data, or give another --config.out"
            )


def to_continue(out: pathlib.Path, resume: str) -> bool:
    """Whether `out` holds a run that is to go on.

    Raises:
        ValueError: it holds something, and `resume` is "never"; or something that is no run.
    """
    found = [name for name in (RECORD, CHECKPOINTS, "config.json") if (out / name).exists()]
    if not found:
        return False
    if resume == "never":
        raise ValueError(
            f"{out} already holds {', '.join(found)}; --resume=auto continues a run, --config.out=DIR starts another"
        )
    if RECORD not in found:
        raise ValueError(f"{out} holds {', '.join(found)} and no {RECORD}, so it is no run; give another --config.out")
    return True
