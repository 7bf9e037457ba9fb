"""`python -m train.distill --config configs/tiny.py`: trains a draft head for a frozen target.

The run directory `--config.out` holds run.json (config, data, versions), metrics.jsonl, TensorBoard files, checkpoints,
and, from the first checkpoint on, the head in the published format; `best` holds the one with the highest tau.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import grain
import jax
from absl import app, flags
from jax.experimental import multihost_utils
from ml_collections import config_flags

from jetspec_jax.compiled import enable_compilation_cache
from jetspec_jax.sharding import use
from kernels.topology import CHIPS
from train import distributed
from train.argmax_share import low_share_warning
from train.checkpoints import Checkpoints, export
from train.command import given_config, parse_flags
from train.config import DistillConfig
from train.data import Packed
from train.files import locked
from train.metrics import MetricsLog, Window
from train.optimizer import schedule
from train.placing import place_rows
from train.plan import plan_run
from train.run_record import CHECKPOINTS, RunRecord, to_continue
from train.setup import Setup, check_config, derived, fingerprint, make_setup, versions
from train.step import MAX_SKIPPED, TrainState, train_step
from train.tau import HeldOut, deciding, held_out, held_out_prompts

BEST = "best"


class Interrupted(Exception):
    """The run was told to end by a signal, and is saved."""

    def __init__(self, number: int):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class Diverged(Exception):
    """Too many steps in a row were not finite; the run is saved."""

    def __init__(self, step: int, count: int):
        super().__init__(
            f"{count} steps in a row had no finite loss or gradient, up to step {step}, and the run is saved; "
            "start another with a lower learning rate, or look at the data"
        )


def distill(config: DistillConfig, *, resume: str = "never") -> pathlib.Path:
    """Trains the head that `config` describes; returns the run directory.

    Args:
        resume: "never" refuses a directory that holds a run; "auto" continues the run that is there, if there is one.

    Raises:
        ValueError: config, target, data, devices or run directory cannot be used as they are.
        Interrupted: by SIGTERM or SIGINT; the state is saved.
        Diverged: ten steps in a row were not finite; the state is saved.
    """
    check_config(config)
    prompts = held_out_prompts(config)
    out = pathlib.Path(config.out).expanduser()
    continued = to_continue(out, resume)
    _everyone("looked at the run directory")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out) if jax.process_index() == 0 else contextlib.nullcontext():
        setup = make_setup(config)
        evaluation = held_out(config, prompts, setup.target, setup.documents.enable_thinking)
        _record(out, setup, continued)
        with contextlib.closing(Checkpoints(out / CHECKPOINTS, config.keep_last)) as checkpoints:
            batches = setup.batches()
            found = checkpoints.restore(setup.abstract_state(), batches) if continued else None
            state, step, best = found or (setup.new_state(), 0, None)
            if found:
                _say(f"continuing after step {step} of {config.steps}")
            log = MetricsLog(out, step, config.steps, write=jax.process_index() == 0)
            run = _Run(setup, out, checkpoints, log, evaluation, best)
            with contextlib.closing(log), _signals() as told, use(setup.mesh):
                run.steps(state, step, batches, told)
    return out


@dataclasses.dataclass
class _Run:
    """A run under way. `best` is the highest tau so far."""

    setup: Setup
    out: pathlib.Path
    checkpoints: Checkpoints
    log: MetricsLog
    evaluation: HeldOut | None
    best: float | None

    def steps(
        self, state: TrainState, done: int, batches: grain.DatasetIterator[Packed], told: Callable[[int], int]
    ) -> None:
        """All steps after the first `done`; the last one's state is saved when this returns."""
        setup, config = self.setup, self.setup.config
        window = Window()
        for step in range(done + 1, config.steps + 1):
            batch = next(batches)
            placed = place_rows((batch, setup.blocks(step, batch)), setup.mesh)
            state, metrics = train_step(
                state, setup.target.model, *placed, optimizer=setup.optimizer, objective=setup.objective
            )
            window.add(metrics, setup.flops(batch))
            self.log.stepped()
            ended, number, report = step == config.steps, told(step), {}
            if ended or number or step % config.log_every == 0:
                report = self._report(step, window)
            failing = report.get("skipped_in_a_row", 0) >= MAX_SKIPPED
            evaluates = ended or step % (config.eval_every or config.steps) == 0
            if ended or number or failing or evaluates or step % config.save_every == 0:
                jax.block_until_ready(state)  # steps under way belong to the window, and what follows does not
                started = time.perf_counter()
                self._save(step, state, batches, evaluates)
                window.pause(time.perf_counter() - started)
            if number or failing:
                self.checkpoints.wait()
                raise Interrupted(number) if number else Diverged(step, report["skipped_in_a_row"])
        self.checkpoints.wait()
        export(self.out, state.head)  # a run that was complete may have lost it

    def _report(self, step: int, window: Window) -> dict[str, Any]:
        config = self.setup.config
        report = window.summary(self.setup.peak)
        taken = max(step - report["skipped"] - 1, 0)
        rate = float(schedule(config.optimizer, config.optimizer.learning_rate, config.steps)(taken))
        self.log.report(step, {"learning_rate": rate, **report})
        return report

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float] | None:
        if self.evaluation is None:
            return None
        started = time.perf_counter()
        taus = self.evaluation.tau(self.setup.target, state.head)
        self.log.report(step, {"tau": taus, "evaluation_seconds": round(time.perf_counter() - started, 2)})
        return taus

    def _save(self, step: int, state: TrainState, batches: grain.DatasetIterator[Packed], evaluates: bool) -> None:
        """A checkpoint and the head; the head as the best one too, when it is.

        An evaluation that fails costs no step: its error is raised when the state is saved.
        """
        try:
            taus = self._evaluate(step, state) if evaluates else None
        except Exception:
            self._write(step, state, batches, None)
            self.checkpoints.wait()
            raise
        self._write(step, state, batches, None if taus is None else deciding(taus))

    def _write(self, step: int, state: TrainState, batches: grain.DatasetIterator[Packed], tau: float | None) -> None:
        if tau is not None and (self.best is None or tau > self.best):
            self.best = tau
            export(self.out / BEST, state.head)  # first: a resume takes the checkpoint's tau as one whose head is there
        self.checkpoints.save(step, state, batches, tau)
        export(self.out, state.head)


def _record(out: pathlib.Path, setup: Setup, continued: bool) -> None:
    """Holds the run against its record, or writes the record; says what the run is."""
    marks = fingerprint(setup)
    if continued:
        RunRecord.read(out).check_same(out, marks)
    numbers = derived(setup)
    for warning in setup.documents.warnings:
        _say(f"warning: {warning}", sys.stderr)
    if not continued:
        share = setup.argmax_share()
        numbers["argmax_share"] = round(share, 4)
        low = low_share_warning(share)
        if low:
            _say(f"warning: {low}", sys.stderr)
    config = dataclasses.asdict(setup.config)
    _say(json.dumps({"config": config, "derived": numbers}, indent=2))
    _everyone("read the record")
    if not continued and jax.process_index() == 0:
        RunRecord(marks, config, numbers, versions()).write(out)


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[int], int]]:
    """While entered, SIGTERM and SIGINT are noted once; a second one ends the process at once.

    Yields:
        Given the step that was just taken, the number of the signal to end for, else 0. Several processes agree on
        the step by way of JAX's preemption service, which notes SIGTERM.
    """
    if jax.process_count() > 1:
        yield lambda step: signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
        return
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda step: received[0] if received else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _everyone(what: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _say(text: str, file: TextIO | None = None) -> None:
    """Prints it once, however many processes there are; to stdout where no file is given."""
    if jax.process_index() == 0:
        print(text, file=file, flush=True)


def main(argv: list[str]) -> None:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    logging.getLogger("absl").setLevel(logging.WARNING)
    if flags.FLAGS.compilation_cache:
        enable_compilation_cache()
    try:
        config = given_config(DistillConfig)
        if flags.FLAGS.plan:
            raise SystemExit(plan_run(config, flags.FLAGS.chip, flags.FLAGS.devices))
        distributed.join(**{name: getattr(flags.FLAGS, name) for name in distributed.FLAGS})
        out = distill(config, resume=flags.FLAGS.resume)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Interrupted as error:
        print(f"{error}; saved, --resume=auto continues", file=sys.stderr)
        raise SystemExit(128 + error.number) from None
    except (Diverged, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    _say(f"saved {out}")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """The command's flags."""
    config_flags.DEFINE_config_file(
        "config",
        "configs/tiny.py",
        "File with get_config(); --config.FIELD=VALUE overrides.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "resume", "never", ["never", "auto"], "What to do with a run that --config.out holds.", flag_values=values
    )
    flags.DEFINE_bool(
        "plan",
        False,
        "Compile the step for GPUs that need not be there, print its memory and time, stop.",
        flag_values=values,
    )
    flags.DEFINE_enum("chip", "h100", sorted(CHIPS), "The GPU that --plan compiles for.", flag_values=values)
    flags.DEFINE_integer("devices", 8, "How many of them.", lower_bound=1, flag_values=values)
    distributed.define_flags(values)
    flags.DEFINE_bool(
        "compilation_cache", True, "Keep compiled programs in $XDG_CACHE_HOME/jetspec_jax.", flag_values=values
    )


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=parse_flags)
