"""Every loss against its definition in float64, and the sum over chunks of slots against all logits at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_case import TARGET
from tiny import random_module

from jetspec_jax.config import TargetConfig
from jetspec_jax.path_tree import ParentTerm
from jetspec_jax.target import TargetModel
from train.chunked import Lessons, Student, automatic_chunk, chunked_loss
from train.losses import LOSSES, check_loss

pytestmark = pytest.mark.usefixtures("compile_quickly")

WORDS = 50
RNG = np.random.default_rng(0)
STUDENT, TEACHER = (RNG.normal(scale=3, size=(2, 6, WORDS)).astype(np.float32) for _ in range(2))
TRUTH = RNG.integers(0, WORDS, (2, 6)).astype(np.int32)


def softmax(logits, temperature):
    shifted = logits.astype(np.float64) / temperature
    weights = np.exp(shifted - shifted.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def defined(name, student, teacher, truth, temperature):
    """The losses as their definitions read, float64."""
    q, p = softmax(student, temperature), softmax(teacher, temperature)
    if name == "sft":
        return -np.log(np.take_along_axis(q, truth[..., None], axis=-1))[..., 0]
    alpha = np.minimum(p, q).sum(axis=-1)
    return {
        "forward_kl": temperature**2 * (p * np.log(p / q)).sum(axis=-1),
        "reverse_kl": temperature**2 * (q * np.log(q / p)).sum(axis=-1),
        "total_variation": 1 - alpha,
        "log_acceptance": -np.log(alpha),
    }[name]


@functools.partial(jax.jit, static_argnums=(0, 4))
def sloped(name, student, teacher, truth, temperature):
    """The losses and the gradient of each with respect to its own student."""
    value, pull = jax.vjp(lambda student: LOSSES[name](student, teacher, truth, temperature), student)
    return value, pull(jnp.ones_like(value))[0]


CASES = [(name, t) for name in LOSSES for t in (1.0, 2.0) if name != "sft" or t == 1]


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_a_loss_and_its_gradient_are_those_of_its_definition(name, temperature):
    """The value to float32's precision; the gradient against central differences of the float64 definition."""
    value, gradient = sloped(name, STUDENT, TEACHER, TRUTH, temperature)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, defined(name, STUDENT, TEACHER, TRUTH, temperature), rtol=1e-5)
    step = 1e-5
    for word in range(WORDS):
        high, low = STUDENT.astype(np.float64), STUDENT.astype(np.float64)
        high[..., word] += step
        low[..., word] -= step
        change = [defined(name, moved, TEACHER, TRUTH, temperature) for moved in (high, low)]
        np.testing.assert_allclose(gradient[..., word], (change[0] - change[1]) / (2 * step), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
def test_a_student_that_is_its_teacher_is_at_the_minimum(name):
    """No loss but rounding's, and no gradient."""
    value, gradient = sloped(name, TEACHER, TEACHER, TRUTH, 1.0)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "want", "slope"),
    [
        ("forward_kl", 200, 1),
        ("reverse_kl", 200, 0),
        ("sft", 200, 1),
        ("total_variation", 1, 0),
        ("log_acceptance", 200 - np.log(2), 0.5),
    ],
)
def test_distributions_that_share_nothing_have_finite_losses_and_gradients(name, want, slope):
    """Two words 200 nats apart the other way round, where probabilities are 0 in float32. The losses that average over
    the student's own words have no gradient there; the others have."""
    student, teacher = np.array([[200, 0]], np.float32), np.array([[0, 200]], np.float32)
    value, gradient = sloped(name, student, teacher, np.array([1]), 1.0)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[slope, -slope]], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "temperature", "message"),
    [("hinge", 1.0, "unknown loss 'hinge'.*forward_kl"), ("sft", 2.0, "no temperature"), ("sft", 0.0, "above 0")],
)
def test_a_loss_that_cannot_be_is_refused(name, temperature, message):
    """With the names there are, or the field to change."""
    with pytest.raises(ValueError, match=message):
        check_loss(name, temperature)
    check_loss("forward_kl", 2.0)


# In chunks.

ROWS, SLOTS, LENGTH = 2, 10, 7


def hidden_case(dtype=np.float32, rank=0):
    """A student, a teacher's hidden states and lessons; row 0 has two supervised slots, row 1 all but one."""
    rng = np.random.default_rng(1)
    term = None
    if rank:
        new = lambda _, rngs: ParentTerm(TARGET.vocab_size, rank, rngs=rngs, dtype=jnp.float32)  # noqa: E731
        term = jax.tree.map(lambda x: x.astype(dtype), random_module(new, None, 2))
    states = [jnp.asarray(rng.normal(size=(ROWS, n, TARGET.hidden_size)), dtype) for n in (SLOTS, LENGTH)]
    draw = lambda high: rng.integers(0, high, (ROWS, SLOTS)).astype(np.int32)  # noqa: E731
    weights = np.zeros((ROWS, SLOTS), np.float32)
    weights[0, [3, 8]] = 0.5, 2
    weights[1, np.arange(SLOTS) != 4] = rng.uniform(0.1, 1, SLOTS - 1)
    lessons = Lessons(draw(LENGTH), draw(TARGET.vocab_size), draw(6), weights)  # slots share parents
    return Student(states[0], term), states[1], lessons


@functools.partial(jax.jit, static_argnums=(4, 5))
@functools.partial(jax.value_and_grad, has_aux=True)
def plainly(student, target, teacher, lessons, name, temperature):
    """The loss, both argmaxes, and the gradient, with all logits at once."""
    taught = target.logits(teacher[jnp.arange(ROWS)[:, None], lessons.source])
    drafted = target.logits(student.hidden)
    if student.term is not None:
        drafted = drafted + student.term.embed.weight[...][lessons.parent] @ student.term.unembed.weight[...].T
    losses = LOSSES[name](drafted, taught, lessons.truth, temperature)
    return jnp.sum(losses * lessons.weights), (jnp.argmax(drafted, -1), jnp.argmax(taught, -1))


@pytest.mark.parametrize(
    ("chunk", "name", "tied", "rank"),
    [
        (1, "forward_kl", False, 0), (1, "forward_kl", True, 3), (4, "log_acceptance", False, 3),
        (4, "log_acceptance", True, 0), (16, "sft", False, 0), (16, "sft", True, 3), (3, "reverse_kl", False, 3),
        (4, "total_variation", False, 3),
    ],
)  # fmt: skip
def test_chunks_give_the_loss_and_gradient_of_all_logits_at_once(chunk, name, tied, rank):
    """With chunks that do and do not divide the slots, and slots without weight, which guess nothing."""
    fields = {**TARGET.__dict__, "tie_word_embeddings": tied}
    target = random_module(TargetModel, TargetConfig(**fields), 0)
    student, teacher, lessons = hidden_case(rank=rank)
    (want, arguments), slope = plainly(student, target, teacher, lessons, name, 1.0)

    def chunked(student, target):
        results = chunked_loss(student, target, teacher, lessons, name, 1.0, chunk)
        return 3 * results.loss, results

    (value, results), (gradient, frozen) = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True))(student, target)
    np.testing.assert_allclose(value, 3 * want, rtol=1e-5)
    for have, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(have, 3 * plain, atol=1e-5)
        assert np.any(have != 0)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(frozen))
    for have, argument in zip((results.guess, results.best), arguments, strict=True):
        assert np.array_equal(have, np.where(lessons.weights > 0, argument, -1))
    without = chunked_loss(student, target, teacher, lessons, name, 1.0, chunk)  # not differentiated
    np.testing.assert_allclose(without.loss, want, rtol=1e-5)
    assert np.array_equal(without.guess, results.guess)


def test_chunks_of_slots_without_weight_are_not_computed():
    """What is in them does not matter: four supervised slots fill two chunks, and no other is read."""
    target = random_module(TargetModel, TARGET, 0)
    student, teacher, lessons = hidden_case()
    lessons = lessons._replace(weights=np.isin(np.arange(SLOTS), [1, 2, 6, 9])[None].repeat(ROWS, 0).astype(np.float32))
    poisoned = Student(jnp.where(lessons.weights[..., None] > 0, student.hidden, jnp.nan), None)
    total = jax.jit(jax.value_and_grad(lambda x: chunked_loss(x, target, teacher, lessons, "forward_kl", 1.0, 2).loss))
    value, gradient = total(poisoned)
    np.testing.assert_allclose(value, total(student)[0], rtol=1e-6)
    assert np.array_equal(np.any(gradient.hidden != 0, axis=-1), lessons.weights > 0)


def test_bfloat16_states_have_their_loss_in_float32():
    """Equal, to float32's precision, to the loss of the same rounded numbers computed in float32."""
    target = random_module(TargetModel, TARGET, 0)
    student, teacher, lessons = hidden_case(jnp.bfloat16, rank=3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    chunked = jax.jit(jax.value_and_grad(lambda x: chunked_loss(x, half, teacher, lessons, "forward_kl", 1.0, 4).loss))
    value, gradient = chunked(student)
    student, full, teacher = jax.tree.map(lambda x: x.astype(jnp.float32), (student, half, teacher))
    (want, _), slope = plainly(student, full, teacher, lessons, "forward_kl", 1.0)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for have, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        assert have.dtype == jnp.bfloat16
        np.testing.assert_allclose(have.astype(np.float32), plain, atol=0.01 * np.abs(plain).max())


def test_the_automatic_chunk_follows_the_vocabulary_and_the_rows():
    """A power of two: half the chunk for twice the words or rows, never below 16 nor above an eighth of the slots."""
    assert automatic_chunk(151_936, 1, 4096) == 256
    assert automatic_chunk(2 * 151_936, 1, 4096) == automatic_chunk(151_936, 2, 4096) == 128
    assert automatic_chunk(151_936, 100, 4096) == 16
    assert automatic_chunk(1024, 1, 4096) == 512
    assert automatic_chunk(1024, 16, 128) == automatic_chunk(1024, 16, 5) == 16
