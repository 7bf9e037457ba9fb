"""Losses of logits that are never held at once: slots go to the vocabulary and back a chunk at a time.

The gradient with respect to a chunk's hidden states is taken while its logits are there, in the forward pass: no logits
are kept for the backward pass and none are computed twice. Slots without weight come last and whole chunks of them are
left out.

Axis letters: B rows, N slots of a row, C slots of a chunk, L row length, E features, V vocabulary, K parent_rank.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jetspec_jax.ops import argmax, project
from jetspec_jax.path_tree import ParentTerm
from jetspec_jax.sharding import constrain
from jetspec_jax.target import TargetModel
from train.losses import LOSSES

_CHUNK_BYTES = 160 * 2**20  # of one chunk's float32 logits; up to six such arrays are alive at the peak


class Lessons(NamedTuple):
    """What slots are held against, each `[B, N]` (or with N as several axes).

    source: int32, the place in the row whose hidden state gives the slot's teacher.
    truth: int32, the token that the text has after that place.
    parent: int32, the token that the text has at that place: the parent of the slot's token.
    weights: float32; a slot of weight 0 is not computed.
    """

    source: jax.Array
    truth: jax.Array
    parent: jax.Array
    weights: jax.Array


class SlotResults(NamedTuple):
    """loss: float32, the weighted sum of all slots' losses. guess, best: int32 `[B, N]`, the student's and the
    teacher's argmax; -1 in slots of weight 0."""

    loss: jax.Array
    guess: jax.Array
    best: jax.Array


def automatic_chunk(vocab_size: int, rows: int, slots: int) -> int:
    """How many of a row's `slots` make a chunk, of `rows` rows and `vocab_size` words on a device: a power of two, at
    least 16.

    At most an eighth of the slots, so that those without weight fill chunks that can be left out.
    """
    fitting = min(_CHUNK_BYTES // (4 * vocab_size * rows), slots // 8)
    return max(16, 1 << max(fitting, 1).bit_length() - 1)


class Student(NamedTuple):
    """What has a gradient, or that gradient.

    hidden: `[B, N, E]`, the head's final hidden states.
    term: what parent tokens add to the logits; None is nothing.
    """

    hidden: jax.Array
    term: ParentTerm | None


@functools.partial(jax.custom_vjp, nondiff_argnames=("loss", "temperature", "chunk"))
def chunked_loss(
    student: Student,
    target: TargetModel,
    teacher: jax.Array,
    lessons: Lessons,
    loss: str,
    temperature: float,
    chunk: int,
) -> SlotResults:
    """The weighted sum of losses between the logits of `student` and of `teacher` `[B, L, E]`.

    Only `student` has a gradient: the target is frozen. Losses and their gradients with respect to logits are float32;
    the latter are rounded to lm_head's dtype for the product with it, which sums in float32. The term's gradient is
    computed and summed in float32.

    Args:
        loss: a name of `train.losses.LOSSES`.
        chunk: slots of each row at a time.
    """
    return _walk(student, target, teacher, lessons, loss, temperature, chunk, with_gradient=False)[0]


def _walk(
    student: Student,
    target: TargetModel,
    teacher: jax.Array,
    lessons: Lessons,
    loss: str,
    temperature: float,
    chunk: int,
    with_gradient: bool,
) -> tuple[SlotResults, Student | None]:
    """The results and the gradient with respect to `student`, if asked for."""
    slots = student.hidden.shape[1]
    chunk = min(chunk, slots)
    # Its features are split for memory: gathered here, once, and not by every chunk.
    words = constrain(target.unembedding, "vocab", None)
    supervised = lessons.weights > 0
    order = jnp.argsort(~supervised, axis=1, stable=True)
    # Places past the last slot are read as the last one without weight, and not written.
    order = jnp.pad(order, ((0, 0), (0, -slots % chunk)), constant_values=slots)
    chunks = (jnp.max(jnp.sum(supervised, axis=1)) + chunk - 1) // chunk

    def step(index: jax.Array, carry: tuple[SlotResults, Student | None]) -> tuple[SlotResults, Student | None]:
        results, gradient = carry
        places = jax.lax.dynamic_slice_in_dim(order, index * chunk, chunk, axis=1)
        part = jax.tree.map(lambda x: _take(x, places), lessons)
        part = part._replace(weights=jnp.where(places < slots, part.weights, 0.0))
        value, guess, best, pulled = _chunk(
            student._replace(hidden=_take(student.hidden, places)),
            words,
            _take(teacher, part.source),
            part,
            loss,
            temperature,
            with_gradient,
        )
        results = SlotResults(
            results.loss + value,
            _put(results.guess, places, jnp.where(part.weights > 0, guess, -1)),
            _put(results.best, places, jnp.where(part.weights > 0, best, -1)),
        )
        if gradient is None or pulled is None:
            return results, None
        hidden = _put(gradient.hidden, places, pulled.hidden)
        return results, Student(hidden, jax.tree.map(jnp.add, gradient.term, pulled.term))

    nothing = jnp.full(lessons.source.shape, -1, jnp.int32)
    start = SlotResults(jnp.zeros((), jnp.float32), nothing, nothing)
    zero = Student(
        jnp.zeros_like(student.hidden), jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), student.term)
    )
    with jax.named_scope("logits"):
        return jax.lax.fori_loop(0, chunks, step, (start, zero if with_gradient else None))


def _chunk(
    student: Student,
    words: jax.Array,
    teacher: jax.Array,
    lessons: Lessons,
    loss: str,
    temperature: float,
    with_gradient: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, Student | None]:
    """Loss, both argmaxes `[B, C]`, and the gradient of one chunk of hidden states `[B, C, E]`.

    words: lm_head's weight `[V, E]`.
    """
    to_words = lambda x: constrain(project(x, words, jnp.dtype(jnp.float32)), "batch", None, "vocab")  # noqa: E731
    taught, drafted = to_words(teacher), to_words(student.hidden.astype(words.dtype))
    if student.term is not None:
        drafted = drafted + student.term(lessons.parent)

    def total(logits: jax.Array) -> jax.Array:
        return jnp.sum(LOSSES[loss](logits, taught, lessons.truth, temperature) * lessons.weights)

    if not with_gradient:
        return total(drafted), argmax(drafted), argmax(taught), None
    value, gradient = jax.value_and_grad(total)(drafted)
    pulled = jnp.matmul(gradient.astype(words.dtype), words, preferred_element_type=jnp.float32)
    term = None if student.term is None else _term_gradient(student.term, lessons.parent, gradient)
    return value, argmax(drafted), argmax(taught), Student(pulled.astype(student.hidden.dtype), term)


def _term_gradient(term: ParentTerm, parents: jax.Array, gradient: jax.Array) -> ParentTerm:
    """The gradient of the term's tables, float32, from that of the logits `[B, C, V]` of slots with these parents."""
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), term)
    return jax.vjp(lambda term: term(parents), exact)[1](gradient)[0]


@jax.vmap
def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """`[B, C, ...]` of `values` `[B, N, ...]`; places past the end give the last."""
    return values.at[places].get(mode="clip")


@jax.vmap
def _put(values: jax.Array, places: jax.Array, new: jax.Array) -> jax.Array:
    """`values` with `new` at distinct places; those past the end are dropped."""
    return values.at[places].set(new, mode="drop")


def _forward(student, target, teacher, lessons, loss, temperature, chunk):
    results, gradient = _walk(student, target, teacher, lessons, loss, temperature, chunk, with_gradient=True)
    return results, jax.tree.map(lambda x, of: x.astype(of.dtype), gradient, student)


def _backward(loss, temperature, chunk, gradient, cotangent: SlotResults):
    return jax.tree.map(lambda x: (x.astype(jnp.float32) * cotangent.loss).astype(x.dtype), gradient), None, None, None


chunked_loss.defvjp(_forward, _backward)
