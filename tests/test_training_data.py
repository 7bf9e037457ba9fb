"""Documents to batches, and files to documents."""

import json

import numpy as np
import pytest

from train import distill
from train.data import bucketed_batches, document, pad_batch


def numbered(index):
    """Document `index`: of 1 + index tokens, each its number."""
    return document([index] * (1 + index // 2), [index] * (index - index // 2))


def batches(count, seed, *, documents=64, length=40):
    """The first `count` batches of 4."""
    stream = bucketed_batches(documents, numbered, length=length, batch_size=4, seed=seed)
    return [next(stream) for _ in range(count)]


def test_batches_are_the_same_for_a_seed_and_others_for_another():
    """Every array of every batch, beyond one epoch too."""
    same = lambda one, other: all(np.array_equal(a, b) for x, y in zip(one, other) for a, b in zip(x, y))  # noqa: E731
    first = batches(20, 5)
    assert same(first, batches(20, 5))
    assert not same(first, batches(20, 6))


def test_every_document_comes_once_an_epoch_and_epochs_differ():
    """64 documents in batches of 4 are an epoch in 16 batches."""
    rows = np.array([batch.tokens[:, 0] for batch in batches(32, 0)])
    assert sorted(rows[:16].ravel()) == sorted(rows[16:].ravel()) == list(range(64))
    assert not np.array_equal(rows[:16], rows[16:])


def test_rows_hold_a_document_and_marked_padding():
    """A batch is as wide as its longest document, rounded up to 32 and cut at the length asked for."""
    for batch in batches(16, 1):
        numbers = batch.tokens[:, 0]
        sizes = np.minimum(numbers + 1, 40)
        width = batch.tokens.shape[1]
        assert width == min(40, -(-(numbers.max() + 1) // 32) * 32)
        inside = np.arange(width) < sizes[:, None]
        assert np.array_equal(batch.documents, inside)
        assert np.array_equal(batch.tokens, np.where(inside, numbers[:, None], 0))
        assert np.array_equal(batch.response, inside & (np.arange(width) > numbers[:, None] // 2))
        assert np.array_equal(batch.positions, np.tile(np.arange(width), (4, 1)))


def test_like_lengths_meet():
    """A window of 16 batches is sorted by length, so that little is padded, and its batches come in any order."""
    firsts = [batch.tokens[:, 0].min() for batch in batches(16, 2) if np.ptp(batch.tokens[:, 0]) == 3]
    assert sorted(firsts) == list(range(0, 64, 4)) != firsts


def test_a_document_longer_than_the_length_is_cut_there():
    """The first tokens stay, with their flags."""
    batch = pad_batch([numbered(30), numbered(3)], 20)
    assert batch.tokens.shape == (2, 20)
    assert batch.documents[0].all() and batch.response[0, 16:].all() and not batch.response[0, :16].any()
    assert batch.documents[1].sum() == 4


GOOD = {"prompt_ids": [1, 2], "token_ids": [3]}


def test_documents_are_read_in_order(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (GOOD, {"prompt_ids": [], "token_ids": [4, 5]})))
    first, second = distill.read_documents(str(path), 64)
    assert first["tokens"].tolist() == [1, 2, 3] and first["response"].tolist() == [False, False, True]
    assert second["tokens"].tolist() == [4, 5] and second["response"].tolist() == [True, True]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1, 2]",
        "7",
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [1], "token_ids": 3}',
        '{"prompt_ids": [1], "token_ids": null}',
        '{"prompt_ids": "some text", "token_ids": [1]}',
        '{"prompt_ids": [[1]], "token_ids": [1]}',
        '{"prompt_ids": [1.5], "token_ids": [1]}',
        '{"prompt_ids": [1099511627776], "token_ids": [1]}',
    ],
)
def test_a_line_that_is_no_document_is_named_with_its_file(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(ValueError, match=r"data\.jsonl:2: expected prompt_ids and token_ids"):
        distill.read_documents(str(path), 64)


def test_a_file_without_documents_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match=r"data\.jsonl holds no documents"):
        distill.read_documents(str(path), 64)
