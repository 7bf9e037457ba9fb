"""Documents to batches by grain: shuffled, sharded, packed; the same for a seed, and resumable at every batch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import grain
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WINDOW = 16  # batches that are sorted by length together
_BINS = 64  # least number of rows that are packed together: more leave less padding, and are read again at a resume
_READ_AHEAD = 64  # documents; one thread, since tokenizers must not be used by two


class Document(TypedDict):
    """One document: `tokens` int32 `[T]`, and `response` bool `[T]`, true for the tokens that are learnt."""

    tokens: np.ndarray
    response: np.ndarray


class DocumentSource(Protocol):
    """Documents at random access, such as `train.sources.Documents` or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Document: ...


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


def packed_batches(
    documents: DocumentSource,
    *,
    length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Packed]:
    """Endless batches of `batch_size` rows of `length` tokens, several documents a row where they fit.

    Every epoch is one shuffle of all documents, of which each process takes every `process_count`-th: shards are
    disjoint and together cover the epoch. Documents are cut at `length`, never split over rows; one that has nothing
    to learn within `length` is left out.

    The iterator has `get_state()` and `set_state()`: after the latter the next batch is bit-equal to what it would
    have been. Orbax keeps it by `grain.checkpoint.CheckpointSave` and `CheckpointRestore`, a file a process. A state
    fits the arguments that it was made with.

    Raises:
        ValueError: there are fewer documents than processes; or, from `next`, no document has anything to learn.
    """
    rows = grain.experimental.BestFitPackIterDataset(
        _shard(documents, length, seed, process_index, process_count),
        length_struct={"tokens": length, "response": length},
        num_packing_bins=max(_BINS, batch_size),
        seed=seed,
    )
    return iter(rows.map(_as_packed).batch(batch_size, batch_fn=_stack))


def bucketed_batches(
    documents: DocumentSource,
    *,
    length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Packed]:
    """Endless batches of `batch_size` documents, one a row; all else as for `packed_batches`.

    A window of batches is sorted by length, so that rows of about the same length meet and little is padded; a
    batch's width is its longest document's, rounded up to a multiple of 32 (each width compiles once); with several
    processes, whose rows are parts of one batch, it is always `length`. Where documents are short this is faster than
    packing, since no block is held against the documents beside its own.
    """
    least = 0 if process_count == 1 else length
    rows = _shard(documents, length, seed, process_index, process_count)
    return iter(_LikeLengths(rows, batch_size, seed).map(lambda batch: pad_batch(batch, length, least)))


def _shard(
    documents: DocumentSource, length: int, seed: int, process_index: int, process_count: int
) -> grain.IterDataset[Document]:
    """A process's documents, shuffled, endless, cut at `length`."""
    if len(documents) < process_count:
        raise ValueError(f"{len(documents)} documents cannot be shared by {process_count} processes; use fewer")
    shard = grain.MapDataset.source(documents).seed(seed).shuffle()[process_index::process_count]
    rows = shard.repeat().to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_READ_AHEAD))
    return rows.map(lambda row: {name: values[:length] for name, values in row.items()}).filter(_Learnable(len(shard)))


class _Learnable(grain.transforms.Filter):
    """Keeps documents in which a block can be anchored; an epoch without any is an error, not an endless search."""

    def __init__(self, epoch: int):
        self._epoch, self._refused = epoch, 0

    def filter(self, row: Document) -> bool:
        """Whether some response token is followed by another."""
        kept = bool((row["response"][:-1] & row["response"][1:]).any())
        self._refused = 0 if kept else self._refused + 1
        if self._refused > 2 * self._epoch:  # the end of one epoch and the beginning of the next may be all the others
            raise ValueError(
                f"none of {self._epoch} documents has a response token within the row length; raise --config.length"
            )
        return kept


def _as_packed(row: dict[str, np.ndarray]) -> Packed:
    """A row as grain packs it, whose segments count from 1."""
    return Packed(row["tokens"], row["tokens_positions"], row["tokens_segment_ids"], row["response"])


def _stack(rows: list[Packed]) -> Packed:
    return Packed(*map(np.stack, zip(*rows, strict=True)))


class _LikeLengths(grain.IterDataset[list[Document]]):
    """Groups of `size` documents of like length: windows of `_WINDOW` groups are sorted, and their groups shuffled."""

    def __init__(self, parent: grain.IterDataset[Document], size: int, seed: int):
        super().__init__(parent)
        self._size, self._seed = size, seed

    def __iter__(self) -> grain.DatasetIterator[list[Document]]:
        return _LikeLengthsIterator(iter(self._parent), self._size, self._seed)


class _LikeLengthsIterator(grain.DatasetIterator[list[Document]]):
    """The state is the window's number, the parent's state at its beginning, and the place in it."""

    def __init__(self, parent: grain.DatasetIterator[Document], size: int, seed: int):
        super().__init__(parent)
        self._size, self._seed = size, seed
        self._state = {"parent": parent.get_state(), "window": 0, "next": 0}
        self._groups: list[list[Document]] | None = None

    def __next__(self) -> list[Document]:
        if self._groups is None:
            window = sorted(itertools.islice(self._parent, _WINDOW * self._size), key=lambda row: len(row["tokens"]))
            order = np.random.default_rng((self._seed, self._state["window"])).permutation(_WINDOW)
            self._groups = [window[i * self._size : (i + 1) * self._size] for i in order]
        group = self._groups[self._state["next"]]
        self._state["next"] += 1
        if self._state["next"] == _WINDOW:
            self._state = {"parent": self._parent.get_state(), "window": self._state["window"] + 1, "next": 0}
            self._groups = None
        return group

    def get_state(self) -> dict[str, Any]:
        return dict(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._state, self._groups = dict(state), None


def pad_batch(rows: list[Document], length: int, least: int = 0) -> Packed:
    """The documents, cut at `length`, as one batch with a document a row, `least` tokens wide or more."""
    width = max(least, min(length, -(-max(len(row["tokens"]) for row in rows) // 32) * 32))
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
