"""What the command is asked: prompts from flags and files, and their way through the chat template."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import cast

import jetspec_jax
from jetspec_jax.chat import check_messages, thinking_mode
from jetspec_jax.engine import check_prompt, prompt_ids
from jetspec_jax.head import DraftHead
from jetspec_jax.models import EMBEDDED_TARGET, Target

Request = str | list[int] | list[dict[str, str]]
"""A user's message, token ids, or a conversation."""

_HELD_OUT = EMBEDDED_TARGET.parent / "held_out.jsonl"
_QUESTIONS = 3
_EXPECTED = 'expected {"prompt": TEXT} or {"messages": [{"role": ..., "content": ...}, ...]}'


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to answer."""
    group = parser.add_argument_group("prompts (default: three held-out questions)")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT", help="a user's message; the chat template is applied")
    prompts.add_argument("--prompts", metavar="FILE.jsonl", help='lines of {"prompt": TEXT} or {"messages": [...]}')
    prompts.add_argument("--prompt-ids", metavar="1,2,3", help="token ids, used as they are")
    group.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="the chat template's enable_thinking (default: the template's own)",
    )
    group.add_argument("--raw", action="store_true", help="no chat template: the target reads the text exactly")


def read_requests(args: argparse.Namespace) -> list[Request]:
    """The prompts that the flags name, before any template.

    Raises:
        ValueError: a prompt is missing or malformed, or flags contradict each other.
    """
    unused = "--raw" if args.raw else "--prompt-ids" if args.prompt_ids is not None else None
    if unused and args.system is not None:
        raise ValueError(f"{unused} leaves the chat template out, so that --system cannot be honoured; drop one")
    if unused and args.thinking is not None:
        raise ValueError(f"{unused} leaves the chat template out, so that --thinking cannot be honoured; drop one")
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


def read_prompt_file(path: pathlib.Path) -> list[Request]:
    """The prompts of a JSONL file: texts and conversations.

    Raises:
        ValueError: the file cannot be read or has none, or a line is neither `{"prompt": TEXT}` nor
            `{"messages": [...]}` (see `check_messages`); file and line are named.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON texts may hold the other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}") from None
    requests: list[Request] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON ({error.msg}); {_EXPECTED}") from None
        requests.append(_request(row, f"{path}:{number}"))
    if not requests:
        raise ValueError(f"--prompts {path} holds no prompts")
    return requests


def _request(row: object, where: str) -> Request:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError(f"{where}: {_EXPECTED}")
    if "messages" in row:
        try:
            check_messages(row["messages"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        messages: list[dict[str, str]] = row["messages"]
        return messages
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{where}: {_EXPECTED} with a text that is not empty")
    return prompt


def to_prompts(
    args: argparse.Namespace, target: Target, requests: list[Request], max_new_tokens: int
) -> list[str | list[int]]:
    """What the target reads for each request: templated text, or token ids.

    Raises:
        ValueError: the template cannot express a request, or the target cannot answer it; the request is named.
    """
    prompts: list[str | list[int]] = []
    for index, request in enumerate(requests):
        where = _where(args, index)
        prompt = _to_prompt(args, target, request, where)
        check_prompt(prompt_ids(target, prompt), target, max_new_tokens, where)
        prompts.append(prompt)
    return prompts


def _to_prompt(args: argparse.Namespace, target: Target, request: Request, where: str) -> str | list[int]:
    if isinstance(request, list) and not (request and isinstance(request[0], dict)):
        return cast(list[int], request)
    if args.raw:
        if not isinstance(request, str):
            raise ValueError(f"{where} holds messages, which need the chat template that --raw leaves out")
        return request
    try:
        return jetspec_jax.chat_prompt(target, request, system=args.system, enable_thinking=args.thinking)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def thinking_mismatch(args: argparse.Namespace, target: Target, head: DraftHead | None) -> str | None:
    """A warning when the head was trained for the other thinking mode than the prompts are in."""
    trained = None if head is None else head.config.enable_thinking
    if trained is None or args.raw or args.prompt_ids is not None:
        return None
    mode = thinking_mode(target, args.thinking)
    if mode is None or mode == trained:
        return None
    return (
        f"the draft head was trained with enable_thinking={trained} and the prompts have {mode}: the text stays the "
        f"target's, but fewer drafts will be accepted; --{'' if trained else 'no-'}thinking matches the head"
    )


def shown(request: Request) -> str:
    """A request in one line or more, for people."""
    if isinstance(request, str):
        return request
    parts = (f"{part['role']}: {part['content']}" if isinstance(part, dict) else str(part) for part in request)
    return ("\n> " if request and isinstance(request[0], dict) else " ").join(parts)


def _where(args: argparse.Namespace, index: int) -> str:
    if args.prompts is not None:
        return f"{args.prompts}: prompt {index + 1}"
    return "--prompt-ids" if args.prompt_ids is not None else "--prompt"
