"""`python -m train.bench_torch --config configs/tiny.py`: our training step against the same one in plain PyTorch.

Both take the same batches, from the same weights, with the config's optimizer, in turns, so that both meet the same
machine. The target is the one that ships with the project, the documents are its practice problems. Prints one line of
JSON for rows of one document and one for packed rows. Needs PyTorch (`pip install torch==2.13.0`).
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags
from flax import nnx
from ml_collections import config_flags

import jetspec_jax
from jetspec_jax.checkpoint import hf_tensors
from jetspec_jax.head import DraftHead
from train.command import given_config, parse_flags
from train.config import DistillConfig
from train.data import Packed, bucketed_batches, chat_document, packed_batches
from train.objective import Blocks, sample_blocks
from train.optimizer import make_optimizer, schedule
from train.setup import head_layout, with_mask_token
from train.step import Objective, new_state, train_step
from train.tasks import problems

try:
    import torch

    from train.plain_torch import PlainStep
except ImportError as error:
    raise SystemExit(f"error: the comparison needs PyTorch: pip install torch==2.13.0 ({error})") from None

_DOCUMENTS = 512
_PAUSE = 0.05  # seconds between turns, in which the other's threads stop spinning
_AGREE = 1e-4

# One step on a batch: its loss, and how many guesses of each slot [S - 1] are the target's.
Step = Callable[[Packed, Blocks], tuple[float, np.ndarray]]


def compare(config: DistillConfig, batches: int, turns: int) -> dict[str, object]:
    """Seconds of a step of each, and the median over turns of their ratio (above 1: ours is faster).

    A turn is one step on each of `batches` batches by one, then by the other.

    Raises:
        ValueError: the config asks for what the plain step has not, or losses differ by over 1e-4 of their size.
    """
    plain = {"loss": "forward_kl", "temperature": 1.0, "gamma": 0.0, "mesh": "", "micro_batches": 1}
    plain |= {
        "target_dtype": "float32",
        "compute_dtype": "float32",
        "init_head": "",
        "train_only": "",
    }
    other = [name for name, value in plain.items() if getattr(config, name) != value]
    if other:
        raise ValueError(f"the plain step has {', '.join(f'{name}={plain[name]!r}' for name in other)} only")
    data = _data(config, batches)
    ours, theirs = _steps(config)
    # The first pass compiles. Muon's products are bfloat16 in torch and float32 here, so that only its first loss, of
    # equal weights, must agree.
    losses = [[step(*item)[0] for item in data] for step in (ours, theirs)]
    checked = 1 if config.optimizer.matrix_learning_rate else batches
    differences = [abs(here / there - 1) for here, there in zip(*losses, strict=True)][:checked]
    if not max(differences) <= _AGREE:
        raise ValueError(f"the losses of the same steps differ: {losses[0][:checked]} and {losses[1][:checked]}")
    seconds: list[list[float]] = [[], []]
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds[which].append(_timed((ours, theirs)[which], data))
    ratios = sorted(there / here for here, there in zip(*seconds, strict=True))
    return {
        "rows": "packed" if config.packed else "one document",
        "optimizer": "muon" if config.optimizer.matrix_learning_rate else "adamw",
        "batch": config.batch_size,
        "widths": [batch.tokens.shape[1] for batch, _ in data],
        "first_losses": [round(found[0], 6) for found in losses],
        "losses_checked": checked,
        "jax_seconds": round(statistics.median(seconds[0]) / batches, 4),
        "torch_seconds": round(statistics.median(seconds[1]) / batches, 4),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)],
        "turns": turns,
    }


def _data(config: DistillConfig, count: int) -> list[tuple[Packed, Blocks]]:
    """The first batches of practice problems, and blocks in them."""
    tokenizer = jetspec_jax.load_target().tokenizer
    assert tokenizer is not None
    stream = itertools.islice(problems(config.seed, split="train"), _DOCUMENTS)
    documents = [chat_document(tokenizer, problem.prompt, problem.answer) for problem in stream]
    in_rows = packed_batches if config.packed else bucketed_batches
    batches = in_rows(documents, length=config.length, batch_size=config.batch_size, seed=config.seed)
    rng = np.random.default_rng(config.seed)
    return [
        (batch, sample_blocks(batch, config.anchors, config.block_size, config.mixed_fill, rng))
        for batch in itertools.islice(batches, count)
    ]


def _steps(config: DistillConfig) -> tuple[Step, Step]:
    """Our step and the plain one, each with its own copy of the same weights."""
    target = jetspec_jax.load_target(dtype="float32")
    head = DraftHead(head_layout(with_mask_token(config, target), target.config), rngs=nnx.Rngs(config.seed))
    settings = config.optimizer
    by_adam, by_muon = (
        schedule(settings, peak, config.steps) for peak in (settings.learning_rate, settings.matrix_learning_rate)
    )
    weights = [{name: np.asarray(value) for name, value in hf_tensors(model).items()} for model in (target.model, head)]
    table = [(float(by_adam(step)), float(by_muon(step))) for step in range(config.steps)]
    plain = PlainStep(weights[0], target.config, weights[1], head.config, settings, table.__getitem__)
    optimizer = make_optimizer(settings, config.steps)
    state = new_state(head, optimizer)
    objective = Objective(config.gamma, config.temperature, config.loss, logit_chunk=config.logit_chunk)

    def ours(batch: Packed, blocks: Blocks) -> tuple[float, np.ndarray]:
        nonlocal state
        state, metrics = train_step(state, target.model, batch, blocks, optimizer=optimizer, objective=objective)
        return float(metrics.blocks.loss), np.asarray(metrics.blocks.agreeing)

    return ours, plain


def _timed(step: Step, data: list[tuple[Packed, Blocks]]) -> float:
    time.sleep(_PAUSE)
    gc.collect()
    started = time.perf_counter()
    for item in data:
        step(*item)
    return time.perf_counter() - started


def main(argv: list[str]) -> None:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    torch.set_num_threads(flags.FLAGS.threads)
    try:
        given = given_config(DistillConfig)
        for packed, rate in itertools.product((False, True), {given.optimizer.matrix_learning_rate, 0}):
            optimizer = dataclasses.replace(given.optimizer, matrix_learning_rate=rate)
            config = dataclasses.replace(given, packed=packed, optimizer=optimizer)
            print(json.dumps(compare(config, flags.FLAGS.batches, flags.FLAGS.turns)), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/tiny.py", "Config file with get_config().")
    flags.DEFINE_integer("batches", 3, "Different batches, each a step of every turn.", lower_bound=1)
    flags.DEFINE_integer("turns", 15, "Timed turns of each; medians are printed.", lower_bound=1)
    flags.DEFINE_integer("threads", 2, "PyTorch's; XLA takes as many as there are cores.", lower_bound=1)
    app.run(main, flags_parser=parse_flags)
