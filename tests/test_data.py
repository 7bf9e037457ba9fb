"""Batches of packed documents: no token lost or doubled, shards apart, and a resume that changes no bit."""

import json

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_module, target_config

from jetspec_jax.target import TargetModel
from train.argmax_share import LOW_ARGMAX_SHARE, argmax_share, low_share_warning
from train.data import Packed, bucketed_batches, document, packed_batches, pad_batch
from train.packed import target_forward

LENGTH, BATCH = 24, 3


def documents_of(sizes):
    """Documents of (prompt, answer) tokens; every token of document i is i + 1, so that rows tell whose it is."""
    return [document([i + 1] * prompt, [i + 1] * answer) for i, (prompt, answer) in enumerate(sizes)]


def some_documents(count=40, seed=0):
    """Prompts and answers of 1 to 12 tokens, so that a document fits a row and most rows hold several."""
    return documents_of(np.random.default_rng(seed).integers(1, 13, (count, 2)))


def take(batches, count):
    return [next(batches) for _ in range(count)]


def equal(one, other):
    return all(np.array_equal(a, b) and a.dtype == b.dtype for x, y in zip(one, other) for a, b in zip(x, y))


def pieces(batch):
    """Every document of a batch: its token, positions and response flags."""
    for tokens, positions, documents, response in zip(*batch):
        for number in range(1, documents.max() + 1):
            at = documents == number
            yield tokens[at], positions[at], response[at]


def test_rows_hold_whole_documents_one_after_the_other():
    """Ids count from 1 in every row, positions from 0 in every document, padding is 0 and comes last, and nothing is
    split: every document is in one piece, with its own flags."""
    sources = some_documents()
    for batch in take(packed_batches(sources, length=LENGTH, batch_size=BATCH, seed=1), 40):
        assert isinstance(batch, Packed)
        assert [x.shape for x in batch] == [(BATCH, LENGTH)] * 4
        assert [x.dtype for x in batch] == [np.int32, np.int32, np.int32, bool]
        for row in batch.documents:
            ids = row[row > 0]
            assert np.all(row[len(ids) :] == 0) and np.all(np.diff(ids) >= 0) and ids[0] == 1
            assert set(ids) == set(range(1, ids.max() + 1))
        padding = batch.documents == 0
        assert not batch.tokens[padding].any() and not batch.response[padding].any()
        for tokens, positions, response in pieces(batch):
            source = sources[tokens[0] - 1]
            assert np.array_equal(tokens, source["tokens"])
            assert np.array_equal(response, source["response"])
            assert np.array_equal(positions, np.arange(len(tokens)))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(2, 30)), min_size=1, max_size=30), st.integers(0, 9))
def test_packing_loses_and_doubles_no_token(sizes, seed):
    """Over whole epochs every document comes equally often, cut at the row length; those without a response token to
    anchor a block at within it never come."""
    documents = documents_of(sizes)
    learnable = {i + 1 for i, (prompt, _) in enumerate(sizes) if prompt < LENGTH - 1}
    batches = packed_batches(documents, length=LENGTH, batch_size=BATCH, seed=seed)
    if not learnable:
        with pytest.raises(ValueError, match=r"none of \d+ documents has a response token .* raise --config\.length"):
            next(batches)
        return
    seen = {number: 0 for number in learnable}
    while min(seen.values()) < 3:
        for tokens, _, _ in pieces(next(batches)):
            assert len(tokens) == min(LENGTH, len(documents[tokens[0] - 1]["tokens"]))
            seen[int(tokens[0])] += 1
    epoch = sum(min(LENGTH, sum(sizes[number - 1])) for number in learnable)
    # Rows leave in shuffled groups of 64, whose documents span a few epochs when there are few.
    assert max(seen.values()) - min(seen.values()) <= 2 + 64 * LENGTH // epoch


def test_shards_are_disjoint_and_cover_every_epoch():
    """192 documents, each as long as a row, and three processes: 64 rows are a process's share of an epoch. Epochs are
    shared out anew."""
    documents = documents_of([(4, LENGTH - 4)] * 192)
    epochs = []
    for index in range(3):
        batches = packed_batches(documents, length=LENGTH, batch_size=4, seed=1, process_index=index, process_count=3)
        epochs.append(np.concatenate([batch.tokens[:, 0] for batch in take(batches, 48)]).reshape(3, 64))
    epochs = np.stack(epochs, axis=1)  # [epoch, process, document]
    for epoch in epochs:
        assert sorted(epoch.ravel()) == list(range(1, 193))
    assert set(epochs[0, 0]) != set(epochs[1, 0])
    assert not np.array_equal(epochs[0, 0], np.sort(epochs[0, 0]))


@pytest.mark.parametrize("kind", [packed_batches, bucketed_batches])
@pytest.mark.parametrize("cut", [0, 1, 7, 16, 21, 22, 50])
def test_a_resumed_iterator_gives_the_same_bits(kind, cut):
    """The state goes through JSON and into a fresh iterator, at cuts inside a group of rows and at its end, in the
    first epoch and later; an iterator that is further on may be set back too."""
    make = lambda: kind(some_documents(), length=LENGTH, batch_size=BATCH, seed=3)  # noqa: E731
    batches = make()
    take(batches, cut)
    state = json.loads(json.dumps(batches.get_state()))
    rest = take(batches, 30)
    resumed = make()
    resumed.set_state(state)
    assert equal(take(resumed, 30), rest)
    batches.set_state(state)
    assert equal(take(batches, 30), rest)


def test_orbax_keeps_the_iterator(tmp_path):
    """Saved and restored by grain's handler within an orbax checkpoint, as a training loop does."""
    make = lambda: packed_batches(some_documents(), length=LENGTH, batch_size=BATCH, seed=3)  # noqa: E731
    batches, resumed = make(), make()
    take(batches, 11)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(11, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(batches)))
        manager.wait_until_finished()
        manager.restore(11, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(resumed)))
    assert equal(take(resumed, 5), take(batches, 5))


@pytest.mark.parametrize("kind", [packed_batches, bucketed_batches])
def test_seeds_and_epochs_differ(kind):
    """Another seed is another order, and so is the next epoch."""
    order = lambda seed: [  # noqa: E731
        int(tokens[0])
        for batch in take(kind(some_documents(48), length=LENGTH, batch_size=BATCH, seed=seed), 40)
        for tokens, _, _ in pieces(batch)
    ]
    one = order(0)
    assert one == order(0) != order(1)
    assert one[:48] != one[48:96]


def test_more_processes_than_documents_is_an_error():
    with pytest.raises(ValueError, match="2 documents cannot be shared by 3 processes"):
        packed_batches(some_documents(2), length=LENGTH, batch_size=1, seed=0, process_count=3)


# One document a row.


def buckets(count, seed, length=40):
    """The first `count` batches of 4 of documents of 2 to 65 tokens; document i has i + 2, each of them i + 1."""
    documents = documents_of([(i // 2, i + 2 - i // 2) for i in range(64)])
    return take(bucketed_batches(documents, length=length, batch_size=4, seed=seed), count)


def test_every_document_has_a_row_once_an_epoch():
    """64 documents in batches of 4 are an epoch in 16 batches."""
    rows = np.array([batch.tokens[:, 0] for batch in buckets(32, 0)])
    assert sorted(rows[:16].ravel()) == sorted(rows[16:].ravel()) == list(range(1, 65))


def test_rows_hold_a_document_and_marked_padding():
    """A batch is as wide as its longest document, rounded up to 32 and cut at the length asked for."""
    for batch in buckets(16, 1):
        numbers = batch.tokens[:, 0] - 1
        sizes = np.minimum(numbers + 2, 40)
        width = batch.tokens.shape[1]
        assert width == min(40, -(-sizes.max() // 32) * 32)
        inside = np.arange(width) < sizes[:, None]
        assert np.array_equal(batch.documents, inside)
        assert np.array_equal(batch.tokens, np.where(inside, numbers[:, None] + 1, 0))
        assert np.array_equal(batch.response, inside & (np.arange(width) >= numbers[:, None] // 2))
        assert np.array_equal(batch.positions, np.tile(np.arange(width), (4, 1)))


def test_like_lengths_meet():
    """A window of 16 batches is sorted by length, so that little is padded, and its batches come in any order."""
    firsts = [batch.tokens[:, 0].min() - 1 for batch in buckets(16, 2, length=80) if np.ptp(batch.tokens[:, 0]) == 3]
    assert sorted(firsts) == list(range(0, 64, 4)) != firsts


def test_a_document_longer_than_the_length_is_cut_there():
    """The first tokens stay, with their flags."""
    batch = pad_batch([document([9] * 16, [9] * 15), document([9], [9] * 3)], 20)
    assert batch.tokens.shape == (2, 20)
    assert batch.documents[0].all() and batch.response[0, 16:].all() and not batch.response[0, :16].any()
    assert batch.documents[1].sum() == 4


# How often the data is what the target would have written.


def test_the_argmax_share_counts_response_tokens_that_are_the_targets_choice():
    """Against a count by hand from the full logits, with documents side by side and padding; the first token of a
    document follows nothing."""
    target = random_module(TargetModel, target_config(40), 0)
    rng = np.random.default_rng(0)
    sizes = [(0, 9), (5, 8), (3, 12)]
    documents = [document(rng.integers(0, 40, p).tolist(), rng.integers(0, 40, a).tolist()) for p, a in sizes]
    batch = next(packed_batches(documents, length=LENGTH, batch_size=2, seed=0))
    logits = jax.jit(lambda target, batch: target.logits(target_forward(target, batch).hidden))
    own = np.argwhere(rng.random(batch.tokens.shape) < 0.3)
    for row, at in own[own[:, 1] > 0]:  # from the front, since later choices depend on earlier tokens
        batch.tokens[row, at] = np.asarray(logits(target, batch)).argmax(-1)[row, at - 1]
    choice = np.asarray(logits(target, batch)).argmax(-1)
    right = total = 0
    for row, at in np.ndindex(*batch.tokens.shape):
        if at and batch.response[row, at] and batch.documents[row, at] == batch.documents[row, at - 1]:
            total += 1
            right += int(choice[row, at - 1] == batch.tokens[row, at])
    assert 0 < right < total
    assert argmax_share(target, [batch, batch]) == right / total
    assert argmax_share(target, []) == 0


def test_a_low_share_is_a_warning_that_says_what_to_do():
    assert low_share_warning(1.0) is None and low_share_warning(LOW_ARGMAX_SHARE) is None
    assert "only 40% of the response tokens" in low_share_warning(0.4)
    assert "python -m train.regenerate" in low_share_warning(0.4)


def test_rows_of_several_processes_have_one_width():
    """They are parts of one batch, and no process knows the lengths of another's documents."""
    for index in range(2):
        batches = bucketed_batches(
            some_documents(40), length=160, batch_size=2, seed=0, process_index=index, process_count=2
        )
        assert {next(batches).tokens.shape for _ in range(20)} == {(2, 160)}
