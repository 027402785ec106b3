"""inspect: adapters that load, that do not, of other architectures; compositions; checkpoints."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from molora_jax.adapters import AdapterBank, Composition, load_adapter
from molora_jax.models.tiny import tiny_tokenizer
from molora_jax.routing import VocabularyRouter
from tests.adapters.make import dense_delta
from tests.parity.small_models import hf_tensors, small_model, write_folder
from tests.tools.conftest import BASE


def copied(folder, to, *, tensors=None, **fields):
    """The folder with other tensors {name: array or None} and config fields."""
    shutil.copytree(folder, to)
    config = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(config | fields))
    stored = load_file(to / "adapter_model.safetensors") | (tensors or {})
    save_file({k: v for k, v in stored.items() if v is not None}, to / "adapter_model.safetensors")
    return to


def inspected(tool, *argv):
    result = tool("inspect", *argv, "--json")
    found = json.loads(result.out)
    assert (result.code, result.err) == (0 if found["loads"] else 1, "")
    return found


def facts(text):
    """{name: what is said of it} of a report."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line.strip())


def test_an_adapter_is_described_with_its_norms_against_its_base(tool, folders, base):
    found = inspected(tool, folders["b"], "--base", BASE)
    adapter, _ = load_adapter(folders["b"])
    assert found["type"] == "LORA"
    assert found["base"] == "org/tiny-random"
    assert (found["r"], found["alpha"], found["use_rslora"]) == (3, 8, True)
    assert found["target_modules"] == ["q_proj", "v_proj"]
    assert found["dtypes"] == {"float32": 16}
    assert found["digest"] == adapter.digest
    assert found["loads"] is True
    against = found["against"]
    assert (against["matched"], against["of"], against["unmatched"]) == (16, 16, [])
    v = found["projections"]["v_proj"]
    assert v["modules"] == 4
    assert v["ranks"] == [3]
    assert v["scales"] == [8 / 3**0.5]
    name = "layers.2.self_attn.v_proj"
    pair = adapter.modules[name]
    weight = np.asarray(base.decoder.layers.v_proj.weight[...][2], np.float64)
    share = np.linalg.norm(dense_delta(pair.a, pair.b, pair.scale)) / np.linalg.norm(weight)
    assert against["relative_updates"]["v_proj"]["2"] == pytest.approx(share, rel=1e-5)
    whole = sum(
        np.linalg.norm(dense_delta(p.a, p.b, p.scale)) ** 2
        for m, p in adapter.modules.items() if m.endswith("v_proj")
    )  # fmt: skip
    assert v["norm_update"] == pytest.approx(whole**0.5, rel=1e-9)
    text = tool("inspect", folders["b"], "--base", BASE).out
    said = facts(text)
    assert said["matched"] == "16 of 16 with tiny-random"
    assert said["loads"] == "yes"


def test_a_broken_adapter_is_described_and_not_refused(tool, folders, tmp_path):
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    b = load_file(folders["a"] / "adapter_model.safetensors")[key].copy()
    b[0, :2] = np.nan, np.inf
    found = inspected(tool, copied(folders["a"], tmp_path / "nan", tensors={key: b}))
    assert found["nonfinite"] == {key: 2}
    assert found["loads"] is False
    assert "NaN" in found["refusal"]
    assert found["projections"]["q_proj"]["norm_b"] is None
    assert found["projections"]["v_proj"]["norm_b"] > 0
    assert facts(tool("inspect", tmp_path / "nan").out)["non-finite"] == "2"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_other_kinds_say_what_they_are_and_why_they_would_not_load(
    tool, folders, tmp_path, fields, words
):
    folder = copied(folders["a"], tmp_path / "other", **fields, alpha_pattern={"mlp.up_proj": 16})
    found = inspected(tool, folder)
    assert found["loads"] is False
    assert words in found["refusal"]
    assert found["projections"]["up_proj"]["norm_update"] > 0
    assert found["projections"]["up_proj"]["scales"] == [16 / 4]
    assert found["projections"]["q_proj"]["scales"] == [8 / 4]
    if "peft_type" not in fields:
        assert found["variants"] == fields
    assert words in tool("inspect", tmp_path / "other").out


def test_tensors_without_a_place_are_listed(tool, folders, tmp_path):
    """Field reports F4, F7, F17."""
    extra = {
        "base_model.model.lm_head.lora_A.weight": np.ones((2, 64), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.ones((260, 2), np.float32),
        "base_model.model.model.norm.weight": np.ones(64, np.float32),
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((4, 63), np.float32),
    }
    folder = copied(folders["a"], tmp_path / "more", tensors=extra)
    found = inspected(tool, folder, "--base", BASE)
    against = found["against"]
    assert set(against["unmatched"]) == set(extra)
    assert (against["matched"], against["of"]) == (55, 59)
    assert found["projections"]["lm_head"]["modules"] == 1
    assert set(found["other_tensors"]) == {"base_model.model.model.norm.weight"}
    assert found["loads"] is False


def test_a_gpt_neox_adapter_is_described(tool, molora_data):
    """A real one: another architecture, which this decoder cannot run."""
    folder = molora_data / "adapters" / "open-calm-1b-delta-r1"
    found = inspected(tool, folder, "--base", BASE)
    assert found["base"] == "cyberagent/open-calm-1b"
    assert (found["r"], found["alpha"], found["tensors"]) == (1, 32, 48)
    assert found["dtypes"] == {"float16": 48}
    assert found["against"]["matched"] == 0
    (projection,) = found["projections"].items()
    assert projection[0] == "query_key_value"
    assert projection[1]["modules"] == 24
    assert (projection[1]["in"], projection[1]["out"]) == ([2048], [6144])
    assert projection[1]["scales"] == [32]
    assert "fused projection" in found["refusal"]


def test_a_private_path_of_the_author_is_not_printed(tool, folders, tmp_path):
    folder = copied(folders["a"], tmp_path / "x", base_model_name_or_path="/home/someone/secret")
    for result in (tool("inspect", folder), tool("inspect", folder, "--json")):
        assert "someone" not in result.out
        assert "(a path, not shown)" in result.out


@pytest.fixture
def composition(base, folders, tmp_path):
    bank = AdapterBank(base.config, num_slots=3, max_rank=4)
    for slot, name in ((2, "a"), (0, "b")):
        bank.load(folders[name], slot=slot)
    router = VocabularyRouter.from_ranges([(0, 100, 0), (100, 256, 1)], vocab_size=260)
    made = Composition(
        base_name=base.name, base_digest=base.digest, bank=bank, router=router,
        column_digests=[bank.occupant(name).digest for name in "ab"],
        metrics={"nll": 1.5},
    )  # fmt: skip
    return made.save(tmp_path / "mix")


def test_a_composition_is_described_with_what_does_not_agree(tool, composition, folders):
    found = inspected(tool, composition, "--base", BASE)
    assert found["problems"] == []
    assert found["columns"] == ["a", "b"]
    assert [(each["name"], each["slot"]) for each in found["adapters"]] == [("b", 0), ("a", 2)]
    assert found["router_arrays"] == {"table": {"dtype": "int32", "shape": [260]}}
    said = facts(tool("inspect", composition).out)
    assert said["columns"] == "a, b"
    assert said["metric"] == "nll 1.5"
    shutil.rmtree(composition / "adapters" / "a")
    copied(folders["b"], composition / "adapters" / "a")
    shutil.rmtree(composition / "adapters" / "b")
    problems = inspected(tool, composition)["problems"]
    assert any("'a' is not the one saved" in each for each in problems)
    assert any("adapter 'b': " in each for each in problems)
    assert "column 0 has no adapter" in problems
    (composition / "molora.json").write_text("{")
    assert tool("inspect", composition).code == 1


def test_a_composition_beside_another_base_is_still_the_one_saved(tool, composition, tmp_path):
    settings, arrays = small_model("llama")
    other = write_folder(tmp_path / "other", settings, hf_tensors(arrays))
    tiny_tokenizer().backend.save(str(other / "tokenizer.json"))
    found = json.loads(tool("inspect", composition, "--base", other, "--json").out)
    assert found["columns"] == ["a", "b"] and not found["loads"]
    assert not [text for text in found["problems"] if "not the one saved" in text]
    assert [text for text in found["problems"] if "made for another base" in text]
    assert json.loads(tool("inspect", composition, "--base", BASE, "--json").out)["loads"]


def test_a_router_of_another_save_is_a_problem(tool, composition):
    record = json.loads((composition / "molora.json").read_text())
    record["columns"].reverse()
    (composition / "molora.json").write_text(json.dumps(record))
    found = json.loads(tool("inspect", composition, "--json").out)
    assert "molora.json and router.safetensors are not those saved together" in found["problems"]
