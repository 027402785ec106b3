"""convert: checkpoints and PEFT folders, one as the other, and training from either."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import train_adapter as experiment
from molora_jax.adapters import AdapterBank, load_adapter, save_adapter
from molora_jax.training import AdapterTrainConfig, pack, train_adapter
from molora_jax.training.adapter_checkpoint import (
    load_start,
    read_adapter_checkpoint,
    start_settings,
    trainable_of,
)
from molora_jax.training.checkpoint import describe_checkpoint, read_checkpoint, save_checkpoint
from tests.adapters.make import dense_delta
from tests.tools.conftest import make
from tests.tools.test_inspect import copied

SETTINGS = AdapterTrainConfig(
    rank=3, alpha=5.0, use_rslora=True, projections=("q_proj", "up_proj"), steps=4, lr=1e-2,
    checkpoint_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(0)
    return pack([rng.integers(40, 60, 200).tolist()], seq_len=16, separator=None)


@pytest.fixture(scope="module")
def trained(base, windows, tmp_path_factory):
    """(adapter, run folder) of a short training."""
    run = tmp_path_factory.mktemp("run")
    return train_adapter(base, windows, SETTINGS, name="sql", run_dir=run)[0], run


def test_a_checkpoint_becomes_the_adapter_that_training_exported(tool, trained, tmp_path):
    """Field report F15: nothing that training was told is asked again."""
    adapter, run = trained
    for number, source in enumerate(
        (run, run / "checkpoints", run / "checkpoints" / "step_00000004")
    ):
        result = tool("convert", source, tmp_path / str(number))
        assert result.code == 0, result.err
        read, report = load_adapter(tmp_path / str(number))
        assert read.digest == adapter.digest
        assert report.base_name == "tiny-random"
        assert read.config == adapter.config
    arrays = describe_checkpoint(run / "checkpoints")["arrays"]
    assert (
        f"{len(arrays)} arrays: 4 of the adapter; left out: {len(arrays) - 4} of the" in result.out
    )
    assert "16 tensors" in result.out
    assert "adapter 'sql' of base tiny-random: rank 3" in result.out


def test_there_and_back_is_the_same_adapter(tool, folders, tmp_path):
    for name in ("a", "b"):
        there = tool("convert", folders[name], tmp_path / f"{name}-checkpoint")
        assert there.code == 0, there.err
        assert "checkpoint of step 0 without an optimiser" in there.out
        back = tool("convert", tmp_path / f"{name}-checkpoint", tmp_path / name)
        assert back.code == 0, back.err
        assert load_adapter(tmp_path / name)[0].digest == load_adapter(folders[name])[0].digest
    shown = json.loads(tool("inspect", tmp_path / "b-checkpoint", "--json").out)
    assert (shown["kind"], shown["step"], shown["origin"]) == ("checkpoint", 0, "a PEFT folder")
    assert shown["about"]["base_name"] == "org/tiny-random"
    shown = tool("inspect", tmp_path / "b-checkpoint").out
    assert re.search(r"^use_rslora +True$", shown, re.MULTILINE)


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_training_goes_on_from_an_adapter(tool, base, windows, trained, tmp_path, kind):
    adapter, run = trained
    source = run
    if kind == "folder":
        source = save_adapter(adapter, tmp_path / "start")
    start = load_start(source)
    assert start.digest == adapter.digest
    settings = AdapterTrainConfig(steps=1, lr=1e-9, **start_settings(start))
    again, _ = train_adapter(base, windows, settings, name="more", start=start)
    for module, pair in again.modules.items():
        np.testing.assert_allclose(pair.b, adapter.modules[module].b, atol=1e-7)
    assert all(pair.b.any() for pair in again.modules.values())
    wrong = AdapterTrainConfig(steps=1, **start_settings(start) | {"rank": 4})
    with pytest.raises(ValueError, match=f"rank is 4, but the adapter '{start.name}' to start"):
        train_adapter(base, windows, wrong, name="more", start=start)


def test_another_start_is_another_run(base, windows, trained, tmp_path):
    adapter, _ = trained
    settings = AdapterTrainConfig(steps=2, checkpoint_every=2, **start_settings(adapter))
    train_adapter(base, windows, settings, name="x", start=adapter, run_dir=tmp_path)
    with pytest.raises(ValueError, match=r"identity\.start was '\w+' and is now None"):
        train_adapter(base, windows, settings, name="x", run_dir=tmp_path)


def test_the_experiment_takes_rank_and_alpha_from_the_adapter(trained, tmp_path):
    adapter, run = trained
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a b c"}\n')
    config = experiment.Config(data=str(data), base="tiny-random", init_from=str(run))
    found = config.training()
    assert (found.rank, found.alpha, found.use_rslora) == (3, 5.0, True)
    assert found.projections == ("q_proj", "up_proj")
    assert experiment.digests(config)["start"] == adapter.digest
    with pytest.raises(ValueError, match=r"Config.rank = 16, but .* has 3"):
        experiment.Config(data=str(data), base="tiny-random", init_from=str(run), rank=16)


def test_max_rank_keeps_the_best_of_every_module_and_says_what_is_lost(tool, folders, tmp_path):
    result = tool("convert", folders["a"], tmp_path / "small", "--max_rank", 2)
    assert result.code == 0, result.err
    whole, small = load_adapter(folders["a"])[0], load_adapter(tmp_path / "small")[0]
    assert small.rank == 2
    square = lost = 0.0
    for module, pair in whole.modules.items():
        expected = dense_delta(pair.a, pair.b, pair.scale)
        kept = small.modules[module]
        lost += np.linalg.norm(dense_delta(kept.a, kept.b, kept.scale) - expected) ** 2
        square += np.linalg.norm(expected) ** 2
    stated = float(result.out.split("relative error ")[1].split(",")[0])
    assert stated == pytest.approx((lost / square) ** 0.5, rel=1e-3)
    again = tool("convert", folders["b"], tmp_path / "b", "--max_rank", 8)
    assert "nothing truncated" in again.out
    assert load_adapter(tmp_path / "b")[0].digest == load_adapter(folders["b"])[0].digest


def test_dtype_casts_or_refuses(tool, folders, base, tmp_path):
    result = tool("convert", folders["a"], tmp_path / "half", "--dtype", "bfloat16")
    assert result.code == 0, result.err
    assert load_adapter(tmp_path / "half")[0].dtypes == {"bfloat16": 56}
    for factor, words in ((1e-20, "becomes all zero in float16"), (1e20, "overflows float16")):
        tensors = load_file(folders["a"] / "adapter_model.safetensors")
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        folder = copied(
            folders["a"], tmp_path / f"{factor}", tensors={key: tensors[key] * np.float32(factor)}
        )
        result = tool("convert", folder, tmp_path / "no", "--dtype", "float16")
        assert result.code == 1
        assert words in result.err
        assert "layers.0.self_attn.q_proj" in result.err


def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    tool, folders, base, trained, tmp_path
):
    """Field report F17: tensors in = out + listed refusals."""
    head = {f"base_model.model.lm_head.lora_{m}.weight": np.ones((2, 2), np.float32) for m in "AB"}
    some = {f"base_model.model.model.layers.3.mlp.up_proj.lora_{m}.weight": None for m in "AB"}
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    rest = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    b = load_file(folders["a"] / "adapter_model.safetensors")[key]
    ranks = make(base, "ranks")
    mixed = {m: (p.a[: 1 + i % 2], p.b[:, : 1 + i % 2])
             for i, (m, p) in enumerate(ranks.modules.items())}  # fmt: skip
    sources = {
        "head": (copied(folders["a"], tmp_path / "head", tensors=head), "lm_head.lora_A"),
        "some": (
            copied(folders["a"], tmp_path / "some", tensors=some, target_modules=names + rest),
            "layers.3.mlp.up_proj",
        ),
        "nan": (copied(folders["a"], tmp_path / "nan", tensors={key: b * np.nan}), "NaN"),
        "ranks": (
            save_adapter(type(ranks).from_arrays("r", mixed, alpha=1), tmp_path / "ranks"),
            "several ranks: 1 (layers.0.self_attn.q_proj), 2 (layers.0.self_attn.k_proj)",
        ),
        "scales": (
            copied(folders["a"], tmp_path / "scales", alpha_pattern={"q_proj": 3}),
            "several scales",
        ),
    }
    for folder, words in sources.values():
        result = tool("convert", folder, tmp_path / "out")
        assert result.code == 1
        assert words in result.err
        assert not (tmp_path / "out").exists()
    _, run = trained
    for argv, words in (
        ((run, tmp_path / "x", "--to", "checkpoint"), "is a checkpoint already"),
        ((folders["a"], tmp_path / "x", "--to", "peft"), "is a PEFT folder already"),
        ((folders["a"], tmp_path / "x", "--to", "checkpoint", "--dtype", "float16"), "--dtype"),
    ):
        result = tool("convert", *argv)
        assert result.code == 2
        assert words in result.err


def test_checkpoints_that_are_no_adapters_are_refused(tool, trained, tmp_path):
    _, run = trained
    _, meta = read_checkpoint(run / "checkpoints")
    save_checkpoint(tmp_path / "old", 2, {"params": {"w": np.ones(2)}}, meta={"config": {}})
    result = tool("convert", tmp_path / "old", tmp_path / "x")
    assert result.code == 1
    assert "does not say which adapter it holds" in result.err
    more = {"params": {"w": np.ones(2)}}
    save_checkpoint(tmp_path / "less", 2, more, meta={"about": meta["about"]})
    assert "lacks ['params'].lora_a['q_proj']" in tool("convert", tmp_path / "less", "x").err
    assert "no adapter at" in tool("convert", tmp_path / "none", tmp_path / "x").err


def test_a_diverged_checkpoint_is_not_exported(tool, tmp_path, folders):
    tool("convert", folders["b"], tmp_path / "checkpoint")
    _, meta = read_checkpoint(tmp_path / "checkpoint")
    trainable = trainable_of(read_adapter_checkpoint(tmp_path / "checkpoint").adapter)
    trainable.lora_b["q_proj"] = trainable.lora_b["q_proj"].at[0, 0, 0].set(np.nan)
    save_checkpoint(tmp_path / "checkpoint", 5, {"params": trainable}, meta=meta)
    result = tool("convert", tmp_path / "checkpoint", tmp_path / "out")
    assert result.code == 1
    assert "NaN" in result.err
    assert not (tmp_path / "out").exists()


def test_a_converted_adapter_serves(tool, base, folders, tmp_path):
    tool("convert", folders["a"], tmp_path / "small", "--max_rank", 2, "--dtype", "bfloat16")
    bank = AdapterBank(base.config, num_slots=1, max_rank=2)
    assert bank.load(tmp_path / "small").name == "small"
    file = tmp_path / "small" / "adapter_model.safetensors"
    assert {v.dtype.name for v in load_file(file).values()} == {"bfloat16"}


@pytest.mark.parametrize("verb", ["convert", "merge"])
def test_nothing_is_written_over_its_own_source(tool, folders, tmp_path, verb):
    source = copied(folders["a"], tmp_path / "a")
    before = (source / "adapter_model.safetensors").read_bytes()
    argv = {
        "convert": (source, source, "--max_rank", 2),
        "merge": (source, folders["b"], "--out", source),
    }[verb]
    result = tool(verb, *argv, "--overwrite")
    assert result.code == 1 and "is read and would be overwritten" in result.err
    assert (source / "adapter_model.safetensors").read_bytes() == before
