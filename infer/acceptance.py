"""`python -m infer.acceptance`: accepted lengths of draft heads over budgets, and how faithful their branches are.

Prints a JSON object for each head and budget. `tau` is tokens committed per target forward, after prefill, over all
prompts; `low` and `high` bound its 95% interval, by resampling prompts. With --faithfulness also the gap
sum log q - sum log p of drafted branches, along greedy texts: q is what the head's tree says of a branch, p what the
target does. With --repeats also the time that all prompts take, against plain decoding's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import jetspec_jax
from infer.faithfulness import branch_gaps
from infer.models import add_model_flags, load_target
from infer.prompts import add_flags, read_requests, to_prompts
from jetspec_jax.engine import GenerationConfig, GenerationResult
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_HEAD, Target
from jetspec_jax.sharding import parse_mesh

_RESAMPLES = 2000
_GAPS = (5.0, 80.0)  # nats; the paper's bounds of a faithful branch and of a lost one


def acceptance(
    target: Target, head: DraftHead, prompts: Sequence[Any], budget: int | None, config: GenerationConfig
) -> dict[str, Any]:
    """tau of one head at one budget (None: its chain), its 95% interval, and what it is made of."""
    results = answers(target, head, prompts, budget, config)
    low, high = interval(results)
    rounds = [result.rounds for result in results]
    tokens = [sum(result.accepted_lengths) for result in results]
    return {
        "budget": _shown(budget),
        "temperature": config.temperature,
        "tau": sum(tokens) / max(sum(rounds), 1),
        "low": low,
        "high": high,
        "prompts": len(results),
        "tokens": sum(tokens),
        "rounds": sum(rounds),
    }


def answers(
    target: Target, head: DraftHead | None, prompts: Sequence[Any], budget: int | None, config: GenerationConfig
) -> list[GenerationResult]:
    """What comes of the prompts with a head at a budget (None: its chain), or by plain decoding without a head."""
    if head is None:
        return jetspec_jax.generate(target, None, prompts, config, method="ar")
    method, size = ("chain", head.depth) if budget is None else ("jetspec", budget)
    return jetspec_jax.generate(target, head, prompts, config, method=method, budget=size)


def speeds(
    target: Target,
    variants: Sequence[tuple[DraftHead, int | None]],
    prompts: Sequence[Any],
    config: GenerationConfig,
    repeats: int,
) -> list[dict[str, float]]:
    """For each head and budget the median seconds of all prompts, and the median of plain decoding's time over it.

    Plain decoding and all variants take turns, so that they meet the same machine. Compilation is excluded.
    """
    turns = [(None, None), *variants] * repeats
    times = [_seconds(answers(target, head, prompts, budget, config), config) for head, budget in turns]
    seconds = np.reshape(times, (repeats, -1))
    ratios = seconds[:, :1] / seconds
    return [
        {"seconds": float(time), "speedup": float(ratio)}
        for time, ratio in zip(np.median(seconds, axis=0)[1:], np.median(ratios, axis=0)[1:], strict=True)
    ]


def _seconds(results: Sequence[GenerationResult], config: GenerationConfig) -> float:
    """Of all batches; each result has its batch's time."""
    return sum(result.seconds for result in results[:: config.batch_size])


def interval(results: Sequence[GenerationResult], seed: int = 0) -> tuple[float, float]:
    """Bootstrap bounds of tau: 2.5% and 97.5% quantiles over resampled prompts."""
    rounds = np.array([result.rounds for result in results])
    tokens = np.array([sum(result.accepted_lengths) for result in results])
    drawn = np.random.default_rng(seed).integers(0, len(results), (_RESAMPLES, len(results)))
    taus = tokens[drawn].sum(axis=1) / np.maximum(rounds[drawn].sum(axis=1), 1)
    low, high = np.quantile(taus, (0.025, 0.975))
    return float(low), float(high)


def faithfulness(
    target: Target, head: DraftHead, prompts: Sequence[Any], budget: int | None, config: GenerationConfig
) -> dict[str, Any]:
    """Mean and median gap, in nats, of the branches of one head at one budget, and how many are near and far off.

    All are None where no branch was drafted.
    """
    gaps = branch_gaps(target, head, prompts, budget, config)
    near, far = _GAPS
    figures: dict[str, Callable[[], Any]] = {
        "gap_mean": lambda: np.mean(gaps),
        "gap_median": lambda: np.median(gaps),
        f"gap_below_{near:g}": lambda: np.mean(gaps < near),
        f"gap_from_{far:g}": lambda: np.mean(gaps >= far),
    }
    return {"branches": len(gaps), **{name: float(of()) if len(gaps) else None for name, of in figures.items()}}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The command's rows.

    Raises:
        ValueError: a flag, a prompt or a checkpoint cannot be used.
    """
    budgets = [parse_budget(text) for text in args.budgets]
    if args.repeats < 0:
        raise ValueError(f"--repeats is how often to time, or 0 for not at all; got {args.repeats}")
    config = GenerationConfig(
        tree_width=args.tree_width, temperature=args.temperature, seed=args.seed, batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens, attention=args.attention,
    )  # fmt: skip
    ways = parse_mesh(args.mesh or "data=1")
    if args.faithfulness and ways["data"] * ways["fsdp"] > 1:
        raise ValueError("--faithfulness takes prompts one by one, which the axes data and fsdp of --mesh cannot split")
    requests = read_requests(args)
    target = load_target(args)
    revision = args.draft_head_revision
    heads = [(name, jetspec_jax.load_draft_head(name, target, revision=revision)) for name in args.draft_head]
    prompts = to_prompts(args, target, requests, config.max_new_tokens)
    variants = [(name, head, budget) for name, head in heads for budget in budgets]
    for name, head, budget in variants:
        row = {"draft_head": name, **acceptance(target, head, prompts, budget, config)}
        if args.faithfulness:
            row |= faithfulness(target, head, prompts, budget, config)
        yield row
    if args.repeats:
        timed = speeds(target, [variant[1:] for variant in variants], prompts, config, args.repeats)
        for (name, _, budget), speed in zip(variants, timed, strict=True):
            yield {"draft_head": name, "budget": _shown(budget), **speed}


def _shown(budget: int | None) -> int | str:
    return "chain" if budget is None else budget


def parse_budget(text: str) -> int | None:
    """A number of nodes, or None for "chain".

    Raises:
        ValueError: the text is neither.
    """
    if text == "chain":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--budgets takes numbers of nodes from 1 on, and the word chain; got {text!r}")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m infer.acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser, nargs="+", default=[str(EMBEDDED_HEAD)], help="heads (default: the shipped one)")
    parser.add_argument("--budgets", nargs="+", default=["chain", "16", "64", "256"], help="(default: chain 16 64 256)")
    parser.add_argument("--tree-width", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (the default)")
    parser.add_argument("--seed", type=int, default=0, help="prompt i draws with seed + i")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--faithfulness",
        action="store_true",
        help="also compare drafted branches with the target, along its greedy texts",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=0,
        help="also time all heads and budgets and plain decoding, in turns, so often (default: 0, do not)",
    )
    add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (2 for bad input, with one line on stderr)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = make_parser().parse_args(argv)
    if not args.no_compilation_cache:
        jetspec_jax.enable_compilation_cache()
    try:
        for row in measure(args):
            print(json.dumps(row), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
