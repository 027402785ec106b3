"""statistics and compose: from adapters trained apart to one routed folder, nothing trained."""

import json
import re
import shutil

import numpy as np
import pytest

from molora_jax.adapters import Composition, load_adapter, save_adapter
from molora_jax.routing import PrototypeRouter, StatisticsRouter
from molora_jax.routing.metrics import main_adapter
from molora_jax.routing.statistics_file import STATISTICS_FILE
from molora_jax.tools import compose_check
from molora_jax.tools.report import relative_updates
from molora_jax.training import evaluate, read_windows
from tests.tools.conftest import BASE, make

TEXTS = {"a": "def f(x): return x", "b": "Once upon a time", "c": "Shall I compare thee"}


@pytest.fixture(scope="module")
def shipped(base, tmp_path_factory):
    """Three adapters, each with statistics of its own data beside it."""
    from molora_jax.tools.__main__ import main

    root = tmp_path_factory.mktemp("shipped")
    for seed, (name, text) in enumerate(TEXTS.items()):
        save_adapter(make(base, name, seed=10 + seed), root / name)
        data = root / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(12)))
        options = ["--base", BASE, "--data", str(data), "--seq_len", "16", "--features", "8"]
        assert main(["statistics", str(root / name), *options]) == 0
    return root


def copied(shipped, tmp_path, *names):
    return [shutil.copytree(shipped / name, tmp_path / name) for name in names]


def test_adapters_become_a_composition_that_grows_and_shrinks(tool, shipped, base, tmp_path):
    a, b, c = (shipped / name for name in "abc")
    result = tool("compose", a, b, "--base", BASE, "--out", tmp_path / "two", "--top_k", 2)
    assert result.code == 0, result.err
    assert "nothing was trained" in result.out
    two = Composition.load(tmp_path / "two", base)
    assert isinstance(two.router, StatisticsRouter)
    assert (two.router.top_k, two.labels_used) == (2, True)
    assert two.column_names == ("a", "b")
    wanted = StatisticsRouter.solve([load_adapter(each)[0].statistics.unpack() for each in (a, b)])
    np.testing.assert_array_equal(two.router.weights[...], wanted.weights[...])
    # The composition carries them, so that it can be gone on from.
    grown = tool(
        "compose", c, "--add_to", tmp_path / "two", "--base", BASE, "--out", tmp_path / "3"
    )
    assert grown.code == 0, grown.err
    assert Composition.load(tmp_path / "3", base).column_names == ("a", "b", "c")
    again = ("compose", "--add_to", tmp_path / "3", "--base", BASE)
    assert tool(*again, "--without", "c", "--out", tmp_path / "again").code == 0
    back = Composition.load(tmp_path / "again", base)
    assert back.router.top_k == 2  # as it was
    left = tool(*again, "--without", "c", "--without", "a", "--out", tmp_path / "one")
    assert "chooses among two" in left.err
    inside = tool("compose", *(tmp_path / "3" / "adapters" / each for each in "ab"), "--base", BASE,
                  "--out", tmp_path / "3", "--overwrite")  # fmt: skip
    assert "is read and would be overwritten" in inside.err
    # Whoever swapped the adapters gets no composition of them.
    folders = [tmp_path / "3" / "adapters" / each for each in ("a", "b", "x")]
    for old, new in zip(folders[:2][::-1], folders[:2], strict=True):
        shutil.copytree(old, new.with_name(f"{new.name}.new"))
    for each in folders[:2]:
        shutil.rmtree(each)
        each.with_name(f"{each.name}.new").rename(each)
    assert "is not the one the router was trained with" in tool(*again, "--out", tmp_path / "x").err
    np.testing.assert_array_equal(back.router.weights[...], two.router.weights[...])


def test_it_says_how_large_the_adapters_are_and_warns_of_large_ones(tool, shipped, base, tmp_path):
    a, b = copied(shipped, tmp_path, "a", "b")
    result = tool("compose", a, b, "--base", BASE, "--out", tmp_path / "two")
    adapter, _ = load_adapter(a)
    updates = relative_updates(adapter, base.decoder).values()
    values = [value for of_layers in updates for value in of_layers.values()]
    (row,) = [line.split() for line in result.out.splitlines() if line.startswith("a ")]
    assert row[3:5] == [f"{np.median(values):.2%}", f"{max(values):.2%}"]
    large = np.median(values) > compose_check.LARGE
    assert ("adapter 'a' changes its layers by" in result.err) == large
    config = json.loads((a / "adapter_config.json").read_text())
    for alpha in (1e-3, 1e3):
        (a / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
        data = ("--data", shipped / "a.jsonl", "--seq_len", 16, "--features", 8, "--overwrite")
        assert tool("statistics", a, "--base", BASE, *data).code == 0
        argv = ("compose", a, b, "--base", BASE, "--out", tmp_path / "out", "--overwrite")
        assert ("adapter 'a' changes its layers by" in tool(*argv).err) == (alpha > 1)
        seen = tool("inspect", a, "--base", BASE).out
        assert bool(re.search("WARNING +it changes its layers by", seen)) == (alpha > 1)
        # A router of the weights alone reads no statistics.
        arrow = tool(*argv, "--router", "arrow")
        assert "adapter 'a' changes" not in arrow.err
        table, said = arrow.out.split("next:")[0].split(f"{tmp_path / 'out'}: ")
        assert "statistics" not in table
        assert "every adapter has statistics, which were not read" in said


def test_check_measures_whose_tokens_held_out_texts_are(tool, shipped, base, tmp_path):
    a, b = shipped / "a", shipped / "b"
    texts = [f"{name}={shipped / name}.jsonl" for name in "ab"]
    argv = ("compose", a, b, "--base", BASE, "--out", tmp_path / "two", "--overwrite")
    result = tool(*argv, "--check", *texts)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    start = next(i for i, line in enumerate(lines) if "by chance 50%" in line)
    assert re.split("  +", lines[start + 1]) == [
        "texts of", "tokens", "layer 0", "layer 2", "layer 3", "all layers", "main adapter"
    ]  # fmt: skip
    two, last = Composition.load(tmp_path / "two", base), {}
    for name, line in zip("ab", lines[start + 2 : start + 4], strict=True):
        windows, _ = read_windows(shipped / f"{name}.jsonl", base.tokenizer, seq_len=128)
        found = evaluate(base.decoder, windows, **two.routed, return_routing=True)
        real, slot = np.asarray(windows.mask), two.bank.slot_of(name)
        ids = found.routing.adapter_ids[..., 0]
        by_layer = [(of[real] == slot).mean() for of in ids]
        last[name] = (main_adapter(*(each.reshape(len(ids), -1, 1) for each in (
            ids, found.routing.gates)))[real.ravel()] == slot).mean()  # fmt: skip
        wanted = [by_layer[0], by_layer[2], by_layer[3], np.mean(by_layer), last[name]]
        assert line.split() == [name, str(real.sum()), *(f"{each:.0%}" for each in wanted)]
        # Warned of exactly where it is at chance.
        low = min(wanted[1:]) < 0.5 + compose_check.MARGIN
        assert (f"adapter '{name}' has about as many" in result.err) == low
    # Texts of the other kind do not go to an adapter.
    swapped = tool(*argv, "--check", f"a={shipped / 'b'}.jsonl", f"b={shipped / 'a'}.jsonl")
    assert "fewer of the tokens of its texts than by chance" in swapped.err
    for wrong, words in (
        (["a"], "expected NAME=FILE"),
        ([f"aa={a}.jsonl"], "no adapter is called 'aa'; did you mean 'a'?"),
        ([f"a={tmp_path}/no.jsonl"], "no file"),
        ([texts[0], texts[0]], "names 'a' twice"),
    ):
        refused = tool(*argv[:-3], "--out", tmp_path / "none", "--check", *wrong)
        assert (refused.code, words in refused.err) == (2, True), refused.err
        assert not (tmp_path / "none").exists()


def test_statistics_go_to_a_copy_where_the_folder_cannot_be_written(
    tool, shipped, base, tmp_path, monkeypatch
):
    cached = tmp_path / "models--org--a"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("c0ffee")
    a = cached / "snapshots" / "c0ffee"
    shutil.copytree(shipped / "a", a)
    (a / STATISTICS_FILE).unlink()
    (cached / "blobs").mkdir()
    for file in list(a.iterdir()):  # links, as the hub's cache has them
        file.rename(cached / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    data = ("--base", BASE, "--data", shipped / "a.jsonl", "--seq_len", 16, "--features", 8)
    out = tmp_path / "copy" / "a"
    result = tool("statistics", "org/a", *data, "--out", out)
    assert result.code == 0, result.err
    assert not [path for path in out.iterdir() if path.is_symlink()]
    assert not (a / STATISTICS_FILE).exists()
    adapter, _ = load_adapter(out)
    assert adapter.digest == load_adapter(a)[0].digest
    assert adapter.statistics.num_features == 8
    assert "exists already" in tool("statistics", a, *data, "--out", out).err
    assert "would be overwritten" in tool("statistics", a, *data, "--out", a).err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    refused = tool("statistics", a, *data)
    assert (refused.code, "--out DIR writes a copy" in refused.err) == (1, True)


def test_without_statistics_only_the_weights_are_left(tool, folders, shipped, base, tmp_path):
    pair = (folders["a"], shipped / "b")
    refused = tool("compose", *pair, "--base", BASE, "--out", tmp_path / "out")
    assert refused.code == 1
    assert "adapter 'a' came without router statistics" in refused.err
    assert not (tmp_path / "out").exists()
    made = tool("compose", *pair, "--router", "arrow", "--base", BASE, "--out", tmp_path / "out")
    assert made.code == 0, made.err
    composition = Composition.load(tmp_path / "out", base)
    assert isinstance(composition.router, PrototypeRouter)
    assert composition.labels_used is False


def test_statistics_of_other_weights_do_not_go_with_an_adapter(tool, shipped, base, tmp_path):
    a, b = copied(shipped, tmp_path, "a", "b")
    shutil.copy(a / STATISTICS_FILE, b / STATISTICS_FILE)  # as another tool would leave it there
    adapter, report = load_adapter(b)
    assert adapter.statistics is None
    assert any("another content" in text for text in report.warnings)
    refused = tool("compose", a, b, "--base", BASE, "--out", tmp_path / "out")
    assert (refused.code, "of another content" in refused.err) == (1, True)
    whole = bytearray((a / STATISTICS_FILE).read_bytes())
    whole[-3] ^= 1
    (b / STATISTICS_FILE).write_bytes(whole)
    adapter, report = load_adapter(b)
    assert adapter.statistics is None
    assert any("the sha256 differs" in text for text in report.warnings)
    assert (
        "the sha256 differs" in tool("compose", a, b, "--base", BASE, "--out", tmp_path / "o").err
    )
    small = tool("convert", a, tmp_path / "small", "--max_rank", 1)
    assert "gather them anew" in small.out
    assert not (tmp_path / "small" / STATISTICS_FILE).exists()
    with pytest.raises(ValueError, match="of an adapter of another content"):
        make(base, "x", seed=7).with_statistics(load_adapter(a)[0].statistics)


def test_what_makes_no_composition_is_said_before_anything_is_written(
    tool, shipped, base, tmp_path
):
    a, b, c = (shipped / name for name in "abc")

    def refused(*argv):
        result = tool("compose", *argv, "--base", BASE, "--out", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return result.code, result.err

    assert "chooses among two" in refused(a)[1]
    assert "the same digest ('a' and 'x')" in refused(a, f"x={a}")[1]
    assert refused(a, f"a={b}")[0] == 2
    (twin,) = copied(shipped, tmp_path, "b")
    data = ("--base", BASE, "--data", shipped / "a.jsonl", "--seq_len", 16, "--features", 8)
    assert tool("statistics", twin, *data, "--overwrite").code == 0
    assert "columns 0 and 1 have the same statistics" in refused(a, twin)[1]
    assert "top_k" in refused(a, b, "--top_k", 3)[1]
    assert "--without" in refused(a, b, "--without", "a")[1]
    tool("compose", a, b, "--base", BASE, "--out", tmp_path / "two")
    code, err = refused("--add_to", tmp_path / "two", "--without", "bb", c)
    assert (code, "did you mean 'b'" in err) == (2, True)
    assert "has an adapter 'a' already" in refused("--add_to", tmp_path / "two", a)[1]
    (other,) = copied(shipped, tmp_path, "c")
    data = shipped / "c.jsonl"
    again = ("statistics", other, "--base", BASE, "--data", data, "--seq_len", 16)
    assert "--overwrite replaces it" in tool(*again).err
    linked, theirs = other / STATISTICS_FILE, tmp_path / "theirs"
    linked.rename(theirs)
    linked.symlink_to(theirs)
    before = theirs.read_bytes()
    assert tool(*again, "--features", 4, "--overwrite").code == 0
    assert (theirs.read_bytes() == before, linked.is_symlink()) == (True, False)
    assert "4 features" in tool("inspect", other).out
    few = tool(*again, "--features", 63, "--rows", 1, "--overwrite")
    assert "may be no better than chance" in few.err
    assert tool(*again, "--features", 4, "--overwrite").code == 0
    assert "different numbers of features (a 8, c 4)" in refused(a, other)[1]
