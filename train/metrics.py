"""What a run reports: kept on the device until it is asked for, then to JSONL, TensorBoard and a terminal."""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar
from tqdm import tqdm

from train.step import StepMetrics

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Window:
    """The steps since the last report. Nothing is fetched from the device before `summary`.

    At most two steps are under way, so that a signal is seen soon and the device has always one to go on with.
    """

    def __init__(self) -> None:
        self._steps: list[StepMetrics] = []
        self._flops = 0.0
        self._started = time.perf_counter()

    def add(self, metrics: StepMetrics, flops: float) -> None:
        """Counts a step that has been dispatched, and the FLOPs that it needs; waits for the step before the last."""
        self._steps.append(metrics)
        jax.block_until_ready(self._steps[-3:-2])
        self._flops += flops

    def pause(self, seconds: float) -> None:
        """Leaves out time in which something else was done."""
        self._started += seconds

    def summary(self, peak: float | None = None) -> dict[str, Any]:
        """The means over the window's finite steps (None without any), and the speed of all; starts the next window.

        Args:
            peak: FLOP/s of all devices; with it the result has `mfu`.
        """
        steps: list[StepMetrics] = jax.device_get(self._steps)
        now = time.perf_counter()
        seconds, flops = now - self._started, self._flops
        self._steps, self._flops, self._started = [], 0.0, now
        finite = [step for step in steps if step.finite]
        report: dict[str, Any] = dict.fromkeys(("loss", "gradient_norm", "agreement", "accepted_length", "coverage"))
        if finite:
            blocks = jax.tree.map(lambda *values: np.sum(values, axis=0), *[step.blocks for step in finite])
            report = {
                "loss": _rounded(blocks.loss),
                "gradient_norm": _rounded(np.mean([step.gradient_norm for step in finite])),
                "agreement": [_rounded(share) for share in np.asarray(blocks.agreement)],
                "accepted_length": _rounded(blocks.accepted),
                "coverage": _rounded(blocks.coverage),
            }
        report["skipped"] = int(steps[-1].skipped)
        report["skipped_in_a_row"] = int(steps[-1].skipped_in_a_row)
        report["tokens_per_second"] = _rounded(sum(int(step.tokens) for step in steps) / seconds)
        report["steps_per_second"] = _rounded(len(steps) / seconds)
        if peak:
            report["mfu"] = _rounded(flops / seconds / peak)
        return report


class MetricsLog:
    """metrics.jsonl and TensorBoard files in a run directory, lines for people, and a bar on a terminal.

    Args:
        out: the run directory.
        step: steps already taken; what the files say of later ones is dropped.
        steps: of the whole run.
        write: whether this process writes (one of all does).
    """

    def __init__(self, out: pathlib.Path, step: int, steps: int, write: bool):
        self._write = write
        if write:
            _drop_after(out / METRICS, step)
            self._file = open(out / METRICS, "a")  # noqa: SIM115 - closed by `close`
            (out / TENSORBOARD).mkdir(exist_ok=True)
            # Not a SummaryWriter: its thread and queue may hold up the end of a run.
            self._board = EventsWriter(str(out / TENSORBOARD / "events"))
            if step:  # TensorBoard hides what earlier files say of later steps
                self._board.write_event(self._event(step + 1, session_log=SessionLog(status=SessionLog.START)))
        hidden = not (write and sys.stderr.isatty())
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=hidden, dynamic_ncols=True)

    def stepped(self) -> None:
        """Moves the bar."""
        self._bar.update()

    def report(self, step: int, values: dict[str, Any]) -> None:
        """One line of metrics.jsonl, which holds `values`; numbers are TensorBoard's scalars, too."""
        if not self._write:
            return
        print(json.dumps({"step": step, **values}), file=self._file, flush=True)
        for name, value in _scalars(values):
            self._board.write_event(self._event(step, summary=scalar(name, value)))
        self._board.flush()
        self._bar.write(_line(step, values))

    def _event(self, step: int, **fields: Any) -> Event:
        return Event(step=step, wall_time=time.time(), **fields)

    def close(self) -> None:
        """Ends the files and the bar."""
        self._bar.close()
        if self._write:
            self._file.close()
            self._board.close()


def _drop_after(path: pathlib.Path, step: int) -> None:
    """Keeps the lines up to `step`: those after it are written again, and a kill may have cut off the last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            break
    part = path.with_suffix(".part")
    part.write_text("".join(kept))
    os.replace(part, path)


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Names such as `agreement/03` and `tau/chain`, and numbers."""
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found += [(f"{prefix}{name}/{slot:02}", share) for slot, share in enumerate(value, start=1)]
        elif value is not None:
            found.append((prefix + name, value))
    return found


def _line(step: int, values: dict[str, Any]) -> str:
    """What people want to see of a report."""
    if "tau" in values:
        return f"step {step}: tau " + ", ".join(f"{name} {tau:.2f}" for name, tau in values["tau"].items())
    shown = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items() if isinstance(value, float)]
    skipped = f", {values['skipped']} skipped" if values.get("skipped") else ""
    return f"step {step}: " + ", ".join(shown) + skipped


def _rounded(value: Any) -> float | None:
    """To six digits; None for what JSON has no number for."""
    number = float(value)
    return float(f"{number:.6g}") if math.isfinite(number) else None
