"""PEFT folders in: what loads, what is refused, and with which words."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from molora_jax.adapters import PROJECTIONS, load_adapter
from tests.adapters.make import (
    BASE,
    arrays_for,
    dense_delta,
    modules_of,
    peft_tensors,
    write_peft,
)

QV = ("q_proj", "v_proj")


def qv_tensors(rank=3, **settings):
    return peft_tensors(arrays_for(modules_of(projections=QV), rank, **settings))


@pytest.fixture
def folder(tmp_path):
    return write_peft(tmp_path / "sql", qv_tensors(), target_modules=QV)


def edit(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


def test_every_tensor_finds_its_module(folder):
    adapter, report = load_adapter(folder, config=BASE)
    arrays = arrays_for(modules_of(projections=QV))
    assert set(adapter.modules) == set(arrays)
    for module, (a, b) in arrays.items():
        pair = adapter.modules[module]
        np.testing.assert_array_equal(pair.a, a)
        np.testing.assert_array_equal(pair.b, b)
        assert pair.scale == 2.0
    assert adapter.name == "sql"
    assert len(report.matched) == 12
    assert report.unmatched == report.warnings == report.notes == ()


def test_report_prints_what_can_be_wrong_in_silence(folder):
    adapter, report = load_adapter(folder)
    text = str(report)
    for part in ("'sql'", "matched 12 of 12", "unmatched: none", "q_proj", "v_proj", "float32"):
        assert part in text
    assert adapter.digest in text
    assert report.ranks == {"q_proj": (3,), "v_proj": (3,)}
    assert report.scales == {"q_proj": (2.0,), "v_proj": (2.0,)}
    assert report.dtypes == {"float32": 12}


@pytest.mark.parametrize("part", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_path_is_the_folder_or_a_file_in_it(folder, part):
    adapter, _ = load_adapter(str(folder / part) if part else folder)
    assert adapter.name == "sql"


def test_adapter_name_inside_the_keys_is_accepted(tmp_path, folder):
    renamed = {k.replace(".weight", ".default.weight"): v for k, v in qv_tensors().items()}
    other = write_peft(tmp_path / "other", renamed, target_modules=QV)
    assert load_adapter(other)[0].digest == load_adapter(folder)[0].digest


def test_one_matrix_under_two_names_is_refused(tmp_path):
    tensors = qv_tensors()
    key = next(iter(tensors))
    tensors[key.replace(".weight", ".default.weight")] = tensors[key] + 1
    with pytest.raises(ValueError, match="two lora_A tensors"):
        load_adapter(write_peft(tmp_path, tensors, target_modules=QV))


# A flag that changes the scale.
def test_rslora_scale(tmp_path):
    tensors = qv_tensors(rank=16)
    path = write_peft(tmp_path, tensors, r=16, lora_alpha=32, target_modules=QV, use_rslora=True)
    adapter, report = load_adapter(path)
    assert {pair.scale for pair in adapter.modules.values()} == {8.0}
    assert report.scales["q_proj"] == (8.0,)


# Orientation, where the sizes cannot tell.
def test_square_module_is_read_as_peft_stores_it(tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 8, 8)).astype(np.float32)
    module = "layers.0.self_attn.q_proj"
    path = write_peft(
        tmp_path, peft_tensors({module: (a, b)}), r=8, lora_alpha=16, target_modules=("q_proj",)
    )
    pair = load_adapter(path)[0].modules[module]
    x = rng.normal(size=8)
    expected = 2.0 * (x @ a.T.astype(np.float64)) @ b.T
    np.testing.assert_allclose(dense_delta(pair.a, pair.b, pair.scale) @ x, expected, rtol=1e-12)
    assert not np.allclose(expected, 2.0 * (x @ a) @ b)


def test_patterns_set_rank_and_scale_per_module(tmp_path):
    modules = modules_of(projections=QV)
    ranks = {m: 5 if m.endswith("v_proj") else 2 if ".1." in m else 3 for m in modules}
    path = write_peft(
        tmp_path,
        peft_tensors(arrays_for(modules, ranks)),
        target_modules=QV,
        rank_pattern={"v_proj": 5, "^model.layers.1.self_attn.q_proj": 2},
        alpha_pattern={"layers.2.self_attn.v_proj": 20},
    )
    adapter, report = load_adapter(path, config=BASE)
    assert {m: pair.rank for m, pair in adapter.modules.items()} == ranks
    assert adapter.modules["layers.0.self_attn.q_proj"].scale == 6 / 3
    assert adapter.modules["layers.1.self_attn.q_proj"].scale == 6 / 2
    assert adapter.modules["layers.1.self_attn.v_proj"].scale == 6 / 5
    assert adapter.modules["layers.2.self_attn.v_proj"].scale == 20 / 5
    assert report.ranks == {"q_proj": (2, 3), "v_proj": (5,)}
    assert report.warnings == ()


def test_pattern_that_matches_nothing_is_a_warning(folder):
    _, report = load_adapter(edit(folder, alpha_pattern={"layers.7.self_attn.q_proj": 20}))
    assert "alpha_pattern['layers.7.self_attn.q_proj']" in report.warnings[0]
    assert "WARNING" in str(report)


@pytest.mark.parametrize("fields", [{"r": 4}, {"rank_pattern": {"layers.1.self_attn.v_proj": 4}}])
def test_rank_is_held_against_the_tensors(folder, fields):
    with pytest.raises(ValueError, match=r"gives it rank 4 .*expected \(4, in\) and \(out, 4\)"):
        load_adapter(edit(folder, **fields))


def test_transposed_matrices_are_refused(tmp_path):
    tensors = {key: array.T for key, array in qv_tensors().items()}
    with pytest.raises(ValueError, match=r"are transposed: PEFT stores A \(3, in\)"):
        load_adapter(write_peft(tmp_path, tensors, target_modules=QV))


# Names that match nothing.
def test_other_prefix_is_refused_with_the_nearest_names(tmp_path):
    tensors = peft_tensors(arrays_for(modules_of()[:14]))
    renamed = {
        k.replace("base_model.model.model.", "language_model."): v for k, v in tensors.items()
    }
    with pytest.raises(ValueError, match="matched 0 of 14 modules") as error:
        load_adapter(write_peft(tmp_path, renamed), config=BASE)
    text = str(error.value)
    assert "28 tensors" in text
    assert "'language_model.layers.0.mlp.down_proj.lora_A.weight'" in text
    assert "nearest known: 'base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'" in text


# What cannot be applied is never dropped.
@pytest.mark.parametrize(
    ("key", "shape", "kind"),
    [
        ("lm_head.weight", (19, 10), "full weights"),
        ("model.embed_tokens.weight", (19, 10), "full weights"),
        ("lm_head.lora_A.weight", (3, 10), "output layer"),
        ("model.embed_tokens.lora_embedding_A", (3, 19), "embedding"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (12,), "DoRA"),
        ("model.layers.0.self_attn.q_proj.bias", (12,), "biases"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", (12,), "biases"),
        ("model.layers.0.self_attn.gate_proj.lora_A.weight", (3, 10), "nearest known"),
        ("model.layers.00.self_attn.q_proj.lora_A.weight", (3, 10), "nearest known"),
    ],
)
def test_one_tensor_without_a_place_refuses_the_load(tmp_path, key, shape, kind):
    extra = {f"base_model.model.{key}": np.ones(shape, np.float32)}
    path = write_peft(tmp_path, qv_tensors() | extra, target_modules=QV)
    with pytest.raises(ValueError, match="matched 6 of") as error:
        load_adapter(path)
    assert f"'base_model.model.{key}' ({kind}" in str(error.value).replace(
        "LoRA on an ", ""
    ).replace("LoRA on the ", "")
    assert "merge it" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.w"]),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 2}),
        ("peft_type", "IA3"),
    ],
)
def test_fields_that_change_the_result_are_refused_by_name(folder, field, value):
    with pytest.raises(ValueError, match=rf"'sql': adapter_config.json: {field} is .*; \w+"):
        load_adapter(edit(folder, **{field: value}))


# Fields that are newer, or nobody's.
def test_fields_at_rest_are_no_trouble(folder):
    edit(folder, eva_config=None, monteclora_config=None, peft_version="0.21.2", use_dora=False)
    edit(folder, qalora_group_size=16, megatron_core="megatron.core", lora_dropout=0.1, bias="none")
    _, report = load_adapter(edit(folder, brand_new=None, another=False))
    ignored, unknown = report.notes
    assert ignored.endswith("lora_dropout, megatron_core, qalora_group_size")
    assert unknown.endswith("another, brand_new")
    assert report.scales["q_proj"] == (2.0,)
    assert report.warnings == ()


@pytest.mark.parametrize("value", [True, 1, 0, "on", {"a": 1}, [3]])
def test_unknown_field_that_is_set_is_refused(folder, value):
    with pytest.raises(ValueError, match="unknown field 'brand_new'"):
        load_adapter(edit(folder, brand_new=value))


def test_misspelt_field_names_the_known_one(folder):
    with pytest.raises(ValueError, match="did you mean 'use_rslora'"):
        load_adapter(edit(folder, use_rs_lora=True))


def test_initialisation_that_changes_the_base_is_a_warning(folder):
    assert load_adapter(edit(folder, init_lora_weights="gaussian"))[1].warnings == ()
    _, report = load_adapter(edit(folder, init_lora_weights="pissa_niter_16"))
    assert "pissa_niter_16" in report.warnings[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", "3"),
        ("r", True),
        ("lora_alpha", "6"),
        ("use_rslora", "yes"),
        ("rank_pattern", {"q_proj": 2.5}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", ["q_proj"]),
        ("alpha_pattern", {"(q_proj": 2}),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", "(q_proj"),
        ("layers_to_transform", ["0"]),
    ],
)
def test_field_of_the_wrong_type_is_named(folder, field, value):
    with pytest.raises(ValueError, match=f"{field}.* is .*; expected"):
        load_adapter(edit(folder, **{field: value}))


def test_missing_scale_fields_are_said(tmp_path):
    path = write_peft(tmp_path, qv_tensors(rank=8), target_modules=QV)
    (path / "adapter_config.json").write_text(json.dumps({"target_modules": list(QV)}))
    adapter, report = load_adapter(path)
    assert {pair.scale for pair in adapter.modules.values()} == {1.0}
    assert [text.split()[0] for text in report.warnings] == ["peft_type", "r", "lora_alpha"]


# target_modules against the tensors.
@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "v_proj"],
        ["self_attn.q_proj", "model.layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj",
         "layers.2.self_attn.v_proj"],
        r".*self_attn\.(q|v)_proj",
        # As a trainer that also knows multimodal models writes it.
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|v_proj|up_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|v_proj)))",
    ],
)  # fmt: skip
def test_targets_as_list_or_regex(folder, targets):
    _, report = load_adapter(edit(folder, target_modules=targets), config=BASE)
    assert report.warnings == ()


def test_all_linear_means_all_seven(tmp_path):
    arrays = arrays_for(modules_of())
    path = write_peft(tmp_path / "all", peft_tensors(arrays), target_modules="all-linear")
    assert load_adapter(path, config=BASE)[0].projections == PROJECTIONS
    del arrays["layers.2.mlp.down_proj"]
    path = write_peft(tmp_path / "cut", peft_tensors(arrays), target_modules="all-linear")
    with pytest.raises(ValueError, match=r"targets 1 modules .*: layers\.2\.mlp\.down_proj"):
        load_adapter(path, config=BASE)


def test_targets_without_tensors_are_refused(folder):
    with pytest.raises(ValueError, match=r"targets 3 modules .*layers\.0\.self_attn\.k_proj"):
        load_adapter(edit(folder, target_modules=["q_proj", "v_proj", "k_proj"]))


def test_missing_layer_shows_only_against_the_base(tmp_path):
    tensors = {key: array for key, array in qv_tensors().items() if "layers.2" not in key}
    path = write_peft(tmp_path / "sql", tensors, target_modules=QV)
    load_adapter(path)
    with pytest.raises(ValueError, match=r"targets 2 modules .*layers\.2\.self_attn\.q_proj"):
        load_adapter(path, config=BASE)
    assert load_adapter(edit(path, layers_to_transform=[0, 1]), config=BASE)[1].warnings == ()
    assert load_adapter(edit(path, layers_pattern="layers"), config=BASE)[1].warnings == ()


def test_excluded_modules_need_no_tensors(folder):
    edit(folder, target_modules="all-linear", exclude_modules=r".*(k_proj|o_proj|mlp\..*)")
    assert load_adapter(folder, config=BASE)[1].warnings == ()


def test_tensors_decide_where_targets_are_narrower(folder):
    adapter, report = load_adapter(edit(folder, target_modules=["q_proj", "lm_head"]))
    assert adapter.projections == QV
    assert (
        "3 modules have tensors, but target_modules, exclude_modules or layers"
        in report.warnings[0]
    )
    assert report.warnings[1].endswith("not applied: lm_head")


# Broken files.
def test_no_tensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds 0 tensors"):
        load_adapter(write_peft(tmp_path, {}))


def test_nonfinite_weights_are_refused_with_name_and_count(tmp_path):
    tensors = qv_tensors()
    prefix = "base_model.model.model.layers.1.self_attn."
    tensors[f"{prefix}q_proj.lora_B.weight"][2, :2] = np.nan
    tensors[f"{prefix}v_proj.lora_A.weight"][0, 0] = np.inf
    path = write_peft(tmp_path, tensors, target_modules=QV)
    with pytest.raises(ValueError, match="NaN or infinite") as error:
        load_adapter(path)
    assert "layers.1.self_attn.q_proj.lora_B (2 values)" in str(error.value)
    assert "layers.1.self_attn.v_proj.lora_A (1 values)" in str(error.value)
    adapter, report = load_adapter(path, allow_nonfinite=True)
    assert sum(adapter.nonfinite().values()) == 3
    assert "q_proj.lora_B (2)" in report.warnings[0]


@pytest.mark.parametrize("matrix", "AB")
def test_half_a_pair_is_refused(tmp_path, matrix):
    tensors = qv_tensors()
    key = f"base_model.model.model.layers.1.self_attn.v_proj.lora_{matrix}.weight"
    del tensors[key]
    with pytest.raises(ValueError, match=f"no lora_{matrix}; .*{key}"):
        load_adapter(write_peft(tmp_path, tensors, target_modules=QV))


@pytest.mark.parametrize("shape", [(0,), (0, 10), (3, 0)])
def test_tensors_that_sharded_training_left_empty_are_refused(tmp_path, shape):
    tensors = qv_tensors()
    tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"] = np.ones(shape, "f")
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.v_proj .*a number in them.*ZeRO-3"
    ):
        load_adapter(write_peft(tmp_path, tensors, target_modules=QV))


def test_zero_update_is_a_warning(tmp_path):
    tensors = {k: v * 0 if "lora_B" in k else v for k, v in qv_tensors().items()}
    _, report = load_adapter(write_peft(tmp_path, tensors, target_modules=QV))
    assert report.warnings == ("every lora_B is zero: the adapter changes nothing",)


def test_other_base_is_refused_by_its_sizes(tmp_path):
    arrays = arrays_for(modules_of(projections=QV))
    a, b = arrays["layers.1.self_attn.v_proj"]
    arrays["layers.1.self_attn.v_proj"] = (a, np.concatenate([b, b]))
    path = write_peft(tmp_path, peft_tensors(arrays), target_modules=QV)
    load_adapter(path)
    with pytest.raises(ValueError, match=r"lora_B \(12, 3\).*needs \(r, 10\) and \(6, r\)"):
        load_adapter(path, config=BASE)


def test_what_does_not_fit_another_base_says_first_which_bases_these_are(tmp_path):
    arrays = arrays_for(modules_of(projections=QV))
    arrays["layers.3.self_attn.q_proj"] = arrays["layers.0.self_attn.q_proj"]
    path = write_peft(tmp_path, peft_tensors(arrays), target_modules=r".*\.(q|v)_proj")
    edit(path, base_model_name_or_path="org/large")
    words = "^adapter .* was trained on org/large and does not fit org/small: .*has 3 layers"
    with pytest.raises(ValueError, match=words):
        load_adapter(path, config=BASE, base_name="org/small")
    with pytest.raises(ValueError, match="has 3 layers") as refused:
        load_adapter(path, config=BASE, base_name="other/large")
    assert "does not fit" not in str(refused.value)


def test_a_larger_base_with_other_sizes_is_said_to_be_another(tmp_path):
    path = write_peft(tmp_path, peft_tensors(arrays_for(modules_of(projections=QV))),
                      target_modules=QV)  # fmt: skip
    other = dataclasses.replace(BASE, num_layers=9, hidden_size=BASE.hidden_size + 2)
    with pytest.raises(ValueError, match="was trained on another base") as refused:
        load_adapter(path, config=other)
    assert "target_modules" not in str(refused.value)


def test_layer_past_the_base_is_refused(tmp_path):
    arrays = arrays_for(modules_of(projections=QV))
    arrays["layers.3.self_attn.q_proj"] = arrays["layers.0.self_attn.q_proj"]
    path = write_peft(tmp_path, peft_tensors(arrays), target_modules=r".*\.(q|v)_proj")
    with pytest.raises(ValueError, match="layer 3; the base model has 3 layers"):
        load_adapter(path, config=BASE)


def test_base_names_are_compared_by_their_last_part(folder):
    edit(folder, base_model_name_or_path="org/SmolLM2-135M")
    assert load_adapter(folder, base_name="models/smollm2-135m")[1].warnings == ()
    # This project's own name is that of the instruct model, which the hub has under another.
    assert len(load_adapter(folder, base_name="smollm2-135m")[1].warnings) == 1
    edit(folder, base_model_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct")
    assert load_adapter(folder, base_name="smollm2-135m")[1].warnings == ()
    _, report = load_adapter(folder, base_name="org/other")
    assert report.warnings == (
        "trained on HuggingFaceTB/SmolLM2-135M-Instruct, used with org/other",
    )


def test_private_path_of_the_author_is_not_printed(folder):
    edit(folder, base_model_name_or_path="/home/somebody/secret/model")
    _, report = load_adapter(folder, base_name="org/other")
    assert "secret" not in str(report)
    assert "a path, not shown" in str(report)


def test_truncated_file_is_refused(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="cut short or damaged"):
        load_adapter(folder)


def test_quantised_tensors_are_refused(tmp_path):
    tensors = {key: np.ones(array.shape, np.int8) for key, array in qv_tensors().items()}
    with pytest.raises(ValueError, match=r"is int8; expected one of float16"):
        load_adapter(write_peft(tmp_path, tensors, target_modules=QV))


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_config_is_refused(folder, text):
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"adapter_config.json (cannot be read as JSON|holds a list)"
    ):
        load_adapter(folder)


def test_pickle_is_refused_with_a_way_out(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model.bin, a pickle.*safe_serialization=True"):
        load_adapter(folder)


def test_missing_files_say_where_was_looked(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="no adapter at"):
        load_adapter(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="sub-folders have one: sql"):
        load_adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no adapter_model\.safetensors"):
        load_adapter(folder)


# Tensors keep their dtype, each its own.
def test_storage_dtypes_are_kept_and_reported(tmp_path):
    tensors = qv_tensors()
    for number, key in enumerate(tensors):
        tensors[key] = tensors[key].astype([np.float16, ml_dtypes.bfloat16, np.float64][number % 3])
    adapter, report = load_adapter(write_peft(tmp_path, tensors, target_modules=QV))
    assert report.dtypes == {"float16": 4, "bfloat16": 4, "float64": 4}
    for module, pair in adapter.modules.items():
        np.testing.assert_array_equal(
            pair.a, tensors[f"base_model.model.model.{module}.lora_A.weight"]
        )


@pytest.mark.parametrize("name", ["", "a/b", "..", "a:b", "a\\b", "a\nb"])
def test_name_must_be_usable_as_a_folder(folder, name):
    with pytest.raises(ValueError, match="name="):
        load_adapter(folder, name=name)


def test_name_is_a_label_and_no_part_of_the_identity(folder):
    one, other = load_adapter(folder, name="one")[0], load_adapter(folder, name="other")[0]
    assert one.digest == other.digest
    changed, _ = load_adapter(edit(folder, lora_alpha=7))
    assert changed.digest != one.digest
