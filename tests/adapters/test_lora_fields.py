"""Fields of adapter_config.json: every one that PEFT has is known, and none is lost in silence."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from molora_jax.adapters import load_adapter
from molora_jax.adapters.lora_config import read_config
from molora_jax.adapters.lora_fields import KNOWN, NO_EFFECT, OLD, READ, REFUSED
from tests.adapters.make import BASE, arrays_for, modules_of, peft_tensors, write_peft

# What PEFT 0.21.2 writes for LoraConfig(), so that the plain run holds it, too.
DEFAULTS = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None,
    "auto_mapping": None, "base_model_name_or_path": None, "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None,
    "fan_in_fan_out": False, "inference_mode": False, "init_lora_weights": True,
    "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False,
    "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "target_modules": None, "target_parameters": None,
    "task_type": None, "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


def read(**fields):
    return read_config({**DEFAULTS, "target_modules": ["q_proj"], **fields}, where="here")


@pytest.fixture
def folder(tmp_path):
    arrays = arrays_for(modules_of(projections=("q_proj",)))
    return write_peft(tmp_path / "sql", peft_tensors(arrays), target_modules=("q_proj",))


def edit(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


def test_each_field_has_one_place():
    assert READ | NO_EFFECT | set(REFUSED) == KNOWN
    assert len(READ) + len(NO_EFFECT) + len(REFUSED) == len(KNOWN)
    assert set(DEFAULTS) | {"runtime_config"} == KNOWN


def test_the_guide_names_each_field_and_no_other():
    guide = pathlib.Path(__file__).parents[2] / "docs" / "formats.md"
    table = guide.read_text(encoding="utf-8").split("### adapter_config.json")[1].split("###")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == KNOWN | OLD


def test_a_field_that_peft_has_dropped_is_noted():
    assert "merge_weights" in read(merge_weights=True).notes[0]


def test_pefts_own_defaults_are_read_without_refusal():
    settings = read()
    assert (settings.r, settings.alpha, settings.use_rslora) == (8, 8, False)
    assert settings.warnings == []
    assert settings.notes == ["without effect on the result: megatron_core, qalora_group_size"]


@pytest.mark.parity
def test_every_field_of_the_installed_peft_is_known():
    peft = pytest.importorskip("peft")
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == KNOWN
    theirs = json.loads(json.dumps(peft.LoraConfig().to_dict()))
    assert theirs == DEFAULTS
    for name in REFUSED:
        read(**{name: theirs[name]})


@pytest.mark.parity
def test_every_other_method_of_the_installed_peft_is_refused_by_name():
    peft = pytest.importorskip("peft")
    for kind in peft.PeftType:
        if kind.value == "LORA":
            continue
        with pytest.raises(ValueError, match=f"peft_type is '{kind.value}'; only 'LORA'"):
            read(peft_type=kind.value)
    # The heads: what PEFT adds for a task is a tensor that has no place here.
    for task in peft.TaskType:
        if task.value not in ("CAUSAL_LM", "FEATURE_EXTRACTION"):
            with pytest.raises(ValueError, match=f"task_type is '{task.value}'"):
                read(task_type=task.value)


@pytest.mark.parametrize("kind", ["IA3", "LOHA", "ADALORA", "VERA", "XLORA", 7, ["LORA"]])
def test_other_methods_are_named_and_refused(folder, kind):
    with pytest.raises(ValueError, match=r"peft_type is .*; only 'LORA' is supported"):
        load_adapter(edit(folder, peft_type=kind))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("SEQ_CLS", "'SEQ_CLS', which trains a classification head"),
        ("TOKEN_CLS", "token classification head"),
        ("QUESTION_ANS", "a span head"),
        ("SEQ_2_SEQ_LM", "expected 'CAUSAL_LM'"),
        (3, "task_type is 3; expected"),
    ],
)
def test_a_task_with_another_output_is_refused(folder, task, said):
    with pytest.raises(ValueError, match=said):
        load_adapter(edit(folder, task_type=task))


def test_an_adapter_for_hidden_states_loads_with_a_note(folder):
    assert load_adapter(edit(folder, task_type="CAUSAL_LM"))[1].notes == ()
    _, report = load_adapter(edit(folder, task_type="FEATURE_EXTRACTION"))
    assert report.notes == (
        "task_type is FEATURE_EXTRACTION: trained for hidden states, not for text",
    )


def test_the_revision_of_the_base_is_said_and_not_compared(folder):
    _, report = load_adapter(edit(folder, revision="v1.1"))
    assert report.notes == ("revision 'v1.1' of the base is not compared with the one in use",)


@pytest.mark.parametrize("off", [False, {}, None])
@pytest.mark.parametrize("name", ["arrow_config", "monteclora_config", "kasa_config", "use_bdlora"])
def test_a_variant_that_is_off_is_no_trouble(folder, name, off):
    assert load_adapter(edit(folder, **{name: off}))[1].notes == ()


# A flag spelt as something like it: no guess is made of what it means.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", 1), ("use_dora", "true"), ("bias", True), ("bias", ""), ("lora_bias", 0),
        ("modules_to_save", "lm_head"), ("use_qalora", "yes"), ("fan_in_fan_out", 1),
        ("use_rslora", 1), ("use_rslora", "false"), ("lora_alpha", True), ("lora_alpha", [6]),
        ("r", 3.0), ("base_model_name_or_path", 5), ("base_model_name_or_path", ["a"]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_name(folder, name, value):
    with pytest.raises(ValueError, match=f"adapter_config.json: {name} is "):
        load_adapter(edit(folder, **{name: value}))


# Numbers and regular expressions that would only fail deep inside.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank_pattern", {"(?i)Q_PROJ": 2}),
        ("rank_pattern", {"q_proj{99999999999999999999}": 2}),
        ("alpha_pattern", {"q_proj[": 2}),
        ("layers_pattern", "(?P<idx>a)"),
        ("target_modules", "q_proj)("),
        ("exclude_modules", "*q_proj"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(folder, name, value):
    with pytest.raises(ValueError, match=f"{name} is .*; expected a regular expression"):
        load_adapter(edit(folder, **{name: value}))


def test_a_number_beyond_every_float_is_refused():
    assert read(lora_alpha=10**299).alpha == 10**299
    for fields in ({"lora_alpha": 10**400}, {"alpha_pattern": {"q_proj": 10**400}}):
        with pytest.raises(ValueError, match=r"alpha.* is .*1000.*; expected a finite number"):
            read(**fields)


def test_python_says_nothing_of_a_doubtful_set(folder):
    assert load_adapter(edit(folder, target_modules="[[q.]*q_proj"))[0].projections == ("q_proj",)


# PEFT's rules for targets: fields, a module's name, and whether PEFT adapts it.
TARGETS = [
    ({"layers_to_transform": [1]}, "model.layers.1.self_attn.q_proj", True),
    ({"layers_to_transform": [1]}, "model.layers.0.self_attn.q_proj", False),
    ({"layers_to_transform": 1}, "model.layers.1.self_attn.q_proj", True),
    ({"layers_to_transform": [1]}, "layers.1.self_attn.q_proj", False),
    (
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        "layers.1.self_attn.q_proj", True,
    ),
    (
        {"layers_to_transform": [1], "layers_pattern": ["h", "(layers|blocks)"]},
        "model.layers.1.self_attn.q_proj", True,
    ),
    ({"layers_to_transform": []}, "model.layers.7.self_attn.q_proj", True),
    ({"exclude_modules": ["q_proj"]}, "model.layers.1.self_attn.q_proj", False),
    ({"exclude_modules": r".*\.1\..*"}, "model.layers.1.self_attn.q_proj", False),
    ({"target_modules": ["proj"]}, "model.layers.1.self_attn.q_proj", False),
    ({"target_modules": ["attn.q_proj"]}, "model.layers.1.self_attn.q_proj", False),
    ({"target_modules": "q_proj"}, "model.layers.1.self_attn.q_proj", False),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "path", "hit"), TARGETS)
def test_targets_are_pefts(fields, path, hit):
    assert read(**fields).targets(path) is hit


@pytest.mark.parity
@pytest.mark.parametrize(("fields", "path", "hit"), TARGETS)
def test_pefts_targets_are_these(fields, path, hit):
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs = peft.LoraConfig(**{"target_modules": ["q_proj"], **fields})
    assert bool(check_target_module_exists(theirs, path)) is hit


def test_layers_beside_a_regex_are_refused_as_in_peft(folder):
    edit(folder, target_modules=".*q_proj", layers_to_transform=[0])
    with pytest.raises(ValueError, match=r"layers_to_transform is \[0\] beside target_modules"):
        load_adapter(folder)


# How training began: what leaves the base alone, and what does not.
@pytest.mark.parametrize("init", [True, False, None, "gaussian", "orthogonal", "eva", "mica"])
def test_an_initialisation_that_keeps_the_base_is_no_trouble(folder, init):
    assert load_adapter(edit(folder, init_lora_weights=init))[1].warnings == ()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"])
def test_an_initialisation_that_changes_the_base_is_a_warning(folder, init):
    (text,) = load_adapter(edit(folder, init_lora_weights=init))[1].warnings
    assert f"init_lora_weights is '{init}': such training changes the base too" in text
    (text,) = load_adapter(edit(folder, init_lora_weights="brand_new"))[1].warnings
    assert "may change the base" in text


# A path of the author's machine stays in the file.
@pytest.mark.parametrize(
    "path",
    ["/home/somebody/secret/m", "./secret", "../secret/x", "~/secret", "C:\\secret\\m",
     "C:/secret", "a/b/secret", "file:secret"],
)  # fmt: skip
def test_no_message_prints_the_authors_path(folder, path, caplog):
    edit(folder, base_model_name_or_path=path)
    adapter, report = load_adapter(folder, base_name="org/other")
    text = str(report) + repr(report) + caplog.text
    assert "secret" not in text
    assert "a path, not shown" in text
    for change in ({"use_dora": True}, {"r": 4}, {"r": "x"}, {"brand_new": 1}):
        edit(folder, **{"use_dora": False, "r": 3, "brand_new": None, **change})
        with pytest.raises(ValueError, match=next(iter(change))) as error:
            load_adapter(folder)
        assert "secret" not in str(error.value)
    assert adapter.config["base_model_name_or_path"] == path


def test_a_config_of_another_trainer_is_named(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}})
    )
    with pytest.raises(ValueError, match="'lora_parameters' is a field of MLX"):
        load_adapter(folder)


def test_a_real_config_of_a_newer_version_loads_whole(tmp_path):
    arrays = arrays_for(modules_of(projections=("q_proj",)), 8)
    folder = write_peft(tmp_path / "new", peft_tensors(arrays))
    config = DEFAULTS | {"target_modules": ["q_proj"], "lora_alpha": 16, "from_the_future": None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapter, report = load_adapter(folder, config=BASE)
    assert {pair.scale for pair in adapter.modules.values()} == {2.0}
    assert report.notes[-1] == "unknown fields, unset: from_the_future"
    assert len(report.notes) == 2
    np.testing.assert_array_equal(
        adapter.modules["layers.0.self_attn.q_proj"].a, arrays["layers.0.self_attn.q_proj"][0]
    )
