"""Rows of JSONL files and Hugging Face datasets, read at random; malformed ones are counted and named."""

from __future__ import annotations

import hashlib
import json
import mmap
import pathlib
import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

MAX_MALFORMED = 0.01  # share of rows above which a source is refused
_SHOWN = 5  # malformed rows that a message quotes
_HUB = re.compile(r"hf:(?P<name>[^:]+)(::(?P<subset>[^:]+))?(:(?P<split>[^:].*))?")


class Rows(Protocol):
    """A source of rows. `source` is how the user named it, `digest` changes with what the rows hold."""

    source: str
    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Row `index` as JSON holds it; ValueError where it is none."""
        ...

    def where(self, index: int) -> str:
        """The row's place, as messages name it."""
        ...


class JsonLines:
    """The lines of a JSONL file that are not blank; fields that are null are left out.

    The file is mapped, not read: only line starts are in memory.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, path: pathlib.Path):
        self.source = str(path)
        starts, numbers, offset = [], [], 0
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        starts.append(offset)
                        numbers.append(number)
                    offset += len(line)
                    digest.update(line)
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if offset else b""
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}); for a hub dataset write hf:org/name") from None
        self.digest = digest.hexdigest()
        self._starts, self._numbers = np.asarray(starts, np.int64), np.asarray(numbers, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        try:
            return _without_none(json.loads(self._bytes[start : end if end >= 0 else len(self._bytes)]))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None

    def where(self, index: int) -> str:
        """File and line."""
        return f"{self.source}:{self._numbers[index]}"


class HubDataset:
    """Rows of a Hugging Face dataset, by the optional `datasets` library; columns without a value are left out.

    Args:
        source: `hf:org/name`, then `::subset` and `:split` where they are needed. The split is "train" by default, and
            may be a slice such as `train[:1000]`.

    Raises:
        ValueError: the library is missing, or it cannot load the dataset.
    """

    def __init__(self, source: str):
        parts = _HUB.fullmatch(source)
        if parts is None:
            raise ValueError(f"{source}: expected hf:org/name, hf:org/name:split or hf:org/name::subset:split")
        try:
            import datasets  # here, as files do not need it
        except ImportError:
            raise ValueError(
                f"{source} needs the datasets library: pip install 'jetspec-jax[datasets]' (or pip install datasets)"
            ) from None
        self.source = source
        try:
            self._data: Any = datasets.load_dataset(
                parts["name"], parts["subset"] or None, split=parts["split"] or "train"
            )
        except Exception as error:  # the library's errors, and those of the HTTP client below it, have no common base
            raise ValueError(f"{source} cannot be loaded ({type(error).__name__}: {error})") from None
        self.digest = str(self._data._fingerprint)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return _without_none(self._data[int(index)])

    def where(self, index: int) -> str:
        """Dataset and row, the first being row 0 as in the library."""
        return f"{self.source} row {index}"


def _without_none(value: Any) -> Any:
    """A row without fields that hold nothing: tables give every row, and every part, the fields of all others."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def open_rows(source: str) -> Rows:
    """The rows of a JSONL file, or of a dataset named `hf:...`.

    Raises:
        ValueError: it cannot be opened.
    """
    return HubDataset(source) if source.startswith("hf:") else JsonLines(pathlib.Path(source).expanduser())


def good_rows(rows: Rows, check: Callable[[Any], object]) -> tuple[np.ndarray, list[str]]:
    """The rows that pass a check.

    Args:
        check: given a row, raises ValueError with what is wrong.

    Returns:
        int64 indices of the good rows, and warnings: one line when rows were left out.

    Raises:
        ValueError: there are no rows, or more than 1% of them are malformed; the first are listed.
    """
    if not len(rows):
        raise ValueError(f"{rows.source} holds no rows")
    good: list[int] = []
    shown: list[str] = []
    malformed = 0
    for index in range(len(rows)):
        try:
            check(rows[index])
        except ValueError as error:
            malformed += 1
            if len(shown) < _SHOWN:
                shown.append(f"{rows.where(index)}: {error}")
        else:
            good.append(index)
    warnings = left_out(rows.source, malformed, len(rows), "malformed", shown)
    return np.asarray(good, np.int64), warnings


def left_out(source: str, count: int, total: int, what: str, shown: list[str]) -> list[str]:
    """What is said about rows that are left out: nothing for none, a warning for few.

    Raises:
        ValueError: they are more than `MAX_MALFORMED` of all.
    """
    if not count:
        return []
    listing = "; ".join(shown) + ("; ..." if count > len(shown) else "")
    if count > MAX_MALFORMED * total:
        raise ValueError(
            f"{source}: {count} of {total} rows are {what}, more than {MAX_MALFORMED:.0%}; mend them. {listing}"
        )
    return [f"{source}: left out {count} of {total} rows that are {what}: {listing}"]
