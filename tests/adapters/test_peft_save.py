"""PEFT folders out: exact round trips, complete files, nothing half written."""

import json
import stat

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from molora_jax.adapters import (
    Adapter,
    AdapterCard,
    LoraPair,
    load_adapter,
    peft_save,
    save_adapter,
)
from molora_jax.adapters.lora_config import lora_scale
from molora_jax.adapters.lora_describe import alpha_of
from tests.adapters.make import BASE, arrays_for, make_adapter, modules_of, peft_tensors, write_peft

CARD = AdapterCard(
    base="org/base", data="sql.jsonl", command="run.py --x", metrics={"nll": 2.5, "steps": 40}
)


def assert_same(one, other):
    assert one.digest == other.digest
    assert list(one.modules) == list(other.modules)
    for module, pair in one.modules.items():
        again = other.modules[module]
        assert (pair.scale, pair.a.dtype, pair.b.dtype) == (
            again.scale,
            again.a.dtype,
            again.b.dtype,
        )
        np.testing.assert_array_equal(pair.a, again.a)
        np.testing.assert_array_equal(pair.b, again.b)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_round_trip_is_exact(tmp_path, dtype, use_rslora):
    modules = modules_of(projections=("k_proj", "down_proj"))
    ranks = {module: 1 + number % 4 for number, module in enumerate(modules)}
    arrays = arrays_for(modules, ranks, dtype=dtype)
    adapter = Adapter.from_arrays("a", arrays, alpha=7, use_rslora=use_rslora, num_layers=3)
    path = save_adapter(adapter, tmp_path / "a")
    again, report = load_adapter(path, config=BASE)
    assert_same(adapter, again)
    assert report.warnings == ()
    expected = 7 / np.sqrt(2) if use_rslora else 3.5
    assert again.modules[modules[1]].scale == expected


def test_keys_shapes_and_metadata_are_what_peft_reads(tmp_path):
    adapter = make_adapter(projections=("q_proj",))
    path = save_adapter(adapter, tmp_path / "a")
    with safe_open(path / "adapter_model.safetensors", framework="numpy") as stored:
        assert stored.metadata() == {"format": "pt"}
        tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    expected = peft_tensors(arrays_for(modules_of(projections=("q_proj",))))
    assert set(tensors) == set(expected)
    for key, array in expected.items():
        np.testing.assert_array_equal(tensors[key], array)


def test_views_are_written_in_their_own_order(tmp_path):
    a, b = np.arange(20.0, dtype=np.float32).reshape(2, 10), np.arange(24.0, dtype=np.float32)
    arrays = {"layers.0.self_attn.q_proj": (a, b.reshape(2, 12).T)}
    path = save_adapter(Adapter.from_arrays("a", arrays, alpha=1), tmp_path / "a")
    with safe_open(path / "adapter_model.safetensors", framework="numpy") as stored:
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        np.testing.assert_array_equal(stored.get_tensor(key), b.reshape(2, 12).T)


def test_config_is_complete(tmp_path):
    adapter = make_adapter(alpha=6.0, base_name="org/base")
    config = json.loads((save_adapter(adapter, tmp_path / "a") / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["inference_mode"] is True
    assert config["base_model_name_or_path"] == "org/base"
    assert (config["r"], config["lora_alpha"], config["bias"]) == (3, 6, "none")
    assert isinstance(config["lora_alpha"], int)
    assert config["target_modules"] == list(adapter.projections)
    assert config["rank_pattern"] == {}


def test_mixed_ranks_and_partial_layers_are_described(tmp_path):
    modules = ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj", "layers.2.mlp.up_proj"]
    ranks = dict(zip(modules, (2, 2, 5), strict=True))
    adapter = Adapter.from_arrays("a", arrays_for(modules, ranks), alpha=4, num_layers=3)
    assert adapter.config["r"] == 2
    assert adapter.config["rank_pattern"] == {"model.layers.2.mlp.up_proj": 5}
    assert adapter.config["target_modules"] == [f"model.{module}" for module in modules]
    again, report = load_adapter(save_adapter(adapter, tmp_path / "a"), config=BASE)
    assert_same(adapter, again)
    assert report.warnings == ()


def test_loaded_config_is_kept_on_the_way_out(tmp_path):
    source = write_peft(
        tmp_path / "in", peft_tensors(arrays_for(modules_of())), target_modules="all-linear",
        lora_dropout=0.1, inference_mode=False, alpha_pattern={"q_proj": 9},
    )  # fmt: skip
    adapter, _ = load_adapter(source)
    path = save_adapter(adapter, tmp_path / "out")
    stored = json.loads((source / "adapter_config.json").read_text())
    written = json.loads((path / "adapter_config.json").read_text())
    assert written == {**stored, "inference_mode": True}
    assert_same(adapter, load_adapter(path, config=BASE)[0])


def test_card_tells_base_data_command_and_metrics(tmp_path):
    adapter = make_adapter(base_name="org/base")
    text = (save_adapter(adapter, tmp_path / "a", card=CARD) / "README.md").read_text()
    for part in ("library_name: peft", 'base_model: "org/base"', "sql.jsonl", "run.py --x"):
        assert part in text
    assert "| nll | 2.5 |" in text
    assert adapter.digest in text


def test_files_can_be_read_by_others(tmp_path):
    path = save_adapter(make_adapter(), tmp_path / "a")
    plain = tmp_path / "plain"
    plain.write_text("")
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


# No empty export.
def test_adapter_without_modules_cannot_be_made():
    with pytest.raises(ValueError, match="no modules"):
        Adapter.from_arrays("a", {}, alpha=1)


def test_nonfinite_adapter_is_not_saved(tmp_path):
    arrays = arrays_for(modules_of())
    arrays["layers.1.mlp.up_proj"][1][0, 0] = np.nan
    adapter = Adapter.from_arrays("a", arrays, alpha=1)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.lora_B \(1 values\)"):
        save_adapter(adapter, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# A folder describes whatever an adapter is: mixed ranks, mixed scales, any modules.
def test_mixed_alphas_are_described(tmp_path):
    modules = modules_of(projections=("q_proj", "v_proj"))
    ranks = {module: 1 + number % 3 for number, module in enumerate(modules)}
    alphas = {module: (4, 0.5, 7)[number % 3] for number, module in enumerate(modules)}
    adapter = Adapter.from_arrays(
        "a", arrays_for(modules, ranks), alpha=alphas, use_rslora=True, num_layers=3
    )
    assert adapter.config["target_modules"] == ["q_proj", "v_proj"]
    assert len(adapter.config["alpha_pattern"]) == 4
    again, report = load_adapter(save_adapter(adapter, tmp_path / "a"), config=BASE)
    assert_same(adapter, again)
    assert report.warnings == ()
    assert again.modules[modules[1]].scale == 0.5 / np.sqrt(2)
    assert again.config == adapter.config
    with pytest.raises(ValueError, match=f"alpha has no value for the modules {modules[2]}"):
        Adapter.from_arrays(
            "a", arrays_for(modules), alpha={m: 1 for m in modules if m != modules[2]}
        )


@pytest.mark.parametrize("config", ["its own", "none", "of other targets", "of a regex"])
def test_a_config_that_does_not_describe_the_modules_is_made_to(tmp_path, config):
    made = make_adapter(base_name="org/base")
    scales = (0.125, 1.75, 3.0, 2 / 3)
    pairs = {
        module: LoraPair(pair.a, pair.b, scales[number % 4])
        for number, (module, pair) in enumerate([*made.modules.items()][:-3])
    }
    change = {
        "its own": {},
        "of other targets": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        "of a regex": {"target_modules": ".*self_attn.*", "exclude_modules": ["k_proj"]},
        "none": {},
    }[config]
    stored = {} if config == "none" else {**made.config, "lora_dropout": 0.25, **change}
    adapter = Adapter("a", pairs, stored)
    path = save_adapter(adapter, tmp_path / "a")
    again, report = load_adapter(path, config=BASE)
    assert_same(adapter, again)
    assert report.warnings == ()
    written = json.loads((path / "adapter_config.json").read_text())
    if stored:
        assert (written["base_model_name_or_path"], written["lora_dropout"]) == ("org/base", 0.25)
    assert adapter.config == stored  # what is saved is made for the folder


@pytest.mark.parametrize("config", ["of fewer targets", "of other ranks", "of more targets"])
def test_a_config_with_the_right_scales_is_still_held_against_the_modules(tmp_path, config):
    made = make_adapter(projections=("q_proj", "v_proj"))
    change = {
        "of fewer targets": {"target_modules": ["q_proj"]},
        "of other ranks": {"r": 6, "lora_alpha": 12},
        "of more targets": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    }[config]
    adapter = Adapter("a", made.modules, {**made.config, **change})
    again, report = load_adapter(save_adapter(adapter, tmp_path / "a"), config=BASE)
    assert_same(adapter, again)
    assert report.warnings == ()
    assert (again.config["r"], again.config["lora_alpha"]) == (3, 6)


def test_a_scale_that_no_alpha_gives_is_refused_by_name(tmp_path):
    # Three times 1.9 lies where floats are too far apart to give each of its neighbours back.
    adapter = make_adapter(projections=("q_proj",), rank=3)
    lost = next(
        scale
        for scale in np.nextafter(1.9, 2) + np.arange(50) * np.spacing(1.9)
        if alpha_of(float(scale), 3) is None and alpha_of(float(scale), 3, use_rslora=True) is None
    )
    pairs = {m: LoraPair(pair.a, pair.b, float(lost)) for m, pair in adapter.modules.items()}
    with pytest.raises(ValueError, match=r"scale 1\.9.* of layers\.0.*no lora_alpha / rank of any"):
        save_adapter(Adapter("a", pairs, adapter.config), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@hypothesis.given(
    scale=st.floats(allow_nan=False, allow_infinity=False, width=64),
    rank=st.integers(1, 300),
    use_rslora=st.booleans(),
)
def test_an_alpha_that_is_found_gives_the_scale_exactly(scale, rank, use_rslora):
    alpha = alpha_of(scale, rank, use_rslora=use_rslora)
    if alpha is not None:
        stored = json.loads(json.dumps(alpha))
        assert lora_scale(stored, rank, use_rslora=use_rslora).hex() == scale.hex()


@hypothesis.given(
    alpha=st.floats(1e-3, 1e6) | st.integers(-64, 4096),
    rank=st.integers(1, 300),
    use_rslora=st.booleans(),
)
def test_a_scale_that_began_as_an_alpha_is_always_found(alpha, rank, use_rslora):
    scale = lora_scale(alpha, rank, use_rslora=use_rslora)
    assert alpha_of(scale, rank, use_rslora=use_rslora) is not None


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_is_a_finite_number(scale):
    with pytest.raises(ValueError, match="expected a finite number"):
        LoraPair(np.ones((2, 3), np.float32), np.ones((3, 2), np.float32), scale)


def test_what_is_read_back_must_be_what_was_written(tmp_path, monkeypatch):
    other = make_adapter(seed=9)
    monkeypatch.setattr(peft_save, "load_adapter", lambda *_, **__: (other, None))
    with pytest.raises(OSError, match=r"read back .*, it is another one"):
        save_adapter(make_adapter(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_folder(tmp_path, monkeypatch):
    old = make_adapter(seed=1)
    path = save_adapter(old, tmp_path / "a")

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(peft_save, "_card_text", broken)
    with pytest.raises(OSError, match="disk full"):
        save_adapter(make_adapter(seed=2), path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert_same(load_adapter(path)[0], old)


def test_existing_folder_is_replaced_only_when_told(tmp_path):
    path = save_adapter(make_adapter(seed=1), tmp_path / "a")
    new = make_adapter(seed=2)
    with pytest.raises(ValueError, match=r"exists already.*overwrite=True"):
        save_adapter(new, path)
    save_adapter(new, path, overwrite=True)
    assert_same(load_adapter(path)[0], new)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_folder_with_other_files_is_never_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis\.txt'"):
        save_adapter(make_adapter(), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_adapter_is_read_only():
    a, b = np.ones((2, 10), np.float32), np.ones((12, 2), np.float32)
    adapter = Adapter.from_arrays("a", {"layers.0.self_attn.q_proj": (a, b)}, alpha=1)
    a[:] = 7
    pair = adapter.modules["layers.0.self_attn.q_proj"]
    assert pair.a[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        pair.b[0, 0] = 7


@pytest.mark.parametrize("name", ["layers.0.mlp.q_proj", "model.layers.0.mlp.up_proj", "up_proj"])
def test_unknown_module_names_are_refused(name):
    pair = (np.ones((2, 10), np.float32), np.ones((7, 2), np.float32))
    with pytest.raises(ValueError, match=f"unknown module '{name}'"):
        Adapter.from_arrays("a", {name: pair}, alpha=1)
