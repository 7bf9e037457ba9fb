"""`python -m train.regenerate`: the target answers prompts, and its answers become distillation data.

A head learns the target's own text; text from elsewhere teaches it much less (paper section 4). The output directory
holds data.jsonl, a line for every answer, and manifest.json. A run that was killed goes on when started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import IO, TextIO

import numpy as np
from tqdm import tqdm

import jetspec_jax
from jetspec_jax.engine import GenerationConfig, GenerationResult
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from train.files import locked
from train.manifest import DATA, MANIFEST, Manifest, answered, count_answer, text_settings
from train.prompts import answer_order, read_prompts, tokenised

_WINDOW = 2048  # prompts that are sorted by length together
_SECONDS_PER_LINE = 30


def regenerate(
    target: Target,
    head: DraftHead | None,
    rows: dict[int, list[int]],
    manifest: Manifest,
    out: pathlib.Path,
    config: GenerationConfig,
    file: TextIO | None = None,
) -> Manifest:
    """Answers what is not answered yet; returns the finished manifest.

    data.jsonl gets a line `{"index", "prompt_ids", "token_ids", "finish_reason", "answer"}` per prompt, in the order of
    `answer_order`, a batch at a time. Prompt i draws with the seed `config.seed` + i. The file of a run that was killed
    and resumed equals that of a run that was not; with another `batch_size` or head in between, in float32 only.

    Args:
        rows: token ids of the prompts by index.
        manifest: of this run; `out` may hold the one of an earlier run with the same settings.
        file: where progress is shown; None is stderr.

    Raises:
        ValueError: `out` holds data that was made with other settings or changed since, or is in use.
    """
    out.mkdir(parents=True, exist_ok=True)
    order = answer_order(rows, _WINDOW)
    with locked(out):
        if (out / MANIFEST).exists():
            Manifest.read(out).check_same(out, manifest.settings)
        elif (out / DATA).exists():
            raise ValueError(f"{out} has {DATA} and no {MANIFEST}, so that its origin is unknown; give another --out")
        done, size, counts = answered(out / DATA, order, config.batch_size)
        manifest.counts = {**counts, "left_out": manifest.settings["prompt_count"] - len(rows)}
        manifest.write(out)
        with open(out / DATA, "ab") as data, _progress(len(order), done, file or sys.stderr) as progress:
            data.truncate(size)
            for first in range(done, len(order), config.batch_size):
                batch = order[first : first + config.batch_size]
                results = jetspec_jax.generate(
                    target, head, [rows[i] for i in batch], config, seeds=[config.seed + int(i) for i in batch]
                )
                _append(data, batch, rows, results, manifest.counts)
                progress.update(len(batch), sum(len(result.token_ids) for result in results))
        manifest.finished = True
        manifest.write(out)
    return manifest


def _append(
    data: IO[bytes],
    batch: np.ndarray,
    rows: dict[int, list[int]],
    results: Sequence[GenerationResult],
    counts: dict[str, int],
) -> None:
    """Writes a batch's answers, and counts them."""
    for index, result in zip(batch.tolist(), results, strict=True):
        row = {
            "index": index,
            "prompt_ids": rows[index],
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
            "answer": result.text,
        }
        data.write(json.dumps(row).encode() + b"\n")
        count_answer(counts, row)
    data.flush()
    os.fsync(data.fileno())


class _Progress:
    """A bar on a terminal, a line now and then elsewhere: answers, tokens a second, time left."""

    def __init__(self, total: int, done: int, file: TextIO):
        self._bar = tqdm(
            total=total, initial=done, file=file, unit="answer", disable=not file.isatty(), dynamic_ncols=True
        )
        self._file, self._total, self._done, self._resumed = file, total, done, done
        self._tokens = 0
        self._started = self._told = time.monotonic()

    def update(self, answers: int, tokens: int) -> None:
        """Counts a batch."""
        self._done += answers
        self._tokens += tokens
        now = time.monotonic()
        rate = self._tokens / max(now - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(answers)
        if self._bar.disable and (now - self._told >= _SECONDS_PER_LINE or self._done == self._total):
            self._told = now
            left = (now - self._started) * (self._total - self._done) / (self._done - self._resumed)
            print(
                f"{self._done}/{self._total} answers, {rate:,.0f} tokens/s, {tqdm.format_interval(left)} left",
                file=self._file,
                flush=True,
            )

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _progress(total: int, done: int, file: TextIO) -> contextlib.closing[_Progress]:
    if done:
        print(f"{done} of {total} answers are there; going on", file=file)
    return contextlib.closing(_Progress(total, done, file))


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m train.regenerate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = parser.add_argument_group("models")
    models.add_argument("--model", required=True, metavar="DIR|ID", help="the target: a directory or a hub id")
    models.add_argument("--revision", help="of a hub id: a branch, tag or commit (default: its main branch)")
    models.add_argument("--draft-head", metavar="DIR|ID", help="decode with this head: faster, the same text")
    models.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        required=True,
        metavar="SOURCE",
        help="a JSONL file of prompt or messages, hf:org/name[::subset][:split], or tasks:N for training problems of "
        "the small target",
    )
    prompts.add_argument("--prompt-field", metavar="NAME", help="the field of texts or messages, where it is another")
    prompts.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    prompts.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="the chat template's enable_thinking (default: the template's own)",
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--max-new-tokens", type=int, default=2048, help="a cap on answers (default %(default)s)")
    decoding.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)g)")
    decoding.add_argument("--top-k", type=int, default=0, help="0 keeps all (default %(default)s)")
    decoding.add_argument("--top-p", type=float, default=1.0, help="1 keeps all (default %(default)g)")
    decoding.add_argument("--seed", type=int, default=0, help="prompt i draws with seed + i")
    decoding.add_argument("--batch-size", type=int, default=32, help="prompts decoded together (default %(default)s)")
    decoding.add_argument("--budget", type=int, default=16, help="nodes per tree of a head (default %(default)s)")
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="DIR", help="made, or gone on with")
    parser.add_argument(
        "--no-compilation-cache", action="store_true", help="do not keep compiled programs in $XDG_CACHE_HOME"
    )
    return parser


def run(args: argparse.Namespace) -> Manifest:
    """Reads prompts, loads models, and answers.

    Raises:
        ValueError: something that the user gave cannot be used.
    """
    config = GenerationConfig(
        method="ar" if args.draft_head is None else "jetspec",
        budget=args.budget,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        batch_size=args.batch_size,
    )
    out: pathlib.Path = args.out.expanduser()
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; give a directory")
    prompts, warnings = read_prompts(args.prompts, args.prompt_field)
    target = jetspec_jax.load_target(args.model, dtype=args.dtype, revision=args.revision)
    head = None if args.draft_head is None else jetspec_jax.load_draft_head(args.draft_head, target)
    mode = {"system": args.system, "enable_thinking": args.thinking}
    rows, unanswerable = tokenised(target, prompts, args.prompts, args.max_new_tokens, **mode)
    for warning in (*warnings, *unanswerable):
        print(f"warning: {warning}", file=sys.stderr)
    dtype = str(target.model.model.norm.weight[...].dtype)
    manifest = Manifest(
        settings=text_settings(target, dtype, config, prompts, **mode),
        run={
            "prompts": args.prompts,
            "draft_head": args.draft_head,
            "method": config.method,
            "budget": None if head is None else config.budget,
            "batch_size": config.batch_size,
        },
    )
    if not args.no_compilation_cache:
        jetspec_jax.enable_compilation_cache()
    return regenerate(target, head, rows, manifest, out, config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (2 for bad input, with one line on stderr)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = make_parser().parse_args(argv)
    try:
        counts = run(args).counts
    except ValueError as error:
        print("error: " + "; ".join(line.strip() for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on with {args.out}", file=sys.stderr)
        return 130
    print(
        f"{args.out}: {counts['answers']} answers of {counts['tokens']} tokens; {counts['ended']} ended by "
        f"themselves, {counts['cut']} at --max-new-tokens",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
