"""merge: one adapter, a model folder, both whole or not at all."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from molora_jax.adapters import AdapterBank, load_adapter
from molora_jax.models import load_base
from molora_jax.models.gguf import read_gguf
from molora_jax.routing import FixedRouter
from molora_jax.tools import merge as verb
from tests.tools.conftest import BASE, logits, make

TOKENS = [[1, 50, 100, 200, 7, 31]]


def routed(base, folders, weights):
    """Logits of the base with the adapters added by the given weights, without merging."""
    bank = AdapterBank(base.config, num_slots=2, max_rank=4)
    for name in weights:
        bank.load(folders[name])
    shape = (1, len(TOKENS[0]), len(weights))
    ids = np.broadcast_to([bank.slot_of(name) for name in weights], shape)
    gates = np.broadcast_to(np.array(list(weights.values()), np.float32), shape)
    return logits(base, TOKENS, adapters=bank.stacks, router=FixedRouter(ids, gates))


def test_a_merged_model_gives_the_logits_of_base_and_adapters(tool, folders, base, tmp_path):
    out = tmp_path / "model"
    pair = (folders["a"], folders["b"])
    result = tool("merge", *pair, "--weights", "a=0.7,b=-2", "--base", BASE, "--out", out)
    assert result.code == 0, result.err
    model = load_base(str(out))
    expected = routed(base, folders, {"a": 0.7, "b": -2.0})
    np.testing.assert_allclose(logits(model, TOKENS), expected, atol=2e-5)
    assert np.abs(expected - logits(base, TOKENS)).max() > 0.05
    assert model.digest in result.out
    assert model.digest != base.digest
    for words in ("q_proj", "down_proj", "unchanged: embedding, output", "logits read back"):
        assert words in result.out
    files = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "generation_config.json"} == files  # fmt: skip
    again = tool("merge", *pair, "--base", BASE, "--out", out)
    assert again.code == 1
    assert "exists already" in again.err
    assert tool("merge", *pair, "--base", BASE, "--out", out, "--overwrite").code == 0
    assert load_base(str(out)).digest != model.digest


def test_a_merged_model_is_a_base_to_merge_into(tool, folders, base, tmp_path):
    tool("merge", folders["a"], "--base", BASE, "--out", tmp_path / "one")
    second = tool("merge", folders["b"], "--base", tmp_path / "one", "--out", tmp_path / "two")
    assert second.code == 0, second.err
    expected = routed(base, folders, {"a": 1.0, "b": 1.0})
    model = load_base(str(tmp_path / "two"))
    np.testing.assert_allclose(logits(model, TOKENS), expected, atol=2e-5)


def test_adapters_become_one_exactly_or_truncated(tool, folders, base, tmp_path):
    argv = ("merge", folders["a"], f"bee={folders['b']}", "--weights", "bee=0.5")
    result = tool(*argv, "--out", tmp_path / "both")
    assert result.code == 0, result.err
    assert "exact" in result.out
    merged, report = load_adapter(tmp_path / "both", config=base.config)
    assert (merged.rank, merged.name) == (7, "both")
    assert report.base_name == "org/tiny-random"
    assert merged.config["target_modules"][0] == "q_proj"
    folders = folders | {"both": tmp_path / "both"}
    bank = AdapterBank(base.config, num_slots=1, max_rank=7)
    bank.load(merged)
    one = FixedRouter(np.zeros((1, len(TOKENS[0]), 1), np.int32))
    np.testing.assert_allclose(
        logits(base, TOKENS, adapters=bank.stacks, router=one),
        routed(base, folders, {"a": 1.0, "b": 0.5}), atol=2e-5,
    )  # fmt: skip
    result = tool(*argv, "--rank", "2", "--out", tmp_path / "small")
    assert "relative error" in result.out
    assert "28 of 28 modules truncated" in result.out
    assert load_adapter(tmp_path / "small")[0].rank == 2


def broken(folder, to):
    shutil.copytree(folder, to)
    file = to / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(iter(tensors))
    tensors[key] = tensors[key] * np.nan
    save_file(tensors, file)
    return to


def test_bad_adapters_are_refused_and_nothing_is_written(tool, folders, base, tmp_path):
    nan = broken(folders["a"], tmp_path / "nan")
    other = tmp_path / "other"
    shutil.copytree(folders["a"], other)
    config = json.loads((other / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "org/another"
    (other / "adapter_config.json").write_text(json.dumps(config))
    foreign = tmp_path / "foreign"
    shutil.copytree(folders["a"], foreign)
    tensors = load_file(foreign / "adapter_model.safetensors")
    save_file({k: v[:, :5] if "lora_A" in k else v for k, v in tensors.items()},
              foreign / "adapter_model.safetensors")  # fmt: skip
    head = tmp_path / "head"
    shutil.copytree(folders["a"], head)
    more = {f"base_model.model.lm_head.lora_{m}.weight": np.ones((2, 2), np.float32) for m in "AB"}
    save_file(tensors | more, head / "adapter_model.safetensors")
    out = tmp_path / "out"
    for argv, words in (
        ([nan], "NaN"),
        ([nan, "--base", BASE], "NaN"),
        ([other, folders["b"]], "different bases"),
        ([foreign, folders["b"]], "different bases: q_proj is 5 to 64"),
        ([foreign, "--base", BASE], "another base"),
        ([head, "--base", BASE], "lm_head.lora_A.weight' (LoRA on the output layer)"),
        ([folders["a"], "--base", BASE, "--weights", "a=1e6", "--dtype", "float16"], "float16"),
        ([folders["a"], "--base", BASE, "--weights", "a=1e39"], "overflow float32"),
        ([folders["a"], "--base", BASE, "--weights", "a=1e38"], "are not finite"),
    ):
        result = tool("merge", *argv, "--out", out)
        assert result.code == 1, argv
        assert words in result.err
        assert not out.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    # A base of the same sizes and another name is taken, and said.
    result = tool("merge", other, "--base", BASE, "--out", out)
    assert result.code == 0
    assert "warning: adapter 'other': trained on org/another" in result.err


def test_a_model_that_reads_back_otherwise_is_not_written(tool, folders, tmp_path, monkeypatch):
    right = verb.merge_into

    def wrong(arrays, *args, **kwargs):
        merged, changes = right(arrays, *args, **kwargs)
        return {**merged, "norm.weight": merged["norm.weight"] * 1.01}, changes

    monkeypatch.setattr(verb, "merge_into", wrong)
    result = tool("merge", folders["a"], "--base", BASE, "--out", tmp_path / "model")
    assert result.code == 1
    assert "nothing was written" in result.err
    assert not list(tmp_path.iterdir())


def test_a_foreign_folder_is_not_overwritten(tool, folders, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    for argv in ([folders["a"]], [folders["a"], "--base", BASE]):
        result = tool("merge", *argv, "--out", tmp_path, "--overwrite")
        assert result.code == 1
        assert "thesis.txt" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_half_precision_says_what_rounding_costs(tool, folders, tmp_path):
    out = tmp_path / "half"
    result = tool("merge", folders["a"], "--base", BASE, "--out", out, "--dtype", "bfloat16")
    assert result.code == 0, result.err
    assert "lost to bfloat16" in result.out
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype.name == "bfloat16"


def test_a_base_with_fewer_ids_than_its_tokenizer_is_merged_into(tool, folders, tmp_path):
    """The text that is read back would hold ids whose look-up is NaN whatever the weights."""
    small, out = tmp_path / "small", tmp_path / "model"
    tool("merge", folders["a"], "--base", BASE, "--out", small)
    file, settings = small / "model.safetensors", small / "config.json"
    tensors = load_file(file)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[key] = tensors[key][:90]
    save_file(tensors, file)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"vocab_size": 90}))
    assert max(load_base(str(small)).tokenizer.encode(verb._TEXT)) >= 90
    result = tool("merge", folders["b"], "--base", small, "--out", out)
    assert result.code == 0, result.err
    assert load_base(str(out)).config.vocab_size == 90


@pytest.mark.model
@pytest.mark.long
def test_a_gguf_base_becomes_a_plain_folder(tool, smollm2, tmp_path):
    from molora_jax.adapters import save_adapter
    from molora_jax.models.smollm2 import fetch_smollm2

    folder = save_adapter(make(smollm2, "a", seed=4), tmp_path / "a")
    result = tool("merge", folder, "--base", "smollm2-135m", "--out", tmp_path / "model")
    assert result.code == 0, result.err
    assert "tied to the output" in result.out
    read = load_base(str(tmp_path / "model"))
    assert read.tokenizer.encode("f(12) é") == smollm2.tokenizer.encode("f(12) é")
    embedding = np.asarray(read.decoder.embedding[...])
    np.testing.assert_array_equal(embedding, np.asarray(smollm2.decoder.embedding[...]))
    assert read_gguf(fetch_smollm2()).config() == read.config
    assert jnp.isfinite(read.decoder.norm[...]).all()
