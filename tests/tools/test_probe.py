"""probe: how much an adapter moves a base, and that one which does nothing is noticed."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank, load_adapter, save_adapter
from molora_jax.routing import FixedRouter
from molora_jax.tools import probe as verb
from molora_jax.tools.report import relative_updates
from tests.tools.conftest import BASE, logits, make

TEXT = "Two cats, é and 7."


def softmax_log(x):
    x = x.astype(np.float64)
    return (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


@pytest.mark.parametrize("window", [256, 7])
def test_the_figures_are_those_of_the_two_distributions(tool, folders, base, window, monkeypatch):
    monkeypatch.setattr(verb, "_WINDOW", window)
    result = tool("probe", folders["a"], "--base", BASE, "--text", TEXT, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    ids = base.tokenizer.encode(TEXT)
    bank = AdapterBank(base.config, num_slots=1, max_rank=4)
    bank.load(folders["a"])
    kl, change, top, nll = [], [], [], ([], [])
    for start in range(0, len(ids), window):
        tokens = [ids[start : start + window]]
        router = FixedRouter(np.zeros((1, len(tokens[0]), 1), np.int32))
        off = logits(base, tokens)[0]
        on = logits(base, tokens, adapters=bank.stacks, router=router)[0]
        p, q = softmax_log(off), softmax_log(on)
        kl += [*(np.exp(p) * (p - q)).sum(-1)]
        change += [*np.abs(on - off).max(-1)]
        top += [*(on.argmax(-1) != off.argmax(-1))]
        for losses, log in zip(nll, (p, q), strict=True):
            losses += [-log[i, token] for i, token in enumerate(tokens[0][1:])]
    assert found["positions"] == len(ids) == 19
    assert found["mean_kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert found["max_logit_change"] == pytest.approx(max(change), rel=1e-4)
    assert found["top1_changed"] == pytest.approx(np.mean(top))
    assert found["nll"] == pytest.approx(np.mean(nll[0]), rel=1e-5)
    assert found["nll_adapter"] == pytest.approx(np.mean(nll[1]), rel=1e-5)
    most = found["positions_most"]
    assert [each["position"] for each in most] == [int(i) for i in np.argsort(-np.array(kl))[:8]]
    assert all(each["token"] == base.tokenizer.pieces(ids)[each["position"]] for each in most)
    adapter, _ = load_adapter(folders["a"])
    expected = relative_updates(adapter, base.decoder)
    assert found["relative_updates"]["up_proj"]["3"] == pytest.approx(expected["up_proj"][3])


def test_an_adapter_that_changes_nothing_is_exit_code_1(tool, folders):
    result = tool("probe", folders["zero"], "--base", BASE)
    assert result.code == 1
    assert "'zero' changes nothing" in result.err
    assert "every lora_B is zero" in result.err
    assert re.search(r"^largest change of a logit +0$", result.out, re.MULTILINE)


def test_text_for_people_and_a_file_of_text(tool, folders, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT + "\n")  # as an editor ends a file
    result = tool("probe", folders["b"], "--base", BASE, "--prompt_file", tmp_path / "text.txt",
                  "--top", "3")  # fmt: skip
    assert result.code == 0, result.err
    assert "adapter 'b' on tiny-random, 19 positions" in result.out
    assert "NLL of the text" in result.out
    lines = result.out.splitlines()
    start = lines.index("positions that change most")
    assert lines[start + 5] == ""
    assert lines[-1].split()[0] == "3"


def test_an_adapter_of_another_base_is_refused(tool, folders, tmp_path, molora_data):
    folder = molora_data / "adapters" / "open-calm-1b-delta-r1"
    result = tool("probe", folder, "--base", BASE)
    assert result.code == 1
    assert "matched 0 of 24 modules" in result.err


def test_one_token_has_no_loss(base, folders):
    adapter, _ = load_adapter(folders["a"])
    found = verb.probe(base, adapter, "x")
    assert found["nll"] is None
    assert found["max_logit_change"] > 0
    assert jnp.isfinite(found["mean_kl"])


@pytest.mark.parametrize("verb_", ["probe", "generate"])
def test_logits_that_are_not_finite_are_said_and_no_answer(tool, base, tmp_path, verb_):
    save_adapter(make(base, "wild", seed=5, alpha=1e35), tmp_path / "wild")
    text = {"probe": ("--text",), "generate": ("--max_tokens", 4, "--only", "wild", "--prompt")}
    adapter = {"probe": (), "generate": ("--adapter",)}[verb_]
    result = tool(verb_, *adapter, tmp_path / "wild", "--base", BASE, *text[verb_], "some text")
    assert result.code == 1
    assert "NaN or infinite" in result.err
    assert "changes nothing" not in result.err and result.out == ""
