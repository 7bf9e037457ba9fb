"""What a person sees: text as it streams, and the table of figures."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from jetspec_jax import GenerationResult, Progress
from jetspec_jax.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DRAFTED, _TARGET, _RESET = "\033[32m", "\033[1;36m", "\033[0m"


def wants_colour(file: TextIO) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set."""
    return file.isatty() and not os.environ.get("NO_COLOR")


class Printer:
    """Prints one row's tokens as rounds commit them: accepted drafts green, the target's own tokens bold cyan.

    Text that may begin one of the `stop` texts waits until it is known not to, and takes the later token's colour.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, file: TextIO | None = None, *, stop: Sequence[str] = ()
    ):
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop)
        self._file = file or sys.stdout
        self._colour = wants_colour(self._file)
        self._printed = 0

    def update(self, progress: Progress) -> None:
        """Prints what is new in a batch of one row."""
        tokens, drafted = progress.row(0)
        for token, draft in zip(tokens[self._printed :], drafted[self._printed :], strict=True):
            piece = f"{token} " if self._stream is None else self._stream.push(token)
            self._write(piece, _DRAFTED if draft else _TARGET)
        self._printed = len(tokens)
        if progress.finished.all():
            self._write("" if self._stream is None else self._stream.finish(), _TARGET)
            self._file.write("\n")
        self._file.flush()

    def _write(self, text: str, colour: str) -> None:
        self._file.write(f"{colour}{text}{_RESET}" if self._colour and text else text)


def legend(file: TextIO | None = None) -> str:
    """What the colours mean; empty where there are none."""
    if not wants_colour(file or sys.stdout):
        return ""
    return f"{_DRAFTED}accepted drafts{_RESET}, {_TARGET}the target's own tokens{_RESET}"


def table(runs: Sequence[Sequence[GenerationResult]], batch_size: int) -> str:
    """The figures of one or more methods over the same prompts, one line a method.

    tau is tokens committed per target forward (prefill's own token and prefill apart); tokens/s counts the new
    tokens of all prompts over the time of all batches, compilation excluded. With several methods, the last is
    what the speed-up is against.
    """
    rates = [tokens_per_second(run, batch_size) for run in runs]
    lines = [f"{'method':<10}{'budget':>7}{'tokens':>8}{'rounds':>8}{'tau':>7}{'tokens/s':>10}{'speed-up':>10}"]
    for run, rate in zip(runs, rates, strict=True):
        tokens, rounds = sum(len(r.token_ids) for r in run), sum(r.rounds for r in run)
        tau = sum(sum(r.accepted_lengths) for r in run) / max(rounds, 1)
        budget = "-" if run[0].method == "ar" else str(run[0].budget)
        gain = f"{rate / rates[-1]:.2f}x" if len(runs) > 1 else ""
        lines.append(f"{run[0].method:<10}{budget:>7}{tokens:>8}{rounds:>8}{tau:>7.2f}{rate:>10.0f}{gain:>10}")
    return "\n".join(line.rstrip() for line in lines)


def tokens_per_second(run: Sequence[GenerationResult], batch_size: int) -> float:
    """New tokens of all prompts over the time of all batches."""
    return sum(len(r.token_ids) for r in run) / sum(r.seconds for r in run[::batch_size])


def median_run(runs: Sequence[Sequence[GenerationResult]], batch_size: int) -> Sequence[GenerationResult]:
    """The repeat whose speed is the (lower) median."""
    rates = [tokens_per_second(run, batch_size) for run in runs]
    return runs[rates.index(statistics.median_low(rates))]
