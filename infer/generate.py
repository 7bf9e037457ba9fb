"""`python -m infer.generate`: answers prompts by lossless speculative decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

import jetspec_jax
from infer.display import Printer, legend, median_run, table
from jetspec_jax.engine import METHODS, GenerationConfig, GenerationResult, check_prompt, prompt_ids, top_two_gap
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_HEAD, EMBEDDED_TARGET, Target

_HELD_OUT = EMBEDDED_TARGET.parent / "held_out.jsonl"
_QUESTIONS = 3
_ROUNDS_PER_PRINT = 2
_JSON_FIELDS = ("prompt", "text", "token_ids", "prompt_tokens", "finish_reason", "rounds", "accepted_lengths",
                "mean_accepted_length", "budget", "method", "seconds", "tokens_per_second")  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m infer.generate", description=__doc__)
    defaults = GenerationConfig()
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        default=EMBEDDED_TARGET,
        metavar="DIR",
        help="the target's checkpoint directory (default: the small model that ships here)",
    )
    models.add_argument("--draft-head", metavar="DIR", help="the draft head's directory (default: the shipped one)")
    models.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    prompts = parser.add_argument_group("prompts (default: three held-out questions)").add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="a user's message; the chat template is applied")
    prompts.add_argument("--prompts", metavar="FILE.jsonl", help='lines of {"prompt": TEXT}')
    prompts.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, used as they are")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--method",
        choices=METHODS,
        default=defaults.method,
        help="draft trees, draft chains, or plain decoding (default %(default)s)",
    )
    decoding.add_argument(
        "--budget",
        type=int,
        default=defaults.budget,
        help="nodes per draft tree, its root not counted (default %(default)s)",
    )
    decoding.add_argument(
        "--tree-width", type=int, default=defaults.tree_width, help="children scored per node (default %(default)s)"
    )
    decoding.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens)
    decoding.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy (default)")
    decoding.add_argument("--top-k", type=int, default=defaults.top_k, help="0 keeps all (default)")
    decoding.add_argument("--top-p", type=float, default=defaults.top_p)
    decoding.add_argument("--min-p", type=float, default=defaults.min_p)
    decoding.add_argument("--seed", type=int, default=defaults.seed, help="prompt i draws with seed + i")
    decoding.add_argument("--batch-size", type=int, default=defaults.batch_size, help="prompts decoded together")
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="time plain decoding too, in the same run")
    output.add_argument("--repeats", type=int, default=3, help="timed runs of each method with --compare (median)")
    output.add_argument(
        "--verify-lossless",
        action="store_true",
        help="decode plainly too and compare tokens; exits 1 if float32 tokens differ",
    )
    output.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout, nothing else")
    output.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs in $XDG_CACHE_HOME/jetspec_jax",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (2 for bad input, with one line on stderr)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = make_parser().parse_args(argv)
    try:
        config = _config(args)
        texts = _read_prompts(args)
        target = jetspec_jax.load_target(args.model, dtype=args.dtype)
        head = _load_head(args, target, config)
        prompts = [jetspec_jax.chat_prompt(target, p) if isinstance(p, str) else p for p in texts]
        for index, prompt in enumerate(prompts):
            check_prompt(prompt_ids(target, prompt), target, config.max_new_tokens, _where(args, index))
    except ValueError as error:
        _fail(str(error))
    if not args.no_compilation_cache:
        jetspec_jax.enable_compilation_cache()
    return _Session(args, target, head, config, texts, prompts).run()


@dataclasses.dataclass(frozen=True)
class _Session:
    """One run of the command. `texts` are the prompts as given, `prompts` what the target reads."""

    args: argparse.Namespace
    target: Target
    head: DraftHead | None
    config: GenerationConfig
    texts: list[str | list[int]]
    prompts: list[str | list[int]]

    def run(self) -> int:
        """Generates, reports and checks; returns the exit code."""
        self._announce()
        results = self._generate(self.config) if self._quiet else self._stream()
        runs: list[Sequence[GenerationResult]] = [results]
        if self.args.compare:
            runs = self._time_both()
        if self.args.json:
            self._print_json(runs)
        else:
            print(f"\n{table(runs, self.config.batch_size)}")
            print("tau: tokens committed per target forward, after prefill; speed excludes compilation")
        return self._verify(results) if self.args.verify_lossless else 0

    @property
    def _quiet(self) -> bool:
        return self.args.json or self.config.batch_size > 1

    @property
    def _plain(self) -> GenerationConfig:
        return dataclasses.replace(self.config, method="ar")

    def _generate(self, config: GenerationConfig, prompts: Any = None, **options: Any) -> list[GenerationResult]:
        prompts = self.prompts if prompts is None else prompts
        return jetspec_jax.generate(self.target, self.head, prompts, config, **options)

    def _announce(self) -> None:
        model = self.target.config
        size = sum(leaf.size for leaf in jax.tree.leaves(self.target.model)) / 1e6
        device = jax.devices()[0]
        note = (
            f"target {self.target.path.name}: {size:.1f}M parameters, {model.num_hidden_layers} layers, "
            f"{self.target.model.model.norm.weight[...].dtype}; {device.platform} {device.device_kind}"
        )
        if self.config.method != "ar" and self.head is not None:
            kind = "causal" if self.head.config.causal_head else "bidirectional"
            note += (
                f"; {kind} head of {self.head.config.num_hidden_layers} layers, block "
                f"{self.head.config.block_size}, {self.config.method}, budget {self.config.budget}"
            )
        print(note, file=sys.stderr)

    def _stream(self) -> list[GenerationResult]:
        """One prompt after the other, printed as rounds commit tokens."""
        if legend():
            print(legend())
        results = []
        for index, (text, prompt) in enumerate(zip(self.texts, self.prompts, strict=True)):
            print(f"\n> {text if isinstance(text, str) else ' '.join(map(str, text))}\n")
            printer = Printer(self.target.tokenizer)
            config = dataclasses.replace(self.config, seed=self.config.seed + index)
            results += self._generate(config, [prompt], rounds_per_call=_ROUNDS_PER_PRINT, on_progress=printer.update)
        return results

    def _time_both(self) -> list[Sequence[GenerationResult]]:
        """Median runs of the method and of plain decoding, timed in turns so that both meet the same machine."""
        ours, plain = [], []
        for _ in range(self.args.repeats):
            ours.append(self._generate(self.config))
            plain.append(self._generate(self._plain))
        size = self.config.batch_size
        return [median_run(ours, size), median_run(plain, size)]

    def _print_json(self, runs: Sequence[Sequence[GenerationResult]]) -> None:
        for index, result in enumerate(runs[0]):
            row = {name: getattr(result, name) for name in _JSON_FIELDS}
            row["prompt"] = self.texts[index]
            if len(runs) > 1:
                plain = runs[1][index]
                row["ar"] = {"seconds": plain.seconds, "tokens_per_second": plain.tokens_per_second}
            print(json.dumps(row))

    def _verify(self, results: Sequence[GenerationResult]) -> int:
        """Compares with plain decoding; reports the first divergence of each prompt that has one."""
        differing = 0
        for index, (ours, plain) in enumerate(zip(results, self._generate(self._plain), strict=True)):
            if ours.token_ids == plain.token_ids:
                continue
            differing += 1
            pairs = zip(ours.token_ids, plain.token_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.token_ids), len(plain.token_ids)))
            gap = top_two_gap(self.target, [*prompt_ids(self.target, self.prompts[index]), *plain.token_ids[:at]])
            print(f"prompt {index} diverges at new token {at}: {ours.token_ids[at : at + 1]} instead of "
                  f"{plain.token_ids[at : at + 1]}; the target's top-1/top-2 logit gap there is {gap:.2e}",
                  file=sys.stderr)  # fmt: skip
        dtype = self.target.model.model.norm.weight[...].dtype
        print(f"lossless: {len(results) - differing} of {len(results)} equal plain decoding ({dtype})", file=sys.stderr)
        if differing and dtype != np.float32:
            print("in this dtype a tree forward and a one-token forward round differently, and near-ties may part; "
                  "--dtype float32 must show none", file=sys.stderr)  # fmt: skip
        return 1 if differing and dtype == np.float32 else 0


def _config(args: argparse.Namespace) -> GenerationConfig:
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    return GenerationConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(GenerationConfig)})


def _load_head(args: argparse.Namespace, target: Target, config: GenerationConfig) -> DraftHead | None:
    if args.draft_head is not None:
        return jetspec_jax.load_draft_head(args.draft_head, target)
    if config.method == "ar":
        return None
    if pathlib.Path(args.model) != EMBEDDED_TARGET:
        raise ValueError("--model needs a --draft-head that was trained for it (or --method ar)")
    return jetspec_jax.load_draft_head(EMBEDDED_HEAD, target)


def _read_prompts(args: argparse.Namespace) -> list[str | list[int]]:
    if args.prompt is not None:
        if not args.prompt.strip():
            raise ValueError("--prompt is empty; it needs some text")
        return [args.prompt]
    if args.prompt_ids is not None:
        try:
            return [[int(part) for part in args.prompt_ids.split(",")]]
        except ValueError:
            raise ValueError(f"--prompt-ids must be integers separated by commas, got {args.prompt_ids!r}") from None
    if args.prompts is not None:
        return read_prompt_file(pathlib.Path(args.prompts))
    return read_prompt_file(_HELD_OUT)[:_QUESTIONS]


def read_prompt_file(path: pathlib.Path) -> list[str | list[int]]:
    """The prompts of a JSONL file.

    Raises:
        ValueError: the file cannot be read or has none, or a line is not `{"prompt": TEXT}`; file and line are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}") from None
    prompts: list[str | list[int]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f'{path}:{number}: not JSON ({error.msg}); expected {{"prompt": TEXT}}') from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'{path}:{number}: expected {{"prompt": TEXT}} with a text that is not empty')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"--prompts {path} holds no prompts")
    return prompts


def _where(args: argparse.Namespace, index: int) -> str:
    if args.prompts is not None:
        return f"{args.prompts}: prompt {index + 1}"
    return "--prompt-ids" if args.prompt_ids is not None else "--prompt"


def _fail(message: str) -> NoReturn:
    print("error: " + "; ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
