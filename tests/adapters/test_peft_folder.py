"""The files of an adapter: where they are looked for, and what may lie there instead."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from molora_jax.adapters import load_adapter
from molora_jax.adapters.peft_folder import read_peft_folder
from tests.adapters.make import arrays_for, modules_of, peft_tensors, write_peft

WEIGHTS = "adapter_model.safetensors"
QV = ("q_proj", "v_proj")


def tensors():
    return peft_tensors(arrays_for(modules_of(projections=QV)))


@pytest.fixture
def folder(tmp_path):
    return write_peft(tmp_path / "sql", tensors(), target_modules=QV)


# An adapter of an architecture that is not ours can be read, if not used.
def test_a_foreign_adapter_is_read_as_it_stands(tmp_path):
    foreign = {
        "base_model.model.gpt_neox.layers.0.attention.query_key_value.lora_A.weight": np.ones(
            (1, 8), np.float16
        ),
        "base_model.model.anything.int8": np.arange(3, dtype=np.int8),
    }
    written = write_peft(tmp_path / "x", foreign, r=1, use_dora=True, odd=[1])
    found = read_peft_folder(written / WEIGHTS)
    assert (found.path, found.label, found.metadata) == (written, "x", {"format": "pt"})
    assert found.config["odd"] == [1]
    assert set(found.tensors) == set(foreign)
    for name, array in foreign.items():
        assert found.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(found.tensors[name], array)
    with pytest.raises(ValueError, match="use_dora is True"):
        load_adapter(written)


def test_a_real_foreign_adapter_is_read_and_refused(molora_data):
    path = molora_data / "adapters" / "open-calm-1b-delta-r1"
    if not path.is_dir():
        pytest.skip(f"{path} is not there")
    found = read_peft_folder(path)
    assert (len(found.tensors), found.config["r"]) == (48, 1)
    with pytest.raises(ValueError, match=r"matched 0 of 24 modules.*fused projection"):
        load_adapter(path)


# The local Hugging Face cache: read, never filled.
@pytest.fixture
def hub(tmp_path, monkeypatch, folder):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--my.adapter"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    (repo / "blobs").mkdir()
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        (repo / "blobs" / str(number)).write_bytes(file.read_bytes())
        os.symlink(f"../../blobs/{number}", snapshot / file.name)
    return repo


@pytest.mark.parametrize("revision", ["", "@main", "@abc123"])
def test_an_adapter_of_the_cache_is_found_by_name(hub, folder, revision):
    adapter, report = load_adapter(f"org/my.adapter{revision}")
    assert adapter.digest == load_adapter(folder)[0].digest
    assert adapter.name == "my.adapter"
    assert report.source == f"org/my.adapter{revision}"


def test_a_path_wins_over_the_cache(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = peft_tensors(arrays_for(modules_of(projections=QV), seed=5))
    write_peft(tmp_path / "org" / "my.adapter", other, target_modules=QV)
    adapter, _ = load_adapter("org/my.adapter")
    assert adapter.digest != load_adapter("org/my.adapter@main")[0].digest


@pytest.mark.parametrize("name", ["org/none", "org/my.adapter@v9"])
def test_what_the_cache_lacks_is_never_fetched(hub, name, monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    dial = lambda *_, **__: pytest.fail("dialled")  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", dial)
    with pytest.raises(FileNotFoundError, match="no adapter at") as error:
        load_adapter(name)
    repo, _, revision = name.partition("@")
    assert str(hub.parent / f"models--{repo.replace('/', '--')}") in str(error.value)
    assert f"'hf download {repo}{' --revision v9' * bool(revision)}'" in str(error.value)


def test_a_cache_without_the_weights_says_so(hub):
    (hub / "snapshots" / "abc123" / WEIGHTS).unlink()
    said = f"abc123 has no {WEIGHTS}.*'hf download org/my.adapter'"
    with pytest.raises(FileNotFoundError, match=said):
        load_adapter("org/my.adapter")


def test_a_misspelt_name_of_the_cache_gets_the_nearest(hub):
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'org/my\.adapter'"):
        load_adapter("org/myadapter")


@pytest.mark.parametrize(
    "name", ["../sql", "org/..", "org/my.adapter@..", "org/my.adapter@../../x"]
)
def test_a_name_cannot_lead_out_of_the_cache(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "hub")
    (tmp_path / "hub" / "org").mkdir()
    if name in ("../sql", "org/.."):  # these are paths, and read as such
        (tmp_path / "sql").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no adapter"):
        load_adapter(name)
    write_peft(tmp_path / "outside", tensors(), target_modules=QV)
    (hub / "refs" / "main").write_text("../../../outside")
    assert (hub / "snapshots" / "../../../outside" / WEIGHTS).exists()
    with pytest.raises(FileNotFoundError, match="none of that name in the Hugging Face cache"):
        load_adapter("org/my.adapter")


# What lies there instead: what it is, and the way out.
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.bin", r"a pickle.*safe_serialization=True"),
        ("pytorch_model.pt", "a pickle"),
        ("adapters.safetensors", "an MLX adapter.*convert it to PEFT"),
        ("pytorch_lora_weights.safetensors", "a LoRA for diffusers"),
        ("Llama-lora-f16.gguf", "a GGUF file.*load the PEFT folder"),
        ("molora.json", r"a composition, which --composition, --add_to and Composition\.load"),
    ],
)
def test_another_layout_is_named(folder, name, said):
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        load_adapter(folder)
    if not name.endswith(".json"):
        with pytest.raises(ValueError, match=f"{name} is .*{said}"):
            load_adapter(folder / name)


def test_a_model_is_no_adapter(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(ValueError, match="a whole model, not an adapter"):
        load_adapter(tmp_path)


def test_one_file_of_weights_is_no_adapter(tmp_path):
    save_file(
        {"lora_unet_x.lora_down.weight": np.ones((1, 2), np.float32)}, tmp_path / "s.safetensors"
    )
    with pytest.raises(ValueError, match=r"has no config.*expected a folder with adapter_config"):
        load_adapter(tmp_path / "s.safetensors")


# Damaged files: each says what happened to it.
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"empty \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "Git-LFS pointer.*git lfs pull",
        ),
        (b"PK\x03\x04" + bytes(60), "pickle"),
        (b"\x80\x02}q\x00." + bytes(60), "pickle"),
        (b"GGUF" + bytes(60), "GGUF"),
        (b"<!DOCTYPE html><html>" + bytes(60), "web page"),
        (b"\xff" * 64, "cut short, damaged or no safetensors"),
    ],
)
def test_damaged_weights_are_named(folder, content, said):
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=f"adapter 'sql': {WEIGHTS}.*{said}"):
        load_adapter(folder)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b'{"r": NaN}', "NaN is no JSON number"),
        (b'{"r": 8, "r": 16}', "stands twice"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git-LFS"),
        (b"\xff\xfe{}", "no UTF-8"),
        (b'{"r": 1e999}', "too large"),
    ],
)
def test_a_damaged_config_is_named(folder, content, said):
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"adapter 'sql': adapter_config.json.*{said}"):
        load_adapter(folder)


@pytest.mark.parametrize("cut", [1, 7, 8, 40, 400, -1])
def test_a_file_cut_anywhere_is_refused(folder, cut):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"cut short|damaged|empty"):
        load_adapter(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_config.json"])
def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path, name):
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match="leads out of"):
        load_adapter(folder)


def test_a_link_to_the_folder_is_followed(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder)
    assert load_adapter(tmp_path / "latest")[0].name == "sql"


def test_a_folder_in_the_place_of_a_file_is_refused(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(ValueError, match="is a folder; expected a file"):
        load_adapter(folder)


def test_swapped_files_are_refused(folder):
    (folder / WEIGHTS).rename(folder / "x")
    (folder / "adapter_config.json").rename(folder / WEIGHTS)
    (folder / "x").rename(folder / "adapter_config.json")
    with pytest.raises(ValueError, match="looks like a safetensors file"):
        load_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 3}))
    with pytest.raises(ValueError, match="no safetensors file"):
        load_adapter(folder)
