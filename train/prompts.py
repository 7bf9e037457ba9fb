"""What the target is asked when data is regenerated: problems, JSONL files, Hugging Face datasets."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np

from jetspec_jax.chat import Message, chat_prompt, check_messages
from jetspec_jax.engine import check_prompt, prompt_ids
from jetspec_jax.models import Target
from jetspec_jax.text import check_text
from train.rows import good_rows, left_out, open_rows
from train.tasks import problems

Prompt = str | list[Message]
"""A user's message, or a conversation that the user ends."""

_TASKS = re.compile(r"tasks:([1-9][0-9]*)")
_TASKS_SEED = 1  # one stream, whatever seed answers are drawn with


def read_prompts(source: str, field: str | None = None) -> tuple[list[Prompt], list[str]]:
    """The prompts of a source, in its order.

    Args:
        source: `tasks:N` (training problems of train.tasks), a JSONL file of `{"prompt": TEXT}` or
            `{"messages": [...]}`, or a dataset `hf:org/name[::subset][:split]` with such columns. A conversation
            counts up to the user's last message.
        field: the field of texts or conversations, where it is another than "prompt" or "messages".

    Returns:
        The prompts, and warnings about rows that were left out.

    Raises:
        ValueError: the source cannot be read, or more than 1% of its rows are malformed.
    """
    if source.startswith("tasks:"):
        count = _TASKS.fullmatch(source)
        if count is None:
            raise ValueError(f"--prompts {source}: expected tasks:N with N of at least 1, such as tasks:8000")
        stream = problems(_TASKS_SEED, split="train")
        return [problem.prompt for problem in itertools.islice(stream, int(count[1]))], []
    prompts: list[Prompt] = []
    _, warnings = good_rows(open_rows(source), lambda row: prompts.append(_prompt(row, field)))
    return prompts, warnings


def _prompt(row: Any, field: str | None) -> Prompt:
    names = ("prompt", "messages") if field is None else (field,)
    given = [name for name in names if isinstance(row, dict) and name in row]
    if len(given) == 2:
        raise ValueError("a row must have prompt or messages, not both; --prompt-field messages takes the conversation")
    if not given:
        has = f"it has {', '.join(map(str, row))}" if isinstance(row, dict) else f"it is {str(row)[:40]}"
        raise ValueError(f"a row must have {' or '.join(names)} (--prompt-field names another); {has}")
    value = row[given[0]]
    if isinstance(value, str) and value.strip() and given[0] != "messages":
        check_text(given[0], value)
        return value
    if not isinstance(value, list):
        raise ValueError(f"{given[0]} must be a text that is not empty, or messages; got {str(value)[:40]!r}")
    while value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
        value = value[:-1]  # the target answers instead
    check_messages(value)
    return value


def tokenised(
    target: Target,
    prompts: list[Prompt],
    source: str,
    max_new_tokens: int,
    *,
    system: str | None,
    enable_thinking: bool | None,
) -> tuple[dict[int, list[int]], list[str]]:
    """Token ids of every prompt that the target can answer, by the prompt's index, and warnings about the others.

    Raises:
        ValueError: more than 1% cannot be answered: too long, or refused by the chat template.
    """
    rows: dict[int, list[int]] = {}
    shown: list[str] = []
    refused = 0
    for index, prompt in enumerate(prompts):
        try:
            text = chat_prompt(target, prompt, system=system, enable_thinking=enable_thinking)
            ids = prompt_ids(target, text)
            check_prompt(ids, target, max_new_tokens, f"prompt {index}")
        except ValueError as error:
            refused += 1
            if len(shown) < 3:
                shown.append(str(error))
        else:
            rows[index] = ids
    return rows, left_out(source, refused, len(prompts), "prompts that the target cannot answer", shown)


def answer_order(rows: dict[int, list[int]], window: int) -> np.ndarray:
    """The order in which prompts are answered: int64 indices.

    Windows of prompts in their own order, each sorted by length, so that a batch holds prompts of like length and
    little is padded. It depends on nothing else, so that a resumed run finds its place.
    """
    indices = np.fromiter(rows, np.int64, len(rows))
    lengths = np.asarray([len(row) for row in rows.values()])
    return indices[np.lexsort((lengths, np.arange(len(rows)) // window))]
