"""What a head is trained on: regenerated data, conversations, or plain text, tokenised one document at a time."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jetspec_jax.chat import chat_answers, check_messages, thinking_mode
from jetspec_jax.models import Target
from jetspec_jax.text import check_text, encode_text
from train.data import Document, document
from train.manifest import DATA, MANIFEST, Manifest, model_digest
from train.rows import Rows, good_rows, open_rows

_MESSAGES, _TURN, _TEXT, _IDS = {"messages"}, {"prompt", "response"}, {"text"}, {"prompt_ids", "token_ids"}
_EXPECTED = "expected one of messages; prompt and response; text; prompt_ids and token_ids"


@dataclasses.dataclass(frozen=True)
class Template:
    """How conversations become text: the target's tokenizer and chat template, a system message, the thinking mode."""

    target: Target
    system: str | None = None
    enable_thinking: bool | None = None

    def pieces(self, row: Any) -> list[tuple[str, bool]]:
        """The texts of a row in turn, and whether each is a response; each is tokenised by itself, as in decoding.

        Raises:
            ValueError: the row is malformed, or the template refuses it.
        """
        if _kind(row) == _TEXT:
            return [(_text(row, "text"), True)]
        text, spans = chat_answers(
            self.target, _messages(row), system=self.system, enable_thinking=self.enable_thinking
        )
        pieces, end = [], 0
        for start, stop in spans:
            pieces += [(text[end:start], False), (text[start:stop], True)]
            end = stop
        return pieces

    def document(self, row: Any) -> Document:
        """The document of a row that `check` passes."""
        if _kind(row) == _IDS:
            return document(row["prompt_ids"], row["token_ids"])
        tokens: list[int] = []
        response: list[bool] = []
        assert self.target.tokenizer is not None
        for text, learnt in self.pieces(row):
            tokenizer = self.target.tokenizer
            ids = tokenizer.encode(text, add_special_tokens=False) if tokens else encode_text(tokenizer, text)
            tokens += ids
            response += [learnt] * len(ids)
        return {"tokens": np.asarray(tokens, np.int32), "response": np.asarray(response, bool)}

    def check(self, row: Any) -> None:
        """Raises ValueError unless `document` can be made of a row."""
        if _kind(row) != _IDS:
            if self.target.tokenizer is None:
                raise ValueError(f"{self.target.path} has no tokenizer, so that rows must hold token ids")
            self.pieces(row)
            return
        for name, least in (("prompt_ids", 0), ("token_ids", 1)):
            _check_ids(name, row[name], least, self.target.config.vocab_size)


def _kind(row: Any) -> set[str]:
    """The fields that a row is read by.

    Raises:
        ValueError: it has those of no kind of row, or of several.
    """
    found = [kind for kind in (_MESSAGES, _TURN, _TEXT, _IDS) if isinstance(row, dict) and kind <= set(row)]
    if len(found) != 1:
        has = f"fields {', '.join(map(str, row))}" if isinstance(row, dict) else str(row)[:40]
        raise ValueError(f"{_EXPECTED}; got {has}")
    if found[0] == _TEXT and "token_ids" in row:
        raise ValueError(
            "text and token_ids are an answer without the prompt as the target read it, as infer.generate --json "
            "prints; make data with train.regenerate"
        )
    return found[0]


def _text(row: dict[str, Any], name: str) -> str:
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"{name} must be a text that is not empty, got {str(row[name])[:40]!r}")
    check_text(name, row[name])
    return str(row[name])


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """A row's conversation, up to its last answer."""
    if _kind(row) == _TURN:
        turns = (("user", _text(row, "prompt")), ("assistant", _text(row, "response")))
        return [{"role": role, "content": content} for role, content in turns]
    messages = row["messages"]
    is_answer = lambda message: isinstance(message, dict) and message.get("role") == "assistant"  # noqa: E731
    if isinstance(messages, list) and any(map(is_answer, messages)):
        last = max(index for index, message in enumerate(messages) if is_answer(message))
        messages = messages[: last + 1]
    check_messages(messages, last="assistant")
    return list(messages)


def _check_ids(name: str, ids: object, least: int, vocab: int) -> None:
    if not isinstance(ids, list) or len(ids) < least:
        raise ValueError(f"{name} must be a list of at least {least} token ids")
    if not ids:
        return
    try:
        array = np.asarray(ids)
    except ValueError:  # ragged
        array = np.empty(0)
    if array.dtype.kind != "i" or array.ndim != 1 or array.min() < 0 or array.max() >= vocab:
        raise ValueError(f"{name} must be integers from 0 to {vocab - 1}, got {str(ids)[:40]}")


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents at random access, as grain reads them; the text is tokenised when a document is asked for.

    warnings: what the user should be told about the source. enable_thinking: the chat template's mode that answers
    are in, None if unknown or without modes; a head is stamped with it.
    """

    rows: Rows
    good: np.ndarray
    make: Callable[[Any], Document]
    warnings: tuple[str, ...]
    enable_thinking: bool | None

    def __len__(self) -> int:
        return len(self.good)

    def __getitem__(self, index: int) -> Document:
        return self.make(self.rows[self.good[index]])

    def __repr__(self) -> str:
        return f"Documents({self.rows.source}, {len(self)})"  # the indices would drown a message

    @property
    def digest(self) -> str:
        """Changes with the data: a resumed run must find the same."""
        return self.rows.digest


def open_documents(
    source: str, target: Target, *, system: str | None = None, enable_thinking: bool | None = None
) -> Documents:
    """The documents of a data source; every row is looked at once, so that what is wrong is found before training.

    Args:
        source: a directory of `train.regenerate`; a JSONL file whose lines are conversations (`messages`, or `prompt`
            and `response`), texts (`text`) or token ids (`prompt_ids` and `token_ids`); or a Hugging Face dataset
            `hf:org/name[::subset][:split]` with such columns.
        target: whose tokenizer and chat template are used. All answers of a conversation are learnt, and every token
            of a text.
        system, enable_thinking: for conversations; see `chat_prompt`. Regenerated data has them settled.

    Raises:
        ValueError: the source cannot be opened, is not finished, or more than 1% of its rows are malformed.
    """
    warnings: list[str] = []
    directory = pathlib.Path(source).expanduser()
    if not source.startswith("hf:") and directory.is_dir():
        if not (directory / MANIFEST).exists():
            raise ValueError(f"{source} has no {MANIFEST}; give a directory of train.regenerate, or a JSONL file")
        if system is not None or enable_thinking is not None:
            raise ValueError(f"{source} was regenerated with its own system message and thinking mode; leave them out")
        manifest = Manifest.read(directory)
        manifest.check_finished(directory)
        enable_thinking = manifest.settings["enable_thinking"]
        if manifest.settings["model"] != target.name:
            warnings.append(f"{source} was written by {manifest.settings['model']}, and the target is {target.name}")
        elif manifest.settings["model_sha256"] != model_digest(target.path):
            warnings.append(f"{source} was written by another {target.name} than {target.path}: their files differ")
        rows, template = open_rows(str(directory / DATA)), Template(target)
    else:
        rows, template = open_rows(source), Template(target, system, enable_thinking)
    good, malformed = good_rows(rows, template.check)
    if not directory.is_dir():
        chat = _kind(rows[good[0]]) in (_MESSAGES, _TURN)
        enable_thinking = thinking_mode(target, enable_thinking) if chat else None
    return Documents(rows, good, template.document, (*warnings, *malformed), enable_thinking)
