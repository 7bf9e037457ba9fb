"""Generation for people: prompts in, results out; batches, buckets, streaming and timing around the compiled loop."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.checks import check_int
from jetspec_jax.compiled import compiled
from jetspec_jax.decode import DecodeState, Drafter, LoopSpec, NoDrafter, decode, prefill
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target, check_head
from jetspec_jax.sampling import Sampling
from jetspec_jax.sharding import batch_ways, check_batch, place, use
from jetspec_jax.target import TargetModel
from jetspec_jax.text import TextStream, check_text, decode_tokens, decode_until, encode_text
from jetspec_jax.tree import TreeShape
from kernels.pallas.tree_attention import BACKENDS, Backend, Problem, causal_mask, check_backend

Method = Literal["jetspec", "chain", "ar"]
METHODS: tuple[Method, ...] = ("jetspec", "chain", "ar")
_MAX_CHUNK = 512
_MIN_CAPACITY = 64
_ROUNDS_PER_STOP_CHECK = 8
_NO_LIMIT = np.int32(np.iinfo(np.int32).max)
_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """What `generate` does with every prompt.

    method: `jetspec` (trees), `chain` (one path per round) or `ar` (plain decoding).
    budget: nodes per tree, the root not counted. tree_width: children scored per node.
    max_new_tokens: a cap on each text. temperature, top_k, top_p, min_p: see `Sampling`.
    seed: row i of the prompts draws with seed + i, whatever batch it is in; none may be over 2**32 - 1.
    batch_size: prompts decoded together.
    attention: `auto`, `pallas` (a kernel; interpreted, which is slow, on a CPU) or `xla`; see `tree_attention`.
    stop: texts that end an answer, wherever tokens part; special tokens have no text. See `TextStream`. A text alone
        is taken as the only one, and None as none.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    method: Method = "jetspec"
    budget: int = 256
    tree_width: int = 8
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch_size: int = 1
    stop: tuple[str, ...] = ()
    attention: Backend = "auto"

    def __post_init__(self) -> None:
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else () if given is None else given
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be texts that are not empty, got {given!r}")
        object.__setattr__(self, "stop", tuple(stop))
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.attention not in BACKENDS:
            raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {self.attention!r}")
        for name in ("budget", "tree_width", "max_new_tokens", "batch_size"):
            check_int(name, getattr(self, name), 1)
        for name in ("top_k", "seed"):
            check_int(name, getattr(self, name), 0)
        self.sampling  # noqa: B018 - raises for values out of range

    @property
    def sampling(self) -> Sampling:
        """How the target chooses tokens."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """One prompt's answer.

    prompt: as it was given; None for a prompt of ids. text: the answer without special tokens, up to a stop text;
        None without a tokenizer. token_ids: the answer's, the end-of-sequence token or the one that completed a stop
        text included. prompt_tokens: the number of the prompt's tokens.
    finish_reason: "stop" (an end-of-sequence token or a stop text) or "length" (max_new_tokens).
    rounds: target forwards after prefill. accepted_lengths: tokens committed by each of them.
    mean_accepted_length: tau, sum(accepted_lengths) / rounds; tokens cut off by a stop or cap do not count, nor
        does the first token, which prefill gives. 0 when there was no round.
    drafted: per token, whether it was an accepted draft (otherwise the target gave it).
    budget, method: what was asked for. seconds: of the batch that the prompt was in, prefill included,
    compilation excluded. tokens_per_second: of this prompt, len(token_ids) / seconds.
    """

    prompt: str | None
    text: str | None
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    rounds: int
    accepted_lengths: list[int]
    mean_accepted_length: float
    drafted: list[bool]
    budget: int
    method: Method
    seconds: float
    tokens_per_second: float


class Progress(NamedTuple):
    """A batch under way, on the host; arrays as in `DecodeState`, one row a prompt."""

    first: int
    tokens: np.ndarray
    prompt_lengths: np.ndarray
    ends: np.ndarray
    token_rounds: np.ndarray
    drafted: np.ndarray
    rounds: np.ndarray
    finished: np.ndarray
    seconds: float

    def row(self, index: int) -> tuple[list[int], list[bool]]:
        """The new tokens of a row so far, and which of them were drafted."""
        span = slice(self.prompt_lengths[index], self.ends[index])
        return self.tokens[index, span].tolist(), self.drafted[index, span].tolist()


def generate(
    target: Target,
    head: DraftHead | None,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    config: GenerationConfig | None = None,
    *,
    seeds: Sequence[int] | None = None,
    rounds_per_call: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: object,
) -> list[GenerationResult]:
    """Answers prompts, losslessly: the tokens are the target's own.

    Args:
        target: from `load_target`.
        head: from `load_draft_head`; None only with method "ar".
        prompts: texts, put as they are through the tokenizer (see `chat_prompt`, `encode_text`), or lists of token ids.
        config: what to do; `options` are fields of `GenerationConfig` that override it.
        seeds: one a prompt, instead of `config.seed` + its place in `prompts`.
        rounds_per_call: rounds between two calls of `on_progress`, and between two looks for stop texts; None decodes
            each batch in one call, or in a few when there are stop texts. Results do not depend on it.
        on_progress: sees every batch after prefill and after each call.

    Returns:
        One result per prompt, in order.

    Raises:
        ValueError: a prompt is no text and no ids, empty, too long or has ids outside the vocabulary; an option is out
            of range or does not fit the target's mesh; or the head does not fit the target. Raised before anything is
            compiled.
    """
    if isinstance(prompts, str | Mapping):
        raise ValueError(f"prompts must be a list of texts or of lists of token ids, got {str(prompts)[:40]!r} alone")
    config = dataclasses.replace(config or GenerationConfig(), **options)  # type: ignore[arg-type]
    if config.method != "ar" and head is None:
        raise ValueError(f"method {config.method} needs a draft head; give one, or use method ar")
    if config.method != "ar" and head is not None:
        check_head(head, target)
    if rounds_per_call is not None and rounds_per_call < 1:
        raise ValueError(f"rounds_per_call must be at least 1 or None, got {rounds_per_call}")
    if config.stop and target.tokenizer is None:
        raise ValueError(f"{target.path} has no tokenizer, which stop texts need")
    if target.mesh is not None:
        check_batch(config.batch_size, target.mesh)
    draws = _draws(config.seed, seeds, len(prompts))
    check_attention(target, head, config)
    rows = [prompt_ids(target, prompts[i], f"prompt {i}") for i in range(len(prompts))]
    for index, row in enumerate(rows):
        check_prompt(row, target, config.max_new_tokens, f"prompt {index}")
    results: list[GenerationResult] = []
    for first in range(0, len(rows), config.batch_size):
        batch = slice(first, first + config.batch_size)
        for padded in _run(target, head, rows[batch], draws[batch], first, config, rounds_per_call):
            progress = _first_rows(padded, len(rows[batch]))
            if on_progress:
                on_progress(progress)
        results += [_result(target, prompts[first + i], progress, i, config) for i in range(len(rows[batch]))]
    return results


def _draws(first: int, seeds: Sequence[int] | None, count: int) -> np.ndarray:
    """The seeds of `count` prompts, uint32: those given, else from `first` on. Raises ValueError for any other."""
    chosen = range(first, first + count) if seeds is None else seeds
    if len(chosen) != count:
        raise ValueError(f"seeds must be one a prompt: {len(chosen)} for {count} prompts")
    wrong = [seed for seed in chosen if not isinstance(seed, int | np.integer) or not 0 <= seed <= _MAX_SEED]
    if wrong:
        raise ValueError(f"seeds must be integers from 0 to {_MAX_SEED}, got {wrong[0]!r}")
    return np.asarray(chosen, np.uint32)


def prompt_ids(target: Target, prompt: str | Sequence[int], where: str = "the prompt") -> list[int]:
    """The token ids of a prompt; texts as `encode_text` gives them.

    Raises:
        ValueError: it is a text that no tokenizer reads or there is no tokenizer, or it is neither text nor ids; the
            message names `where`.
    """
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(
                f"{where} is {str(prompt)[:40]!r}, expected a text or a list of token ids; prompts come in a list, "
                "such as [[1, 2, 3]], and messages become a text by chat_prompt"
            ) from None
    check_text(where, prompt)
    if target.tokenizer is None:
        raise ValueError(f"{target.path} has no tokenizer, so that prompts must be token ids (--prompt-ids 1,2,3)")
    return encode_text(target.tokenizer, prompt)


def check_prompt(row: Sequence[int], target: Target, max_new_tokens: int, where: str) -> None:
    """Raises ValueError, naming `where`, unless a prompt's ids can be answered by the target."""
    limit, vocab = target.config.max_tokens, target.config.vocab_size
    if not row:
        raise ValueError(f"{where} is empty; it needs at least one token")
    outside = [token for token in row if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{where} has token id {outside[0]}, outside the vocabulary of {vocab} (0 to {vocab - 1})")
    if len(row) + max_new_tokens > limit:
        raise ValueError(
            f"{where} has {len(row)} tokens, and with max_new_tokens {max_new_tokens} would reach "
            f"{len(row) + max_new_tokens}, over the model's limit of {limit}; shorten it or lower --max-new-tokens"
        )


def check_attention(target: Target, head: DraftHead | None, config: GenerationConfig) -> None:
    """Raises ValueError, with every reason, where `config.attention` forces a kernel that cannot serve the models."""
    if config.attention != "pallas":
        return
    nodes = max(_MAX_CHUNK, config.budget + 1 if config.method == "jetspec" else 1)
    dtype = target.model.model.norm.weight[...].dtype
    for model in (target.config, *([] if head is None else [head.config])):
        heads = model.num_attention_heads, model.num_key_value_heads, model.head_dim
        check_backend(Problem(config.batch_size, nodes, *heads, _MIN_CAPACITY, None, dtype), config.attention)


def bucket(size: int) -> int:
    """`size` rounded up to one of few: powers of two, and from 2048 on four steps between them."""
    power = 1 << max(size - 1, 0).bit_length()
    if power <= 2048:
        return power
    step = power // 8
    return -(-size // step) * step


def prompt_chunk(length: int) -> int:
    """Prompt tokens per forward: all of a prompt of up to 512, rounded up by at most a quarter, else 512."""
    step = max(16, (1 << max(length - 1, 0).bit_length()) // 8)
    return min(-(-length // step) * step, _MAX_CHUNK)


def tree_shape(config: GenerationConfig, drafter: Drafter, vocab: int) -> TreeShape:
    """The trees that a method drafts."""
    if not isinstance(drafter, DraftHead):
        return TreeShape(0, 1, 0)
    depth = drafter.depth
    if config.method == "chain":
        return TreeShape(min(config.budget, depth), 1, min(config.budget, depth))
    return TreeShape(config.budget, min(config.tree_width, vocab), depth)


def _run(
    target: Target,
    head: DraftHead | None,
    rows: list[list[int]],
    draws: np.ndarray,
    first: int,
    config: GenerationConfig,
    rounds_per_call: int | None,
) -> Iterator[Progress]:
    """Decodes one batch; a short last batch is padded with empty rows, so that it compiles nothing new."""
    drafter: Drafter = NoDrafter() if config.method == "ar" or head is None else head
    shape = tree_shape(config, drafter, target.config.vocab_size)
    sampling = config.sampling
    spec = LoopSpec(shape, target.eos_token_ids, sampling.mode)
    lengths = np.zeros(config.batch_size, np.int32)
    lengths[: len(rows)] = [len(row) for row in rows]
    chunk = prompt_chunk(int(lengths.max()))
    capacity = bucket(max(_MIN_CAPACITY, int(lengths.max()) + config.max_new_tokens))
    tokens = np.zeros((config.batch_size, capacity), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    seeds = np.zeros(config.batch_size, np.uint32)
    seeds[: len(rows)] = draws
    limits = np.where(lengths > 0, lengths + config.max_new_tokens, 0).astype(np.int32)

    by_row = [place(x, target.mesh, "batch") for x in (tokens, lengths, limits, seeds)]
    inputs = (target.model, drafter, *by_row, sampling.knobs)
    static = {"eos_ids": spec.eos_ids, "mode": spec.mode, "chunk": chunk, "attention": config.attention}
    stops = _StopTexts(target, config.stop, config.batch_size)
    if rounds_per_call is None and config.stop:
        rounds_per_call = _ROUNDS_PER_STOP_CHECK
    calls = _NO_LIMIT if rounds_per_call is None else np.int32(rounds_per_call)
    with computing(target):
        start_program = compiled(prefill, *inputs, **static)
        state = start_program.out_info
        loop_program = compiled(decode, target.model, drafter, state, calls, sampling.knobs, spec=spec)
    started = time.perf_counter()
    state = start_program(*inputs)
    progress = stops.apply(_progress(state, lengths, first, started))
    yield progress
    while not progress.finished.all():
        if config.stop:  # rows that met a stop text end on the device too, for it sees tokens only
            finished = jax.device_put(progress.finished, state.finished.sharding)
            state = dataclasses.replace(state, finished=finished)
        state = loop_program(target.model, drafter, state, calls, sampling.knobs)
        progress = stops.apply(_progress(state, lengths, first, started))
        yield progress


class _StopTexts:
    """Looks for stop texts in a batch as it grows, and cuts rows behind the token that completes one."""

    def __init__(self, target: Target, stop: tuple[str, ...], rows: int):
        self._streams = [TextStream(target.tokenizer, stop) for _ in range(rows)] if target.tokenizer and stop else []
        self._seen = [0] * rows

    def apply(self, progress: Progress) -> Progress:
        """`progress` as if the rows had ended at their stop texts, whenever it was that one looked."""
        if not self._streams:
            return progress
        ends, rounds, finished = (x.copy() for x in (progress.ends, progress.rounds, progress.finished))
        for index, stream in enumerate(self._streams):
            if not progress.prompt_lengths[index]:
                continue  # padding
            tokens = progress.row(index)[0]
            while not stream.stopped and self._seen[index] < len(tokens):
                stream.push(tokens[self._seen[index]])
                self._seen[index] += 1
            if stream.stopped:
                ends[index] = progress.prompt_lengths[index] + self._seen[index]
                rounds[index] = progress.token_rounds[index, ends[index] - 1]
                finished[index] = True
        return progress._replace(ends=ends, rounds=rounds, finished=finished)


@contextlib.contextmanager
def computing(target: Target) -> Iterator[None]:
    """The target's mesh in force, and full float32 products for a float32 target: what `generate` computes under.

    Accelerators otherwise round the operands of float32 products to fewer bits. Programs are compiled for what is in
    force while they are traced.
    """
    exact = target.model.model.norm.weight[...].dtype == np.float32
    with jax.default_matmul_precision("highest" if exact else "default"), use(target.mesh):
        yield


def _progress(state: DecodeState, prompt_lengths: np.ndarray, first: int, started: float) -> Progress:
    arrays = jax.device_get(
        (state.tokens, state.lengths, state.token_rounds, state.drafted, state.rounds, state.finished)
    )
    tokens, lengths, token_rounds, drafted, rounds, finished = arrays
    seconds = time.perf_counter() - started
    return Progress(first, tokens, prompt_lengths, lengths + 1, token_rounds, drafted, rounds, finished, seconds)


def _first_rows(progress: Progress, count: int) -> Progress:
    """`progress` without the rows behind `count`, which only fill the batch."""
    return Progress._make(x[:count] if isinstance(x, np.ndarray) else x for x in progress)


def _result(
    target: Target, prompt: str | Sequence[int], progress: Progress, index: int, config: GenerationConfig
) -> GenerationResult:
    token_ids, drafted = progress.row(index)
    begin, rounds = int(progress.prompt_lengths[index]), int(progress.rounds[index])
    by_round = np.bincount(progress.token_rounds[index, begin : begin + len(token_ids)], minlength=rounds + 1)[1:]
    text: str | None = None
    stopped = False
    if target.tokenizer is not None and config.stop:
        text, stopped = decode_until(target.tokenizer, token_ids, config.stop)
    elif target.tokenizer is not None:
        text = decode_tokens(target.tokenizer, token_ids)
    return GenerationResult(
        prompt=prompt if isinstance(prompt, str) else None,
        text=text,
        token_ids=token_ids,
        prompt_tokens=begin,
        finish_reason="stop" if stopped or token_ids[-1] in target.eos_token_ids else "length",
        rounds=rounds,
        accepted_lengths=by_round.tolist(),
        mean_accepted_length=float(by_round.sum() / rounds) if rounds else 0.0,
        drafted=drafted,
        budget=config.budget,
        method=config.method,
        seconds=progress.seconds,
        tokens_per_second=len(token_ids) / progress.seconds,
    )


def top_two_gap(target: Target, tokens: Sequence[int]) -> float:
    """The gap between the target's best and second-best next-token logits after `tokens`.

    Small gaps are near-ties, where differently ordered sums may choose differently.
    """
    rows = batch_ways(target.mesh)  # equal ones: fewer cannot be split over the mesh
    padded = np.zeros((rows, bucket(max(_MIN_CAPACITY, len(tokens)))), np.int32)
    padded[:, : len(tokens)] = tokens
    before, seeds = np.full(rows, len(tokens) - 1, np.int32), np.zeros(rows, np.uint32)
    by_row = [place(x, target.mesh, "batch") for x in (padded, before, before, seeds)]
    sampling, last = Sampling(), np.int32(tokens[-1])
    inputs = (target.model, NoDrafter(), *by_row, sampling.knobs)
    with computing(target):
        start = compiled(prefill, *inputs, eos_ids=(), mode=sampling.mode, chunk=prompt_chunk(len(tokens)))
        state = start(*inputs)
        logits = compiled(_logits_after, target.model, state, last)(target.model, state, last)
    values = np.sort(np.asarray(logits))
    return float(values[-1] - values[-2])


@jax.jit
def _logits_after(model: TargetModel, state: DecodeState, token: jax.Array) -> jax.Array:
    """Next-token logits `[vocab]` after the cached tokens of the first row and `token`, as plain decoding has them."""
    block = jnp.full((len(state.lengths), 1), token)
    out = model(block, state.lengths[:, None], state.cache, state.lengths, causal_mask(1))
    return model.logits(out.hidden)[0, 0]
