"""`python -m train.plot RUN [RUN...]`: curves of training runs from their metrics.jsonl, to a PNG.

One panel a metric, one line a run. Where a metric holds several numbers (`agreement` one a slot, `tau` one a budget),
each has a line. Needs matplotlib (`pip install 'jetspec-jax[plot]'`).
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

METRICS = "metrics.jsonl"
DEFAULT = ("loss", "accepted_length", "agreement", "tau", "learning_rate", "gradient_norm", "tokens_per_second")
_COLUMNS = 3

Curve = list[tuple[int, float]]
"""Steps and values, in the file's order."""


def read_curves(run: pathlib.Path) -> dict[str, dict[str, Curve]]:
    """The curves of a run: by metric, then by what the metric has several of ("" for a single number).

    Slots of a list are named from 1. Values that are no numbers (null, where a step was not finite) leave a gap.

    Args:
        run: a run directory, or a metrics file.

    Raises:
        ValueError: there is no such file, it holds no line, or a line is not an object with a `step`.
    """
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{run}: expected a run of train.distill with {METRICS}, or such a file; there is none")
    curves: dict[str, dict[str, Curve]] = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            values = _parsed(line, f"{path}, line {number}")
            for metric, value in values.items():
                for part, part_value in _parts(value):
                    if metric != "step" and _is_number(part_value):
                        curves.setdefault(metric, {}).setdefault(part, []).append((values["step"], part_value))
    if not curves:
        raise ValueError(f"{path}: no metrics; has the run reported a step yet?")
    return curves


def draw(runs: Sequence[pathlib.Path], metrics: Sequence[str], out: pathlib.Path) -> list[str]:
    """Writes the curves of `runs` as a PNG; returns the metrics that are in it.

    Args:
        metrics: names, in order; empty means those of `DEFAULT` that any run has.

    Raises:
        ValueError: a run cannot be read, no run has a metric that was named, or matplotlib is missing.
    """
    names = _short_names(runs)
    curves = dict(zip(names, map(read_curves, runs), strict=True))
    known = {metric for found in curves.values() for metric in found}
    missing = [metric for metric in metrics if metric not in known]
    if missing:
        raise ValueError(f"no run has --metric {missing[0]}; there are {', '.join(sorted(known))}")
    shown = list(metrics) or [metric for metric in DEFAULT if metric in known] or sorted(known)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'jetspec-jax[plot]'") from None
    columns = min(_COLUMNS, len(shown))
    rows = -(-len(shown) // columns)
    # A figure of its own, not pyplot's: no window, no global state.
    figure = Figure(figsize=(5 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, metric in enumerate(shown):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set(title=metric.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
        _draw_metric(axes, metric, curves)
    figure.savefig(out, dpi=120, format="png")
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m train.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("curve.png"), help="the PNG (%(default)s)")
    parser.add_argument("--metric", nargs="+", default=[], metavar="NAME", help=f"by default {', '.join(DEFAULT)}")
    args = parser.parse_args(arguments)
    try:
        shown = draw(args.runs, args.metric, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {args.out}: {', '.join(shown)}")


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}); remove the line") from None
    if not isinstance(values, dict) or not _is_number(values.get("step")):
        raise ValueError(f"{where}: expected an object with a number `step`, got {line.strip()[:60]!r}")
    return values


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return [(str(slot), part) for slot, part in enumerate(value, start=1)]
    return [("", value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short_names(runs: Sequence[pathlib.Path]) -> list[str]:
    """Directory names, or whole paths where two are alike."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _draw_metric(axes: Any, metric: str, curves: dict[str, dict[str, dict[str, Curve]]]) -> None:
    """A run has a colour, its parts shades of it; a single run's parts have colours of their own."""
    for number, (name, found) in enumerate(curves.items()):
        parts = found.get(metric, {})
        for index, (part, curve) in enumerate(parts.items()):
            alone = len(curves) == 1 and len(parts) > 1
            label = part if alone else f"{name} {part}".strip()
            steps, values = zip(*curve, strict=True)
            axes.plot(
                steps, values, label=label, color=f"C{index % 10 if alone else number % 10}",
                alpha=1.0 if alone else 1 - 0.7 * index / max(len(parts), 1), marker="." if len(curve) < 30 else None,
            )  # fmt: skip
    if len(curves) > 1 or len(axes.lines) > 1:
        axes.legend(fontsize=7, ncols=1 + len(axes.lines) // 8)


if __name__ == "__main__":
    main()
