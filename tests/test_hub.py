"""Hub ids: found in the cache without a network, and refused with what was tried; sampling defaults of checkpoints."""

import json
import shutil
import socket

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from infer.generate import main
from jetspec_jax import CheckpointError, load_draft_head, load_target, save_draft_head, save_target
from jetspec_jax.checkpoint import hf_tensors
from jetspec_jax.config import HeadConfig, TargetConfig
from jetspec_jax.head import DraftHead
from jetspec_jax.hub import find_checkpoint
from jetspec_jax.models import sampling_defaults
from jetspec_jax.sampling import Sampling
from jetspec_jax.target import TargetModel
from train.tokenizer import train_tokenizer

SIZES = {
    "vocab_size": 270, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4,
}  # fmt: skip
TARGET = TargetConfig(**SIZES, num_hidden_layers=2)
HEAD = HeadConfig(
    **SIZES, num_hidden_layers=1, block_size=4, num_target_layers=2, target_layer_ids=(0, 1), mask_token_id=3,
    causal_head=True,
)  # fmt: skip


def module(kind, config, seed):
    """A module with random matrices; its own initialisation takes seconds to compile."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(np.float32)), shapes)


def same(left, right):
    a, b = hf_tensors(left), hf_tensors(right)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target with a tokenizer and its head, in directories."""
    root = tmp_path_factory.mktemp("saved")
    words = train_tokenizer(["to be or not to be"], 264)
    save_target(root / "target", module(TargetModel, TARGET, 0), eos_token_ids=(2,), tokenizer=words)
    save_draft_head(root / "head", module(DraftHead, HEAD, 1))
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub cache, offline; a connection would be an error."""

    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub, name, source, commit="a" * 40, branch="main", subfolder=""):
    """Puts a directory into the cache, as a snapshot of the repository `name`; gives the snapshot."""
    root = hub / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    shutil.copytree(source, snapshot / subfolder, dirs_exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return snapshot


def test_a_cached_id_loads_as_its_directory_does(saved, hub):
    """Weights, tokenizer and end-of-sequence ids; the target goes by the id."""
    snapshot = cached(hub, "Org/target", saved / "target")
    cached(hub, "Org/head", saved / "head")
    target, plain = load_target("Org/target"), load_target(saved / "target")
    assert same(target.model, plain.model)
    assert target.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
    assert (target.path, target.name, target.eos_token_ids) == (snapshot, "Org/target", (2,))
    assert plain.name == "target"
    assert same(load_draft_head("Org/head", target), load_draft_head(saved / "head", plain))


def test_a_subfolder_of_a_repository_or_directory_is_a_checkpoint_of_its_own(saved, hub):
    """Its neighbours do not matter, broken ones included."""
    snapshot = cached(hub, "Org/heads", saved / "head", subfolder="small/v1")
    (snapshot / "large").mkdir()
    (snapshot / "large" / "config.json").write_text("{")
    want = load_draft_head(saved / "head")
    assert same(load_draft_head("Org/heads::small/v1"), want)
    assert same(load_draft_head(f"{saved}::head"), want)
    target = load_target(f"{saved}::target")
    assert (target.path, target.name) == (saved / "target", "target")


def test_a_revision_is_a_branch_or_a_commit(saved, hub):
    """The main branch is the default; what is not cached is refused with its name."""
    main_snapshot = cached(hub, "Org/target", saved / "target")
    other = cached(hub, "Org/target", saved / "target", commit="b" * 40, branch="v2")
    assert find_checkpoint("Org/target") == main_snapshot
    assert find_checkpoint("Org/target", "v2") == find_checkpoint("Org/target", "b" * 40) == other
    with pytest.raises(CheckpointError, match="Org/target at revision v3 is not a directory"):
        find_checkpoint("Org/target", "v3")
    with pytest.raises(CheckpointError, match="is a directory; revision 'v2' is for hub ids"):
        find_checkpoint(saved / "target", "v2")


def test_a_snapshot_that_is_there_in_part_is_refused_with_what_is_missing(saved, hub):
    """Another program may have fetched the config alone, or some of the shards."""
    snapshot = cached(hub, "Org/target", saved / "target")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors; .*pickled ones .* not read"):
        load_target("Org/target")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors; "):
        load_target("Org/target")
    with pytest.raises(CheckpointError, match=r"lacks config\.json, model\.safetensors; "):
        load_target("Org/target::nowhere")


def test_a_single_file_is_whole_whatever_an_index_beside_it_names(saved, hub):
    """It is what is read."""
    snapshot = cached(hub, "Org/target", saved / "target")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_checkpoint("Org/target") == snapshot


def test_offline_and_not_cached_says_what_was_tried(hub):
    """Directory, cache and network, and what to do; one line."""
    for load in (load_target, load_draft_head):
        with pytest.raises(CheckpointError) as error:
            load("Org/nowhere")
        message = str(error.value)
        assert "\n" not in message
        for part in ("Org/nowhere is not a directory", str(hub), "HF_HUB_OFFLINE", "network access", "give a direct"):
            assert part in message, message


def test_a_network_that_fails_is_reported_in_one_line(hub, monkeypatch):
    """Whatever the client raises."""

    def fail(name, *, local_files_only=False, **options):
        raise FileNotFoundError if local_files_only else RuntimeError("connection\n  reset")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"not be downloaded \(RuntimeError: connection reset\)"):
        load_target("Org/target")


@pytest.mark.parametrize("subfolder", ["", "part"])
def test_what_is_not_cached_is_downloaded_without_pickles_or_other_folders(saved, hub, monkeypatch, subfolder):
    """First the cache is asked, then the hub, with the same patterns and revision."""
    calls = []

    def download(name, *, local_files_only=False, **options):
        calls.append((name, local_files_only, options))
        if local_files_only:
            raise FileNotFoundError
        return str(cached(hub, name, saved / "target", subfolder=subfolder))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load_target(f"Org/target::{subfolder}" if subfolder else "Org/target", revision="v1")
    assert [call[:2] for call in calls] == [("Org/target", True), ("Org/target", False)]
    assert calls[0][2] == calls[1][2]
    options = calls[0][2]
    assert options.pop("revision") == "v1"
    prefix = f"{subfolder}/" if subfolder else ""
    files = ["config.json", "model-00001-of-2.safetensors", "model.safetensors.index.json", "tokenizer.json",
             "generation_config.json", "chat_template.jinja", "pytorch_model.bin", "model.pt", "README.md",
             "inner/model.safetensors"]  # fmt: skip
    kept = list(huggingface_hub.utils.filter_repo_objects([prefix + file for file in files], **options))
    assert kept == [prefix + file for file in files[:6]]


TEXT = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("subfolder", ["", "part"])
def test_what_a_cached_target_lacks_of_its_text_is_asked_for_at_the_same_commit(saved, hub, monkeypatch, subfolder):
    """transformers' models cache weights alone; those are not asked for again. Heads have no text."""
    snapshot = cached(hub, "Org/target", saved / "target", subfolder=subfolder)
    for file in TEXT:
        (snapshot / subfolder / file).unlink()
    calls = []

    def download(name, *, local_files_only=False, **options):
        if not local_files_only:
            calls.append(options)
            cached(hub, name, saved / "target", commit=options["revision"], subfolder=subfolder)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    name = f"Org/target::{subfolder}" if subfolder else "Org/target"
    find_checkpoint(name)
    assert not calls
    target = load_target(name)
    assert (target.tokenizer is not None, target.eos_token_ids) == (True, (2,))
    load_target(name)
    [options] = calls
    assert options.pop("revision") == snapshot.name
    prefix = f"{subfolder}/" if subfolder else ""
    files = [prefix + file for file in [*TEXT, "config.json", "model.safetensors", "inner/tokenizer.json"]]
    assert list(huggingface_hub.utils.filter_repo_objects(files, **options)) == files[:3]


@pytest.mark.parametrize("file", TEXT)
def test_a_target_whose_text_cannot_be_had_loads_without(saved, hub, monkeypatch, file):
    """The repository may have none, and the network may fail."""
    snapshot = cached(hub, "Org/target", saved / "target")
    (snapshot / file).unlink()
    assert find_checkpoint("Org/target", text=True) == snapshot  # offline, by the library itself
    asked = []

    def download(name, *, local_files_only=False, **options):
        if not local_files_only:
            asked.append(name)
            raise RuntimeError("connection reset")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("Org/target", text=True) == snapshot
    assert asked == ["Org/target"]


@pytest.mark.parametrize("path", ["nowhere", "./org/name", "a/b/c", "/org/name", "~/name", "org/"])
@pytest.mark.usefixtures("hub")
def test_what_is_no_id_is_never_looked_up(path, tmp_path, monkeypatch):
    """Paths stay paths; the message names both forms."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a directory; expected .* hub id such as"):
        load_target(path)


@pytest.mark.parametrize("subfolder", ["", "/etc", "..", "a/../b"])
@pytest.mark.usefixtures("hub")
def test_a_subfolder_stays_inside(subfolder):
    with pytest.raises(CheckpointError, match="after '::'"):
        load_target(f"Org/target::{subfolder}")


def test_a_missing_subfolder_of_a_directory_is_named(saved):
    with pytest.raises(CheckpointError, match="has no folder tail"):
        load_draft_head(f"{saved}::tail")


def test_a_directory_of_pickled_weights_is_refused_with_the_reason(saved, tmp_path):
    directory = shutil.copytree(saved / "target", tmp_path / "target")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin, but pickled .* safetensors are needed"):
        load_target(directory)


@pytest.mark.usefixtures("hub")
def test_the_command_refuses_an_id_that_cannot_be_had(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--model", "Org/nowhere", "--prompt-ids", "1", "--method", "ar"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: Org/nowhere is not a directory") and captured.err.count("\n") == 1


# Sampling defaults.

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        (None, Sampling()),
        ({}, Sampling()),
        (QWEN3, Sampling(0.6, 20, 0.95)),
        ({**QWEN3, "do_sample": False}, Sampling(0.0, 20, 0.95)),
        ({"temperature": 0.6}, Sampling()),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "temperature": None, "top_k": None, "min_p": 0.1}, Sampling(1.0, min_p=0.1)),
        ({"do_sample": True, "repetition_penalty": 1.0}, Sampling(1.0)),
        ({"do_sample": True, "top_k": -1}, Sampling(1.0)),
        ({"do_sample": False, "top_k": -1, "top_p": 0.9}, Sampling(0.0, top_p=0.9)),
        ({"do_sample": False, "top_k": 20, "top_p": 0}, Sampling()),
        ({"temperature": "warm"}, Sampling()),
    ],
)
def test_sampling_defaults_are_the_files(tmp_path, fields, want):
    """Greedy unless the file says `do_sample`; what it leaves out is off."""
    if fields is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert sampling_defaults(tmp_path) == want


@pytest.mark.parametrize(
    "fields", [{"temperature": "warm"}, {"top_p": 1.5}, {"top_k": True}, {"top_k": -2}, {"min_p": [0.1]}]
)
def test_impossible_sampling_defaults_are_refused_by_file_and_field(tmp_path, fields):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **fields}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{next(iter(fields))}"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "off"),
    [("repetition_penalty", 1.05, 1.0), ("presence_penalty", 1.5, 0.0), ("frequency_penalty", 0.5, 0),
     ("suppress_tokens", [1, 2], []), ("bad_words_ids", [[3]], []), ("min_new_tokens", 4, 0)],
)  # fmt: skip
def test_sampling_that_is_not_supported_is_logged(tmp_path, caplog, field, value, off):
    """It would change the text; unseen it must not be dropped. What is off is not worth a word."""
    for setting in (off, None, value):
        assert not caplog.text
        (tmp_path / "generation_config.json").write_text(json.dumps({**QWEN3, field: setting}))
        assert sampling_defaults(tmp_path) == Sampling(0.6, 20, 0.95)
    assert f"{field}={value} is not supported and not applied" in caplog.text


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_broken_tokenizer_is_refused_with_its_directory_before_the_weights_are_read(saved, tmp_path, text):
    """Whatever the library raises; the weights here are none."""
    directory = shutil.copytree(saved / "target", tmp_path / "target")
    (directory / "tokenizer.json").write_text(text)
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{directory}: its tokenizer cannot be loaded"):
        load_target(directory)


def test_a_loaded_target_carries_its_defaults(saved, tmp_path):
    directory = shutil.copytree(saved / "target", tmp_path / "target")
    (directory / "generation_config.json").write_text(json.dumps({**QWEN3, "eos_token_id": [2, 5]}))
    target = load_target(directory)
    assert (target.sampling_defaults, target.eos_token_ids) == (Sampling(0.6, 20, 0.95), (2, 5))
    assert load_target(saved / "target").sampling_defaults == Sampling()
