"""`python -m train.regenerate`: the target answers prompts, and its answers become distillation data.

A head learns the target's own text; text from elsewhere teaches it much less (paper section 4).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import jetspec_jax
from jetspec_jax.chat import chat_prompt
from jetspec_jax.engine import GenerationConfig, Progress, prompt_ids
from train.tasks import problems


def training_prompts(count: int, seed: int) -> list[str]:
    """Prompts of `count` problems of the training split."""
    stream = problems(seed, split="train")
    return [next(stream).prompt for _ in range(count)]


def regenerate(model: str, prompts: list[str], out: pathlib.Path, config: GenerationConfig) -> int:
    """Writes one JSONL line `{"prompt_ids", "token_ids"}` per finished answer; returns how many there are.

    Answers cut off by `max_new_tokens` are left out: a head should not learn where the cap fell.
    """
    target = jetspec_jax.load_target(model)
    # Batches of prompts of like length waste the least on padding.
    rows = sorted((prompt_ids(target, chat_prompt(target, prompt)) for prompt in prompts), key=len)
    started = time.perf_counter()

    def report(progress: Progress) -> None:
        if progress.finished.all():
            rate = (progress.first + len(progress.finished)) / (time.perf_counter() - started)
            print(f"\r{progress.first + len(progress.finished)}/{len(rows)}, {rate:.0f}/s", end="", file=sys.stderr)

    results = jetspec_jax.generate(target, None, rows, config, on_progress=report)
    kept = [(row, result) for row, result in zip(rows, results, strict=True) if result.finish_reason == "stop"]
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w") as file:
        for row, result in kept:
            print(json.dumps({"prompt_ids": row, "token_ids": result.token_ids}), file=file)
    print(f"\n{len(kept)} of {len(rows)} answers ended by themselves; wrote {out}", file=sys.stderr)
    return len(kept)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m train.regenerate", description=__doc__)
    parser.add_argument("--model", required=True, help="the target's checkpoint directory")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="JSONL file to write")
    parser.add_argument("--count", type=int, default=8000, help="training problems to answer (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = GenerationConfig(
        method="ar", batch_size=args.batch_size, max_new_tokens=args.max_new_tokens, seed=args.seed
    )
    regenerate(args.model, training_prompts(args.count, args.seed), args.out, config)


if __name__ == "__main__":
    main()
