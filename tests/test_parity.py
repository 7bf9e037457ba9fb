"""Agreement with transformers, architecture by architecture; `fixtures/make_parity.py` says what the arrays are."""

import functools
import json
import pathlib

import golden_helpers as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache import KVCache
from jetspec_jax.checkpoint import hf_tensors, load_target_model, save_target
from kernels.pallas.tree_attention import causal_mask

PARITY = pathlib.Path(__file__).parent / "fixtures" / "parity"
CASES = sorted(path.stem for path in PARITY.glob("*.npz"))


@functools.cache
def case(name):
    with np.load(PARITY / f"{name}.npz") as data:
        return load_target_model(PARITY / name, jnp.float32), dict(data)


@jax.jit
def forward(model, tokens):
    nodes, layers = len(tokens), len(model.model.layers)
    positions, empty = jnp.arange(nodes, dtype=jnp.int32)[None], KVCache.zeros(model.config, 1, 1, jnp.float32)
    out = model(tokens[None], positions, empty, jnp.zeros(1, jnp.int32), causal_mask(nodes), tuple(range(layers)))
    return model.logits(out.hidden)[0], jnp.stack(jnp.split(out.taps[0], layers, axis=-1))


def test_there_are_fixtures():
    """An empty folder would pass everything below."""
    assert len(CASES) == 7


@pytest.mark.parametrize("name", CASES)
def test_every_layers_output_and_the_logits_are_transformers(name):
    """Dense, tied, biased, YaRN, Llama and its scaling, experts with and without tokens, mixed layers."""
    model, data = case(name)
    logits, layers = forward(model, data["tokens"])
    np.testing.assert_allclose(layers, data["layers"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, data["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_transformers(name):
    """48 tokens after two prompts of different lengths in one batch."""
    model, data = case(name)
    prompts = [ids[:n].tolist() for ids, n in zip(data["prompts"], data["prompt_lengths"], strict=True)]
    rows = golden.generate(model, None, prompts, [48] * len(prompts), golden.PLAIN)
    assert [row.tokens for row in rows] == data["greedy"].tolist()
    assert data["greedy_gap"].min() > 2e-4, "no choice is within rounding of another"


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_transformers_is_written_back_to_the_byte(tmp_path, name):
    """The same tensors under the same names, and a config that means the same and names the architecture."""
    model = load_target_model(PARITY / name, None)
    save_target(tmp_path, model)
    assert load_target_model(tmp_path, None).config == model.config
    stored, written = (hf_tensors(load_target_model(path, None)) for path in (PARITY / name, tmp_path))
    assert stored.keys() == written.keys()
    for key, value in stored.items():
        assert value.dtype == jnp.bfloat16
        assert np.asarray(value).tobytes() == np.asarray(written[key]).tobytes()
    configs = [json.loads((path / "config.json").read_text()) for path in (PARITY / name, tmp_path)]
    for field in ("architectures", "model_type", "head_dim", "attention_bias", "tie_word_embeddings"):
        assert configs[0].get(field) == configs[1][field], field
