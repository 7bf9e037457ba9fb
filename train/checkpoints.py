"""A run's checkpoints, by orbax: state and data position, written beside the training; and the exported head."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as policies

from jetspec_jax.checkpoint import WEIGHTS, save_draft_head
from jetspec_jax.head import DraftHead
from train.step import TrainState

_TAU = "tau"


class Restored(NamedTuple):
    """A checkpoint that was read: `step` batches were taken. `best` is the highest tau up to it, if there is one."""

    state: TrainState
    step: int
    best: float | None


class Checkpoints:
    """The checkpoints in a directory: the newest `keep_last`, and the one with the highest tau.

    A checkpoint appears under its final name when it is whole. Saving copies the state to the host and writes it in
    another thread; an error there is raised by the next `save` or by `wait`, as an OSError.
    """

    def __init__(self, directory: pathlib.Path, keep_last: int):
        self._directory = directory.absolute()
        best = policies.BestN(get_metric_fn=lambda x: x[_TAU], n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep_last), best]),
            cleanup_tmp_directories=True,
            # A directory that cannot be made is an error at once, and not after a wait of five minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def save(self, step: int, state: TrainState, batches: grain.DatasetIterator[Any], tau: float | None) -> None:
        """Starts to write the state after `step` batches, and the iterator that gave them."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_name(state)), data=grain.checkpoint.CheckpointSave(batches)
        )
        with _as_os_error(self._directory):
            self._manager.save(step, args=args, metrics=None if tau is None else {_TAU: tau}, force=True)

    def restore(self, abstract: TrainState, batches: grain.DatasetIterator[Any]) -> Restored | None:
        """The newest whole checkpoint, with `batches` put where it was; None when there is none at all.

        Checkpoints that cannot be read are named on stderr, left out and, when an older one is whole, deleted.

        Args:
            abstract: shapes of the state, and where they are to lie.

        Raises:
            ValueError: there are checkpoints, and none can be read.
        """
        broken: list[str] = []
        steps = sorted(self._manager.all_steps(), reverse=True)
        for index, step in enumerate(steps):
            args = ocp.args.Composite(
                state=ocp.args.StandardRestore(_by_name(abstract)), data=grain.checkpoint.CheckpointRestore(batches)
            )
            try:
                found = self._manager.restore(step, args=args)
            except (ValueError, OSError, KeyError, TypeError) as error:
                broken.append(f"{self._directory / str(step)} cannot be read ({_one_line(error)})")
                print(f"warning: {broken[-1]}", file=sys.stderr)
                continue
            for newer in steps[:index]:
                self._manager.delete(newer)
            arrays = [found["state"][name] for name in _by_name(abstract)]
            state = jax.tree.unflatten(jax.tree.structure(abstract), arrays)
            return Restored(state, step, self._best(steps[index:]))
        if broken:
            raise ValueError("; ".join(broken) + "; no older checkpoint is left: start again with another --config.out")
        return None

    def wait(self) -> None:
        """Returns when all is written; raises what went wrong."""
        with _as_os_error(self._directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads."""
        with _as_os_error(self._directory):
            self._manager.close()

    def _best(self, steps: list[int]) -> float | None:
        metrics = [self._manager.metrics(step) for step in steps]
        return max((found[_TAU] for found in metrics if found), default=None)


def export(directory: pathlib.Path, head: DraftHead) -> None:
    """Writes the head in the published format. Each file is replaced in one step: a reader finds a whole head."""
    part = directory / ".export"
    whole = jax.tree.map(_whole, head)
    if jax.process_index() > 0:
        return
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(part, ignore_errors=True)  # a kill leaves it, with files whose names are not known here
    save_draft_head(part, whole)
    for name in (WEIGHTS, "config.json"):
        (part / name).replace(directory / name)
    shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _as_os_error(directory: pathlib.Path) -> Iterator[None]:
    """What orbax and tensorstore say of files that cannot be written has many types, ValueError among them."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise OSError(f"{directory} cannot be written ({_one_line(error)})") from error


def _whole(x: jax.Array) -> Any:
    """An array that may be split over processes, on this host."""
    return jax.device_get(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)


def _by_name(state: TrainState) -> dict[str, Any]:
    """The arrays of a state by their place in it, so that a checkpoint can be read without this code's classes."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}  # fmt: skip


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
