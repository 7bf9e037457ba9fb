"""Agreement with transformers as it is installed, where PyTorch is: on inputs that no fixture holds.

`pip install torch==2.13.0` and `make test-torch`; `test_parity.py` needs neither.
"""

import numpy as np
import pytest
from test_parity import CASES, PARITY, case, forward

import jetspec_jax

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def _one_thread_without_gradients():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def theirs(name):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        PARITY / name, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_logits_and_greedy_tokens_are_transformers(name):
    """Every layer's output and the logits of one input, and 48 greedy tokens after another."""
    model, _ = case(name)
    reference = theirs(name)
    tokens = np.random.default_rng(11).integers(0, model.config.vocab_size, 40).astype(np.int32)
    layers = []
    hooks = [layer.register_forward_hook(lambda *call: layers.append(call[2])) for layer in reference.model.layers]
    expected = reference(torch.from_numpy(tokens[None]).long()).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    logits, outputs = forward(model, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    for ours, layer in zip(outputs, layers, strict=True):
        np.testing.assert_allclose(ours, layer.reshape(40, -1).numpy(), rtol=0, atol=1e-4)

    prompt = torch.from_numpy(tokens[None, :9]).long()
    text = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    target = jetspec_jax.load_target(PARITY / name, dtype="float32")
    [result] = jetspec_jax.generate(target, None, [tokens[:9].tolist()], method="ar", max_new_tokens=48)
    assert result.token_ids == text[0, 9:].tolist()
