"""Finding base models by name: paths, the Hugging Face cache, names that nobody knows, digests."""

import hashlib
import json
import os
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.models import base_digest, load_base, params_digest
from molora_jax.models.digest import file_digest
from molora_jax.models.tiny import tiny_tokenizer
from molora_jax.models.weights import SETTINGS_FILES
from tests.models.test_gguf import write_model
from tests.parity.small_models import hf_tensors, small_model, write_folder


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Caches of the test's own, and no way out."""
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path):
    settings, arrays = small_model("llama")
    path = write_folder(tmp_path / "model", settings, hf_tensors(arrays))
    tiny_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path


def cached(hub, folder, name="models--org--name", commit="abc123", ref="main"):
    snapshot = hub / name / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    (hub / name / "refs").mkdir(parents=True, exist_ok=True)
    (hub / name / "refs" / ref).write_text(commit)
    return snapshot


def test_folder(folder):
    base = load_base(str(folder))
    assert base.config.model_type == "llama"
    assert base.digest == base_digest(str(folder))
    assert base.decoder.embedding[...].dtype == jnp.float32
    half = load_base(str(folder), dtype="bfloat16")
    assert half.decoder.embedding[...].dtype == jnp.bfloat16
    assert half.digest == base.digest
    assert params_digest(half.decoder) != params_digest(base.decoder)
    with pytest.raises(ValueError, match="float8"):
        load_base(str(folder), dtype="float8")


def test_a_base_folder_that_also_holds_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match="also holds an adapter"):
        load_base(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", *SETTINGS_FILES])
def test_digest_of_a_folder_changes_with_each_file_that_decides(folder, name):
    before = base_digest(str(folder))
    file = folder / name
    if name == "config.json":
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 777.0}))
    else:
        file.write_bytes((file.read_bytes() if file.exists() else b"") + b" ")
    assert base_digest(str(folder)) != before
    if name == "config.json":
        assert load_base(str(folder)).digest == base_digest(str(folder))
    changed = base_digest(str(folder))
    (folder / "notes.txt").write_text("no part of the model")
    assert base_digest(str(folder)) == changed


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_warned_of(folder, caplog):
    base = load_base(str(folder))
    assert base.tokenizer.vocab_size > base.config.vocab_size
    said = f"tokenizer has {base.tokenizer.vocab_size} tokens, its embedding 61 rows"
    assert said in caplog.text
    caplog.clear()
    load_base("tiny-random")
    assert "embedding" not in caplog.text


def test_gguf_has_no_tokenizer_unless_its_metadata_has(tmp_path):
    write_model(tmp_path / "m.gguf", "llama")
    with pytest.raises(ValueError, match="tokenizer model None"):
        load_base(str(tmp_path / "m.gguf"))


def test_paths_that_hold_no_model(tmp_path):
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(ValueError, match=r"without the ending \.gguf"):
        load_base(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"no config\.json\. Expected"):
        load_base(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json, but its sub-folder model does: name "):
        load_base(str(tmp_path))
    for stated, words in (("org/large", ", trained on org/large"), ("/home/me/x", ""), (None, "")):
        adapter = {"peft_type": "LORA", "base_model_name_or_path": stated}
        (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
        with pytest.raises(
            ValueError, match=rf"is an adapter \(adapter_config\.json\){words}"
        ) as no:
            load_base(str(tmp_path))
        assert "/home/me" not in str(no.value)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"is an adapter \(adapter_config\.json\)\. Load its base"):
        load_base(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="2 GGUF files; name one"):
        load_base(str(tmp_path))


def test_hugging_face_cache(tmp_path, folder):
    cached(tmp_path / "hub", folder)
    expected = params_digest(load_base(str(folder)).decoder)
    for name in ("org/name", "org/name@main", "org/name@abc123"):
        base = load_base(name)
        assert base.name == name
        assert params_digest(base.decoder) == expected


def test_incomplete_cache_offline_says_where_and_how(tmp_path, folder):
    snapshot = cached(tmp_path / "hub", folder)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"hf download org/name'") as caught:
        load_base("org/name")
    assert str(tmp_path / "hub" / "models--org--name") in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"at revision v2 .* --revision v2'"):
        load_base("org/name@v2")


def test_online_a_missing_model_is_downloaded_into_the_same_cache(tmp_path, folder, monkeypatch):
    import huggingface_hub

    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(cached(tmp_path / "hub", folder))

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    load_base("org/name@main")
    assert (asked["name"], asked["revision"]) == ("org/name", "main")
    assert asked["cache_dir"] == tmp_path / "hub"
    asked.clear()
    load_base("org/name@main")
    assert not asked  # it is there now
    shutil.rmtree(tmp_path / "hub")

    def unreachable(name, **options):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConnectionError, match="no route to host"):
        load_base("org/name")


def test_unknown_names_get_the_nearest(tmp_path, folder):
    with pytest.raises(ValueError, match="did you mean smollm2-135m"):
        load_base("smollm-135")
    with pytest.raises(ValueError, match="Known are smollm2-135m, tiny-random"):
        load_base("zzz")
    cached(tmp_path / "hub", folder, name="models--org--modelname")
    with pytest.raises(ValueError, match="did you mean org/modelname"):
        load_base("modelname")


def test_tiny_random_is_the_same_every_time_and_not_degenerate():
    base, again = load_base("tiny-random"), load_base("tiny-random")
    assert params_digest(base.decoder) == params_digest(again.decoder)
    assert base.digest == again.digest == base_digest("tiny-random")
    tokens = jnp.asarray([base.tokenizer.encode("Any words will do here, and a few more.")])
    logits = base.decoder.logits(base.decoder(tokens).hidden)[0]
    assert 0.5 < float(logits.std()) < 2.0
    assert len(set(np.asarray(logits.argmax(-1)).tolist())) > len(logits) // 2


def test_params_digest_sees_every_change():
    base = load_base("tiny-random")
    before = params_digest(base.decoder)
    leaves, treedef = jax.tree.flatten(base.decoder)
    for index, leaf in enumerate(leaves):
        changed = leaf.at[(0,) * leaf.ndim].add(1e-3)
        other = jax.tree.unflatten(treedef, [*leaves[:index], changed, *leaves[index + 1 :]])
        assert params_digest(other) != before
    assert params_digest(base.decoder) == before


def test_file_digest_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    expected = hashlib.sha256(b"one").hexdigest()
    assert file_digest(path) == expected
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)  # not hashed again
        assert file_digest(path) == expected
    before = path.stat()
    time.sleep(0.02)  # longer than a tick of the file system's clock
    path.write_bytes(b"two")  # of the same size, and with its modification time put back
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(path) == hashlib.sha256(b"two").hexdigest()
    path.write_bytes(b"three")
    expected = hashlib.sha256(b"three").hexdigest()
    assert file_digest(path) == expected
    (record,) = (tmp_path / "cache" / "digests").iterdir()
    for damaged in ("", "{", "[]", "null", '{"a": 1}', '{"sha256": 1}'):
        record.write_text(damaged)
        assert file_digest(path) == expected
    record.unlink()
    record.mkdir()  # cannot be written
    assert file_digest(path) == expected
