"""Held-out problems as prompts, and the score of answers to them.

python -m train.evaluate prompts --count 200 > held_out.jsonl
python -m infer.generate --prompts held_out.jsonl --json > answers.jsonl
python -m train.evaluate score answers.jsonl
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from train.tasks import problems, solved

_SEED = 0
_SEARCHED = 10_000  # problems among which the answered ones are looked for


def held_out_prompts(count: int) -> list[str]:
    """The prompts of the first `count` held-out problems."""
    return [problem.prompt for problem in itertools.islice(problems(_SEED, split="held_out"), count)]


def score(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Shares solved by kind of problem, and tau over all, of `infer.generate --json` rows.

    Raises:
        ValueError: there are no rows, or one answers no held-out problem.
    """
    known = {p.prompt: p for p in itertools.islice(problems(_SEED, split="held_out"), _SEARCHED)}
    right: dict[str, list[bool]] = collections.defaultdict(list)
    accepted, tokens = [], 0
    for row in answers:
        asked = row["prompt"] if isinstance(row, dict) else row
        if not isinstance(asked, str) or asked not in known:
            raise ValueError(f"not a held-out problem: {str(asked)[:60]!r}; make prompts with `prompts`")
        problem = known[asked]
        right[problem.kind].append(solved(problem, row["text"]))
        accepted += row["accepted_lengths"]
        tokens += len(row["token_ids"])
    everything = list(itertools.chain.from_iterable(right.values()))
    if not everything:
        raise ValueError("no answers; expected what infer.generate --json prints")
    return {
        "prompts": len(everything),
        "solved": sum(everything) / len(everything),
        **{f"solved_{kind}": sum(values) / len(values) for kind, values in sorted(right.items())},
        "tokens": tokens,
        "rounds": len(accepted),
        "tau": sum(accepted) / max(len(accepted), 1),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m train.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="print held-out prompts as JSONL")
    prompts.add_argument("--count", type=int, default=200)
    scoring = commands.add_parser("score", help="score `infer.generate --json` output")
    scoring.add_argument("answers", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "prompts":
        for prompt in held_out_prompts(args.count):
            print(json.dumps({"prompt": prompt}))
        return
    try:
        print(json.dumps(score(map(json.loads, args.answers.read_text().splitlines())), indent=2))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {args.answers}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
