"""Documents to batches: shuffled by grain, grouped by length, deterministic by seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import grain
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOW = 16  # batches that are sorted by length together


class Document(TypedDict):
    """One document: `tokens` int32 `[T]`, and `response` bool `[T]`, true for the answer's own tokens."""

    tokens: np.ndarray
    response: np.ndarray


class Packed(NamedTuple):
    """A batch of documents side by side in rows, each array `[B, L]`, of NumPy or JAX.

    tokens: int32; 0 where padded.
    positions: int32, from 0 in every document.
    documents: int32, from 1 in every row; 0 is padding.
    response: bool, tokens that the assistant wrote (its end-of-turn token included).
    """

    tokens: Any
    positions: Any
    documents: Any
    response: Any


def chat_document(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Document:
    """A one-turn conversation in the tokenizer's chat template."""
    user = [{"role": "user", "content": prompt}]
    text = str(tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False))
    reply = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return document(tokenizer.encode(text, add_special_tokens=False), reply)


def document(prompt_ids: list[int], answer_ids: list[int]) -> Document:
    """A document of prompt tokens followed by answer tokens."""
    response = np.arange(len(prompt_ids) + len(answer_ids)) >= len(prompt_ids)
    return {"tokens": np.asarray([*prompt_ids, *answer_ids], np.int32), "response": response}


def bucketed_batches(
    count: int, get: Callable[[int], Document], *, length: int, batch_size: int, seed: int
) -> Iterator[Packed]:
    """Endless batches of documents `get(0) .. get(count - 1)`, one a row, reshuffled every epoch.

    A window of batches is sorted by length, so that rows of about the same length meet and little is padded; a
    batch's width is its longest document's, rounded up to a multiple of 32 (each width compiles once). Longer ones
    are cut at `length`.
    """
    documents = iter(grain.MapDataset.range(count).seed(seed).shuffle().repeat().map(get).to_iter_dataset())
    order = np.random.default_rng(seed)
    while True:
        window = sorted(itertools.islice(documents, _WINDOW * batch_size), key=lambda d: len(d["tokens"]))
        batches = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        for index in order.permutation(len(batches)):
            yield pad_batch(batches[index], length)


def pad_batch(rows: list[Document], length: int) -> Packed:
    """The documents, cut at `length`, as one batch with a document a row."""
    width = min(length, -(-max(len(row["tokens"]) for row in rows) // 32) * 32)
    batch = Packed(
        np.zeros((len(rows), width), np.int32),
        np.tile(np.arange(width, dtype=np.int32), (len(rows), 1)),
        np.zeros((len(rows), width), np.int32),
        np.zeros((len(rows), width), bool),
    )
    for i, row in enumerate(rows):
        size = min(width, len(row["tokens"]))
        batch.tokens[i, :size] = row["tokens"][:size]
        batch.documents[i, :size] = 1
        batch.response[i, :size] = row["response"][:size]
    return batch
