"""A training run: what it leaves, what it refuses, and how it ends.

The process that pytest starts has one device, and runs this module once more with eight.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import sys

import jax
import numpy as np
import pytest
import virtual_devices
from absl import flags
from run_case import write_case
from safetensors.numpy import load_file

import jetspec_jax
from train import distill as command
from train import setup as parts
from train.config import OptimizerConfig
from train.distill import Diverged, Interrupted, distill
from train.metrics import MetricsLog
from train.optimizer import make_optimizer
from train.run_record import RECORD, RunRecord

pytestmark = [pytest.mark.usefixtures("compile_quickly", "optax_promotes", "one_optimizer")]
one_device = pytest.mark.skipif(virtual_devices.inside(), reason="the other process runs it")
eight_devices = pytest.mark.skipif(not virtual_devices.inside(), reason="runs where there are eight devices")
STEPS = 6


@one_device
def test_on_eight_devices():
    """Every test of this module that needs them."""
    virtual_devices.run_again(__file__)


def shared_optimizer(config, steps):
    return _optimizer(dataclasses.astuple(config), steps)


@pytest.fixture
def one_optimizer(monkeypatch):
    """Equal optimizers are one object, so that runs of equal shapes share their compiled step."""
    monkeypatch.setattr(parts, "make_optimizer", shared_optimizer)


@functools.cache
def _optimizer(fields, steps):
    return make_optimizer(OptimizerConfig(*fields), steps)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The config of a run of six steps, a checkpoint every two, in rows of one width; with fields that differ."""
    path = write_case(tmp_path_factory.mktemp("case"), STEPS, packed=True)
    spec = importlib.util.spec_from_file_location("case", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda out, **fields: dataclasses.replace(module.get_config(), out=str(out), **fields)


@pytest.fixture(scope="module")
def whole(case, tmp_path_factory):
    """The directory of an uninterrupted run, to be copied and not to be touched."""
    promotes = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with pytest.MonkeyPatch.context() as patch, promotes[0], promotes[1]:
        patch.setattr(parts, "make_optimizer", shared_optimizer)
        return distill(case(tmp_path_factory.mktemp("whole") / "run"))


@contextlib.contextmanager
def at_step(monkeypatch, step, do):
    """Does something when the run has dispatched that step."""
    stepped, count = MetricsLog.stepped, [0]

    def hook(self):
        stepped(self)
        count[0] += 1
        if count[0] == step:
            do()

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "stepped", hook)
        yield


def steps_kept(out):
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir())


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same_head(have, want, tolerance=0.0):
    have, want = (load_file(out / "model.safetensors") for out in (have, want))
    assert have.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=0, atol=tolerance, err_msg=name)


@one_device
def test_a_run_leaves_a_head_its_record_and_the_newest_checkpoints(whole, case):
    head = jetspec_jax.load_draft_head(whole, jetspec_jax.load_target(case("x").target))
    assert head.config.mixed_fill == 0.5 and head.config.block_size == 4
    assert steps_kept(whole) == [4, 6]
    record = RunRecord.read(whole)
    assert record.config["optimizer"]["warmup_steps"] == 2 and record.config["steps"] == STEPS
    assert record.derived["blocks_per_step"] == 8 and record.versions["jax"] == jax.__version__
    assert not (whole / "best").exists()
    assert next(path.name for path in (whole / "tensorboard").iterdir()).startswith("events")


@one_device
def test_metrics_are_written_at_log_steps_and_at_the_end(whole):
    """Means over the steps since the last ones; MFU is left out for a device whose peak is not known."""
    found = lines(whole)
    assert [line["step"] for line in found] == [5, STEPS]
    for line in found:
        assert line.keys() >= {"loss", "gradient_norm", "learning_rate", "tokens_per_second", "accepted_length"}
        assert len(line["agreement"]) == 3 and line["skipped"] == 0 and "mfu" not in line
    assert 0.1 < found[0]["loss"] < 9 and 0 < found[1]["learning_rate"] < found[0]["learning_rate"] < 1e-2


@one_device
def test_sigterm_saves_and_the_run_goes_on_where_it_was(whole, case, tmp_path, monkeypatch):
    """To the bit; what the metrics said after the checkpoint is said once. A run that is complete takes no step."""
    config = case(tmp_path / "run")
    with at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(Interrupted) as ended:
        distill(config)
    assert ended.value.number == signal.SIGTERM and steps_kept(tmp_path / "run") == [2, 3]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 0}\n{"step')  # as a kill after step 5 might leave them
    for _ in range(2):
        distill(config, resume="auto")
        assert_same_head(tmp_path / "run", whole)
        assert [line["step"] for line in lines(tmp_path / "run")] == [3, 5, STEPS]


@one_device
@pytest.mark.parametrize("fault", ["arrays cut", "data gone", "unfinished"])
def test_a_broken_newest_checkpoint_is_left_out_for_the_one_before(whole, case, tmp_path, capsys, fault):
    """The head comes out the same; the broken one is named, deleted and written again."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    newest = out / "checkpoints" / "6"
    if fault == "arrays cut":
        for path in (newest / "state").rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    elif fault == "data gone":
        shutil.rmtree(newest / "data")
    else:
        newest.rename(newest.with_name("6.orbax-checkpoint-tmp"))
    (out / "model.safetensors").unlink()
    distill(case(out), resume="auto")
    said = capsys.readouterr()
    assert f"continuing after step 4 of {STEPS}" in said.out
    assert (f"{newest} cannot be read" in said.err) == (fault != "unfinished")
    assert_same_head(out, whole)
    assert steps_kept(out) == [4, 6]


@one_device
def test_when_no_checkpoint_is_whole_the_run_is_refused(whole, case, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("*/state"):
        shutil.rmtree(path)
    with pytest.raises(ValueError, match=r"6 cannot be read .*; .*4 cannot be read .*; no older checkpoint is left"):
        distill(case(tmp_path / "run"), resume="auto")


@one_device
def test_a_directory_that_holds_a_run_is_not_overwritten(whole, case, tmp_path):
    """Nor does `auto` go on with something that is no run."""
    with pytest.raises(ValueError, match=r"already holds run.json, checkpoints, config.json; --resume=auto continues"):
        distill(case(whole))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds config.json and no run.json, so it is no run"):
        distill(case(tmp_path), resume="auto")


@one_device
def test_a_run_without_a_checkpoint_has_no_head_yet(tmp_path):
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(jetspec_jax.CheckpointError, match="is a training run without a checkpoint so far"):
        jetspec_jax.load_draft_head(tmp_path)


@one_device
def test_a_run_is_not_resumed_with_other_data_or_another_config(whole, case, tmp_path):
    """All fields that differ are named; intervals and the directory may."""
    rows = pathlib.Path(case("x").data).read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(rows[1:]))
    out = tmp_path / "moved"
    shutil.copytree(whole, out)
    optimizer = dataclasses.replace(case("x").optimizer, learning_rate=2e-2)
    with pytest.raises(ValueError, match=r"started otherwise: anchors was 2 and is now 3; optimizer.learning_rate was"):
        distill(case(out, anchors=3, optimizer=optimizer), resume="auto")
    with pytest.raises(ValueError, match=r"data was '\w+' and is now '\w+'; documents was 50 and is now 49"):
        distill(case(out, data=str(tmp_path / "data.jsonl")), resume="auto")
    distill(case(out, log_every=1, save_every=3, keep_last=1), resume="auto")


@one_device
def test_a_run_that_diverges_stops_and_is_saved(case, tmp_path):
    """After ten steps in a row that are not finite, found at the next log step."""
    huge = dataclasses.replace(case("x").optimizer, learning_rate=1e38, matrix_learning_rate=1e38, warmup_steps=0)
    with pytest.raises(
        Diverged, match=r"1[0-9] steps in a row had no finite loss .* up to step (15|20), and the run is saved"
    ):
        distill(case(tmp_path / "run", steps=60, optimizer=huge))
    assert steps_kept(tmp_path / "run")[-1] in (15, 20)
    assert lines(tmp_path / "run")[-1]["loss"] is None


@one_device
def test_a_final_checkpoint_that_cannot_be_written_is_an_error(case, tmp_path, monkeypatch):
    """And not a run that seems complete."""

    def spoil():
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "run" / "checkpoints").write_text("in the way")

    with at_step(monkeypatch, STEPS, spoil), pytest.raises(OSError, match="checkpoints"):
        distill(case(tmp_path / "run", save_every=100))


@one_device
def test_the_head_with_the_best_tau_is_kept(case, tmp_path, monkeypatch):
    """Evaluation is real decoding; the best checkpoint stays beside the newest, and its head is in `best`."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many?"}\n{"prompt": "What is 3 + 4?"}\n')
    config = case(
        tmp_path / "run", eval_every=2, eval_prompts=str(tmp_path / "prompts.jsonl"), eval_budgets=(5,),
        eval_max_new_tokens=8, keep_last=1,
    )  # fmt: skip
    taus = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(command, "deciding", lambda found: next(taus))
    distill(config)
    found = [line for line in lines(tmp_path / "run") if "tau" in line]
    assert [line["step"] for line in found] == [2, 4, 6]
    assert all(list(line["tau"]) == ["chain", "5"] for line in found)
    assert all(1 <= tau <= 4 for line in found for tau in line["tau"].values())
    assert steps_kept(tmp_path / "run") == [4, 6]
    kept, last = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("best", "."))
    assert not np.array_equal(kept["fc.weight"], last["fc.weight"])
    target = jetspec_jax.load_target(config.target)
    head = jetspec_jax.load_draft_head(tmp_path / "run" / "best", target)
    prompt = jetspec_jax.chat_prompt(target, "How many?")
    [result] = jetspec_jax.generate(target, head, [prompt], budget=5, max_new_tokens=8, batch_size=4)
    assert len(result.token_ids) == 8


@one_device
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 5, "micro_batches": 2}, r"--config.batch_size 5 must be a multiple of 2"),
        ({"target_dtype": "float16"}, r"--config.target_dtype must be one of float32, bfloat16, got 'float16'"),
        ({"save_every": 0}, r"--config.save_every must be above 0, got 0"),
        ({"mesh": "data=2"}, r"mesh data=2 needs 2 devices, there are 1"),
        ({"eval_every": 5}, r"--config.eval_every needs --config.eval_prompts"),
        ({"mixed_fill": 0.5, "causal_head": False}, r"--config.mixed_fill needs a causal head"),
        ({"mixed_fill": 3.0}, r"--config.mixed_fill is a share, from 0 to 1, got 3.0"),
        ({"logit_chunk": -1}, r"--config.logit_chunk must be at least 0, got -1"),
        ({"block_size": 1}, r"--config.block_size must be at least 2, got 1"),
        ({"optimizer": OptimizerConfig(clip_norm=0)}, r"--config.optimizer.clip_norm must be above 0, got 0"),
        ({"data": ""}, r"--config.data must be given"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(case, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        distill(case(tmp_path / "run", **fields))
    assert not (tmp_path / "run" / "run.json").exists()


@eight_devices
def test_a_run_goes_on_with_other_devices(case, tmp_path, monkeypatch):
    """Three steps on eight devices and three on one give the losses and the head of six on one, to 1e-6."""
    distill(case(tmp_path / "one", log_every=1))
    config = case(tmp_path / "other", mesh="data=2,fsdp=2,model=2", log_every=1)
    with at_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(Interrupted):
        distill(config)
    distill(dataclasses.replace(config, mesh=""), resume="auto")
    have, want = ([line["loss"] for line in lines(tmp_path / name)] for name in ("other", "one"))
    np.testing.assert_allclose(have, want, rtol=1e-6)
    assert_same_head(tmp_path / "other", tmp_path / "one", tolerance=1e-5)


@one_device
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_config_is_a_file_whose_fields_flags_override(tmp_path, monkeypatch):
    """An unknown field is refused, and a known one has its type."""
    root = write_case(tmp_path, STEPS)

    def parsed(*given):
        values = flags.FlagValues()
        monkeypatch.setattr(sys, "argv", ["distill", f"--config={root}", *given])  # config_flags looks there
        command.define_flags(values)
        values(sys.argv)
        return values

    values = parsed("--config.optimizer.learning_rate=1e-4", "--config.eval_budgets=(8,)")
    assert values.config.optimizer.learning_rate == 1e-4 and values.config.eval_budgets == (8,)
    assert values.config.length == 32 and values.resume == "never"
    for flag in ("--config.lenght=3", "--config.optimizer.rate=1"):
        with pytest.raises(KeyError, match=r"Field (lenght|rate) not found"):
            parsed(flag)
