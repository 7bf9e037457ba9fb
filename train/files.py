"""Directories that a run writes: one process at a time, and whole files only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def locked(out: pathlib.Path) -> Iterator[None]:
    """Keeps a second process out of a directory; the lock ends with the process, however it ends.

    Raises:
        ValueError: another process holds it.
    """
    with open(out / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes to {out}; wait for it, or give another directory") from None
        yield


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """ "NAME was X and is now Y" for every field that two records do not have alike; one that lacks it has None."""
    return [
        f"{name} was {before.get(name)!r} and is now {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces a file in one step, so that a reader never sees half of it."""
    part = path.with_suffix(".part")
    with open(part, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
