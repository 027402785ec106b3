"""Adapters loaded and unloaded over HTTP: at once, from their folder alone, or not at all."""

import concurrent.futures
import os
import shutil

import pytest

from molora_jax.adapters import save_adapter
from molora_jax.serving.catalog import Catalog
from molora_jax.serving.errors import ApiError
from tests.serving.conftest import CASES, LATER, prompt_of, until, weights

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def adapters(served):
    """The server, with what a test loaded taken away again."""
    yield served
    for name in set(served.service.catalog.adapters) - set("abcd"):
        assert served.call("POST", UNLOAD, {"lora_name": name})[0] == 200
    served.settle()


def load(served, name, path, **fields):
    return served.call("POST", LOAD, {"lora_name": name, "lora_path": path} | fields)


def text(served, name):
    body = {"prompt": prompt_of(name)} | CASES[name][0]
    return served.complete(**body)["choices"][0]["text"]


def test_an_adapter_is_served_and_listed_at_once_and_gone_when_unloaded(adapters):
    status, words, _ = load(adapters, "e", "e")
    assert (status, words) == (200, "Success: LoRA adapter 'e' added successfully.")
    listed = {each.id: each for each in adapters.client.models.list()}
    assert (listed["e"].parent, listed["e"].root) == ("tiny", "e")
    assert text(adapters, "loaded later") == adapters.expected["loaded later"][0].text
    assert adapters.metric("molora_generated_tokens_total", model="e") > 0
    assert adapters.metric("molora_adapters_loaded") == 5
    status, words, _ = adapters.call("POST", UNLOAD, {"lora_name": "e"})
    assert (status, words) == (200, "Success: LoRA adapter 'e' removed successfully.")
    assert "e" not in {each.id for each in adapters.client.models.list()}
    assert adapters.call("POST", "/v1/completions", {"model": "e", "prompt": "x"})[0] == 404
    assert adapters.metric("molora_generated_tokens_total", model="e") == 0  # the series is gone


def test_a_name_means_its_newest_content(adapters):
    first, second = (adapters.expected[n][0].text for n in ("loaded later", "its next content"))
    assert load(adapters, "e", "e")[0] == 200
    status, answer, _ = load(adapters, "e", "f")
    assert status == 400
    assert answer["error"]["message"] == (
        "The lora adapter 'e' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    assert text(adapters, "loaded later") == first
    digest = adapters.client.models.retrieve("e").digest
    assert load(adapters, "e", "f", load_inplace=True)[0] == 200
    assert text(adapters, "its next content") == second
    assert adapters.client.models.retrieve("e").digest != digest
    assert adapters.call("POST", UNLOAD, {"lora_name": "e"})[0] == 200
    assert load(adapters, "e", str(adapters.root / "e"), load_inplace=True)[0] == 200
    assert text(adapters, "loaded later") == first


def test_loading_does_not_disturb_who_is_served_meanwhile(adapters):
    compiled = adapters.metric("molora_compilations_since_warm_up_total")
    names = ["adapter", "table", "learned", "base"] * 3
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        answers = [pool.submit(text, adapters, name) for name in names]
        for name in LATER:
            assert load(adapters, name, name)[0] == 200
        assert text(adapters, "loaded later") == adapters.expected["loaded later"][0].text
        for name, answer in zip(names, answers, strict=True):
            assert answer.result() == adapters.expected[name][0].text
    assert adapters.metric("molora_compilations_since_warm_up_total") == compiled


def test_a_request_under_way_ends_with_the_adapter_that_it_began_with(adapters):
    """Its name is unknown by then, and makes no series of its own in the metrics."""
    other = adapters.metric("molora_requests_total", model="(unknown)", outcome="completed")
    assert load(adapters, "e", "e")[0] == 200
    prompt, tokens = prompt_of("loaded later"), 60
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        fields = {"model": "e", "prompt": prompt, "max_tokens": tokens}
        answer = pool.submit(adapters.complete, **fields)
        until(lambda: adapters.engine.num_running)
        assert adapters.call("POST", UNLOAD, {"lora_name": "e"})[0] == 200
        (choice,) = answer.result()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith(adapters.expected["loaded later"][0].text.rstrip("\ufffd"))
    assert 'model="e"' not in adapters.call("GET", "/metrics")[1]
    assert other + 1 == adapters.metric(
        "molora_requests_total", model="(unknown)", outcome="completed"
    )


def test_paths_stay_in_the_adapter_root(adapters, tmp_path):
    outside = save_adapter(weights(adapters.engine.base, 20), tmp_path / "outside")
    root = adapters.root
    (root / "link").symlink_to(outside)
    (root / "inner").mkdir(exist_ok=True)
    for file in os.listdir(outside):
        (root / "inner" / file).symlink_to(outside / file)
    (root / "loop").symlink_to(root / "loop")
    try:
        for path in (
            "../outside", "../../etc", "/etc", str(outside), "e/../../outside", "link", "inner",
            "loop", "~", "~root", "a\x00b", "x" * 5000, "\\\\host\\share", "file:///etc",
            "org/name", "https://example.com/x", "adapter_config.json", ".",
        ):  # fmt: skip
            status, answer, _ = load(adapters, "new", path)
            assert status in (400, 404), path
            assert str(tmp_path) not in answer["error"]["message"] or path == str(outside)
            assert str(root) not in answer["error"]["message"]
        assert text(adapters, "adapter") == adapters.expected["adapter"][0].text
        assert load(adapters, "new", "sub/../e")[0] == 200  # still inside
    finally:
        (root / "link").unlink()
        (root / "loop").unlink()
        shutil.rmtree(root / "inner")


def test_a_broken_adapter_is_refused_with_its_reason(adapters):
    """S8: each one, and the next request is served."""
    root, base = adapters.root, adapters.engine.base
    for name in ("cut", "pickle", "empty", "broken"):
        shutil.copytree(root / "e", root / name)
    data = (root / "e" / "adapter_model.safetensors").read_bytes()
    (root / "cut" / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    (root / "pickle" / "adapter_model.safetensors").unlink()
    (root / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x04K\x05.")
    for file in (root / "empty").iterdir():
        file.unlink()
    (root / "broken" / "adapter_config.json").write_text("{")
    save_adapter(weights(base, 21, rank=5), root / "large")
    try:
        for path, expected, words in (
            ("missing", 404, "is no folder in --adapter_root"),
            ("empty", 404, "has no adapter_config.json"),
            ("cut", 400, "cut short"),
            ("pickle", 400, "a pickle, which can run code"),
            ("broken", 400, "cannot be read as JSON"),
            ("large", 400, "rank 5 exceeds max_rank 4"),
        ):
            status, answer, _ = load(adapters, "new", path)
            assert (status, answer["error"]["param"]) == (expected, "lora_path")
            assert words in answer["error"]["message"] and "\n" not in answer["error"]["message"]
            assert str(root) not in answer["error"]["message"]
            assert text(adapters, "adapter") == adapters.expected["adapter"][0].text
    finally:
        for name in ("cut", "pickle", "empty", "broken", "large"):
            shutil.rmtree(root / name)
    assert len(adapters.service.catalog.adapters) == 4


def test_names_that_are_taken_or_no_names_are_refused(adapters):
    for name in ("tiny", "molora", "a/b", "a:b", ".x", "tiny:a", " ", "x\ny"):
        status, answer, _ = load(adapters, name, "e")
        assert status == 400 and "name" in answer["error"]["message"]
    for body in (
        {"lora_name": "x"}, {"lora_path": "e"}, {"lora_name": 5, "lora_path": "e"}, {},
        {"lora_name": "x", "lora_path": ["e"]}, {"lora_name": "x", "lora_path": "e", "pin": 1},
        {"lora_name": "x", "lora_path": "e", "load_inplace": "yes"},
    ):  # fmt: skip
        assert adapters.call("POST", LOAD, body)[0] == 400, body
    status, answer, _ = adapters.call("POST", UNLOAD, {"lora_name": "x"})
    assert status == 404 and "cannot be found" in answer["error"]["message"]
    assert adapters.call("POST", UNLOAD, {"lora_name": "tiny"})[0] == 404


def test_what_a_profile_needs_stays(adapters):
    status, answer, _ = adapters.call("POST", UNLOAD, {"lora_name": "a"})
    assert status == 400 and "belongs to the routing profile 'molora'" in answer["error"]["message"]
    status, answer, _ = load(adapters, "a", "e", load_inplace=True)
    assert status == 400 and "trained with this content of 'a'" in answer["error"]["message"]
    assert text(adapters, "learned") == adapters.expected["learned"][0].text


def test_loading_is_off_unless_it_is_switched_on(served):
    catalog = Catalog(served.engine, base_id="tiny")
    for change in (lambda: catalog.load("e", "e"), lambda: catalog.unload("a")):
        with pytest.raises(ApiError, match="--allow_runtime_lora_updates") as caught:
            change()
        assert caught.value.status == 403


def test_a_catalog_refuses_names_with_two_meanings(served):
    profile = served.engine.profiles["vocab"]
    with pytest.raises(ValueError, match="the name 'a' is taken"):
        Catalog(served.engine, base_id="a")
    with pytest.raises(ValueError, match="the name 'a' is taken"):
        Catalog(served.engine, base_id="tiny", profiles={"a": profile})
    with pytest.raises(ValueError, match="the profile 'tiny' has the name of the base"):
        Catalog(served.engine, base_id="tiny", profiles={"tiny": profile})
