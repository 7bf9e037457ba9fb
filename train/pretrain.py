"""`python -m train.pretrain --config configs/tiny_target.py`: trains the small target that ships with the project."""

from __future__ import annotations

import functools
import json
import pathlib
import sys
import time

import grain
import jax
import jax.numpy as jnp
import optax
from absl import app
from flax import nnx
from ml_collections import config_flags
from transformers import PreTrainedTokenizerBase

from jetspec_jax.checkpoint import save_target
from jetspec_jax.config import TargetConfig
from jetspec_jax.target import TargetModel
from train.command import given_config, parse_flags
from train.config import PretrainConfig, check_positive
from train.data import Document, Packed, bucketed_batches, chat_document
from train.files import locked
from train.optimizer import make_optimizer
from train.packed import target_forward
from train.tasks import problems
from train.tokenizer import train_tokenizer

_TOKENIZER_PROBLEMS = 4000


def next_token_loss(model: TargetModel, batch: Packed, prompt_weight: float) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of each document's next token, and the share of answer tokens that are the argmax.

    Answer tokens weigh 1, others `prompt_weight`; the first token of a document and padding weigh nothing.
    """
    logits = model.logits(target_forward(model, batch).hidden[:, :-1])
    labels, response = batch.tokens[:, 1:], batch.response[:, 1:]
    inside = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] > 0)
    weights = jnp.where(inside, jnp.where(response, 1.0, prompt_weight), 0.0)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    answered = response & inside
    right = jnp.sum((jnp.argmax(logits, -1) == labels) & answered) / jnp.maximum(jnp.sum(answered), 1)
    return jnp.sum(loss * weights) / jnp.maximum(jnp.sum(weights), 1e-6), right


@functools.partial(jax.jit, static_argnames=("optimizer", "prompt_weight"), donate_argnames=("model", "state"))
def train_step(model, state, batch: Packed, *, optimizer: optax.GradientTransformation, prompt_weight: float):
    """One step: the updated model and optimizer state, the loss and the argmax share (see `next_token_loss`)."""
    (loss, right), grads = jax.value_and_grad(next_token_loss, has_aux=True)(model, batch, prompt_weight)
    updates, state = optimizer.update(grads, state, model)
    return optax.apply_updates(model, updates), state, loss, right


def training_documents(config: PretrainConfig, tokenizer: PreTrainedTokenizerBase, index: int) -> Document:
    """Training document `index`, made on the fly: a problem of the training split in chat form."""
    problem = next(problems(config.seed * 1_000_003 + index, split="train"))
    return chat_document(tokenizer, problem.prompt, problem.answer)


def pretrain(config: PretrainConfig) -> pathlib.Path:
    """Trains the tokenizer and the target that `config` describes; returns the checkpoint's directory.

    Raises:
        ValueError: a field is out of range, or the directory holds a model or is in use.
    """
    check_positive(config, "steps", "batch_size", "length", "documents", "log_every")
    out = pathlib.Path(config.out).expanduser()
    if (out / "config.json").exists():
        raise ValueError(f"{out} already holds a model; give another --config.out")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        _pretrain(config, out)
    return out


def _pretrain(config: PretrainConfig, out: pathlib.Path) -> None:
    stream = problems(config.seed, split="train")
    texts = (text for _ in range(_TOKENIZER_PROBLEMS) for p in [next(stream)] for text in (p.prompt, p.answer))
    tokenizer = train_tokenizer(texts, config.vocab_size)
    architecture = TargetConfig(
        tie_word_embeddings=True,
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "max_position_embeddings",
                "rope_theta",
            )
        },
    )
    model = TargetModel(architecture, rngs=nnx.Rngs(config.seed))
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = optimizer.init(model)
    documents = grain.MapDataset.range(config.documents)
    batches = bucketed_batches(
        documents.map(functools.partial(training_documents, config, tokenizer)),
        length=config.length,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    start, seen = time.perf_counter(), 0
    with open(out / "log.jsonl", "w") as log:
        for step, batch in zip(range(1, config.steps + 1), batches, strict=False):
            seen += int((batch.documents > 0).sum())
            model, state, loss, right = train_step(
                model, state, batch, optimizer=optimizer, prompt_weight=config.prompt_weight
            )
            if step % config.log_every == 0 or step == config.steps:
                line = {
                    "step": step,
                    "tokens": seen,
                    "loss": round(float(loss), 4),
                    "answer_accuracy": round(float(right), 4),
                    "seconds": round(time.perf_counter() - start),
                }
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
    save_target(out, model, eos_token_ids=(tokenizer.eos_token_id,), tokenizer=tokenizer)


def main(argv: list[str]) -> None:
    """The command."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        out = pretrain(given_config(PretrainConfig))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"saved {out}")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", "configs/tiny_target.py", "Config file with get_config().")
    app.run(main, flags_parser=parse_flags)
