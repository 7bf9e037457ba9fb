"""`python -m infer.generate`: answers prompts by lossless speculative decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

import jetspec_jax
from infer.display import Printer, legend, median_run, table
from infer.models import add_model_flags, load_target
from infer.prompts import Request, add_flags, read_prompt_file, read_requests, shown, thinking_mismatch, to_prompts
from jetspec_jax.engine import METHODS, GenerationConfig, GenerationResult, check_attention, prompt_ids, top_two_gap
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_HEAD, EMBEDDED_TARGET, Target
from jetspec_jax.sharding import describe

__all__ = ["main", "make_parser", "read_prompt_file"]

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ROUNDS_PER_PRINT = 2
_JSON_FIELDS = ("prompt", "text", "token_ids", "prompt_tokens", "finish_reason", "rounds", "accepted_lengths",
                "mean_accepted_length", "budget", "method", "seconds", "tokens_per_second")  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(prog="python -m infer.generate", description=__doc__)
    defaults = GenerationConfig()
    add_model_flags(parser, help="the draft head, likewise (default: the shipped one)")
    add_flags(parser)
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
    sampling = "(default: the model's generation_config.json, else %s)"
    decoding.add_argument("--temperature", type=float, help=f"0 is greedy {sampling % 0}")
    decoding.add_argument("--top-k", type=int, help=f"0 keeps all {sampling % 0}")
    decoding.add_argument("--top-p", type=float, help=f"1 keeps all {sampling % 1}")
    decoding.add_argument("--min-p", type=float, help=f"0 keeps all {sampling % 0}")
    decoding.add_argument("--seed", type=int, default=defaults.seed, help="prompt i draws with seed + i")
    decoding.add_argument("--batch-size", type=int, default=defaults.batch_size, help="prompts decoded together")
    decoding.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end an answer before this text, wherever tokens part; may be given several times",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--compare", action="store_true", help="time plain decoding too, in the same run")
    output.add_argument("--repeats", type=int, default=3, help="timed runs of each method with --compare (median)")
    output.add_argument(
        "--verify-lossless",
        action="store_true",
        help="decode plainly too and compare tokens; exits 1 if float32 tokens differ",
    )
    output.add_argument("--json", action="store_true", help="one JSON object a prompt on stdout, nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (2 for bad input, with one line on stderr)."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    args = make_parser().parse_args(argv)
    try:
        config = _config(args)
        requests = read_requests(args)
        target = load_target(args)
        config, note = _with_model_defaults(config, args, target)
        head = _load_head(args, target, config)
        prompts = to_prompts(args, target, requests, config.max_new_tokens)
        if config.stop and target.tokenizer is None:
            raise ValueError(f"--stop needs a tokenizer, and {target.path} has none")
        check_attention(target, head, config)
        mismatch = thinking_mismatch(args, target, head)
    except ValueError as error:
        _fail(str(error))
    if note:
        print(note, file=sys.stderr)
    if mismatch:
        print(f"warning: {mismatch}", file=sys.stderr)
    if not args.no_compilation_cache:
        jetspec_jax.enable_compilation_cache()
    return _Session(args, target, head, config, requests, prompts).run()


@dataclasses.dataclass(frozen=True)
class _Session:
    """One run of the command. `requests` are the prompts as given, `prompts` what the target reads."""

    args: argparse.Namespace
    target: Target
    head: DraftHead | None
    config: GenerationConfig
    requests: list[Request]
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
            if self._quiet:
                self._print_answers(results)
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
            f"target {self.target.name or self.target.path.name}: {size:.1f}M parameters, "
            f"{model.num_hidden_layers} layers, "
            f"{self.target.model.model.norm.weight[...].dtype}; {device.platform} {device.device_kind}"
        )
        if self.target.mesh is not None:
            note += f", mesh {describe(self.target.mesh.shape)}"
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
        for index, (request, prompt) in enumerate(zip(self.requests, self.prompts, strict=True)):
            print(f"\n> {shown(request)}\n")
            printer = Printer(self.target.tokenizer, stop=self.config.stop)
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

    def _print_answers(self, results: Sequence[GenerationResult]) -> None:
        for request, result in zip(self.requests, results, strict=True):
            answer = " ".join(map(str, result.token_ids)) if result.text is None else result.text
            print(f"\n> {shown(request)}\n\n{answer}")

    def _print_json(self, runs: Sequence[Sequence[GenerationResult]]) -> None:
        for index, result in enumerate(runs[0]):
            row = {name: getattr(result, name) for name in _JSON_FIELDS}
            row["prompt"] = self.requests[index]
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
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(GenerationConfig)}
    return GenerationConfig(**{name: value for name, value in values.items() if value is not None})


def _with_model_defaults(
    config: GenerationConfig, args: argparse.Namespace, target: Target
) -> tuple[GenerationConfig, str | None]:
    """The config with the model's sampling where no flag says otherwise, and a line for people: what came from there,
    or which flags greedy decoding leaves without effect."""
    taken = {name: getattr(target.sampling_defaults, name) for name in _SAMPLING if getattr(args, name) is None}
    config = dataclasses.replace(config, **taken)
    told = [f"{name} {taken[name]:g}" for name in taken if taken[name] != getattr(GenerationConfig(), name)]
    if config.sampling.greedy:
        asked = [name for name in _SAMPLING if getattr(args, name) not in (None, getattr(GenerationConfig(), name))]
        idle = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        return config, f"temperature 0 is greedy; without effect: {idle}" if idle else None
    if not told:
        return config, None
    return config, f"sampling: {', '.join(told)} from the model's generation_config.json (--temperature 0 is greedy)"


def _load_head(args: argparse.Namespace, target: Target, config: GenerationConfig) -> DraftHead | None:
    if args.draft_head is not None:
        return jetspec_jax.load_draft_head(args.draft_head, target, revision=args.draft_head_revision)
    if args.draft_head_revision is not None:
        raise ValueError("--draft-head-revision is for a hub --draft-head, and none was given")
    if config.method == "ar":
        return None
    if target.path.resolve() != EMBEDDED_TARGET.resolve():
        raise ValueError("--model needs a --draft-head that was trained for it (or --method ar)")
    return jetspec_jax.load_draft_head(EMBEDDED_HEAD, target)


def _fail(message: str) -> NoReturn:
    print("error: " + "; ".join(line.strip() for line in message.splitlines()), file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
