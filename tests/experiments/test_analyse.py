"""`analyse` at tiny scale: its tables, pictures and page, and what it refuses."""

import csv
import dataclasses
import json

import numpy as np
import pytest

from experiments import analyse, results
from experiments import main as command_line
from molora_jax.analysis import BASE_ONLY
from molora_jax.models import load_base
from molora_jax.routing import VocabularyRouter
from tests.composed import composition, learned


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three compositions: "learned", "table" without logits, and one as if of another base."""
    base, folder = load_base("tiny-random"), tmp_path_factory.mktemp("compositions")
    made = composition(base, learned(base))
    made.save(folder / "learned")
    dataclasses.replace(made, base_digest="f" * 64).save(folder / "other-base")
    table = VocabularyRouter(np.arange(base.config.vocab_size) % 3, num_columns=3)
    composition(base, table).save(folder / "table")
    return folder


def execute(workdir, **fields):
    tiny = command_line.bindings(analyse, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = analyse.Config(**{**tiny, **fields})
    status, path = results.execute(
        "analyse", analyse, config, analyse.digests(config), scale="tiny", workdir=workdir
    )
    return status, path, json.loads((path / "result.json").read_text())


@pytest.fixture(scope="module")
def compared(folder, tmp_path_factory):
    return execute(
        tmp_path_factory.mktemp("runs"),
        composition=str(folder / "learned"),
        compare=str(folder / "table"),
    )


def test_the_tables_agree_with_each_other(compared):
    status, path, result = compared
    assert status == "complete", result["error"]
    record = json.loads((path / "analysis.json").read_text())
    (text,) = record["texts"]
    with (path / "tokens.csv").open(encoding="utf-8", newline="") as handle:
        lines = list(csv.DictReader(handle))
    assert len(lines) == 2 * 4 * len(text["pieces"])  # routers, layers, tokens
    for line in lines:
        router = next(each for each in text["routers"] if each["name"] == line["router"])
        layer, token = int(line["layer"]), int(line["token"])
        assert json.loads(line["piece"]) == text["pieces"][token]
        ids, gates = router["adapter_ids"][layer][token], router["gates"][layer][token]
        assert [record["adapters"][i] for i in ids][int(np.argmax(gates))] == line["top"]
        for index, gate in zip(ids, gates, strict=True):
            assert float(line[f"gate {record['adapters'][index]}"]) == pytest.approx(gate, abs=1e-4)
        assert (line["entropy"] == "") == (router["entropy"] is None)
    first = text["routers"][0]
    losses = [loss for loss in first["loss"] if loss is not None]
    assert first["loss"][0] is None and len(losses) == len(text["pieces"]) - 1
    assert result["metrics"]["r0/loss"] == pytest.approx(np.mean(losses), abs=1e-3)
    forced = np.array(text["forced_loss"], float)[:, 1:].mean(axis=1)
    names = [*record["adapters"], BASE_ONLY]
    assert [result["metrics"][f"forced/{n}"] for n in names] == pytest.approx(forced, abs=1e-3)
    assert 0 <= result["metrics"]["differing"] <= 1


def test_the_folder_holds_pictures_and_the_page(compared):
    _, path, _ = compared
    for name in ("routing", "entropy", "agreement", "forced"):
        assert (path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in (path / "report.md").read_text()
    page = (path / "explorer.html").read_text()
    assert '"name":"learned"' in page and '"name":"table"' in page


def test_a_file_and_a_text_of_one_token_are_read_as_two_texts(folder, tmp_path):
    (tmp_path / "my.txt").write_text("$5 \\frac =1", encoding="utf-8")
    status, path, result = execute(
        tmp_path,
        composition=str(folder / "learned"),
        compare_top_k=3,  # all of them
        texts="a",
        text_files=(str(tmp_path / "my.txt"),),
    )
    assert status == "complete", result["error"]
    assert result["metrics"]["tokens"] == 1 + 11
    assert (path / "routing-0.png").exists() and (path / "routing-1.png").exists()
    assert not (path / "forced-0.png").exists()  # one token has no loss
    names = [
        each["name"]
        for each in json.loads((path / "analysis.json").read_text())["texts"][0]["routers"]
    ]
    assert names == ["k = 2", "k = 3"]


def test_what_cannot_be_analysed_is_refused_before_anything_starts(folder, tmp_path):
    good = {"composition": str(folder / "learned")}
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for fields, said in [
        ({}, "composition is empty"),
        ({"composition": str(tmp_path)}, "there is no composition"),
        ({**good, "compare": "nowhere"}, "compare = 'nowhere'"),
        ({**good, "compare": good["composition"], "compare_top_k": 1}, "give one"),
        ({**good, "texts": ("a", "")}, r"texts\[1\] is empty"),
        ({**good, "text_files": ("none.txt",)}, "no such file"),
    ]:
        with pytest.raises(ValueError, match=said):
            analyse.Config(**fields)
    for name, said in [("empty.txt", "is empty"), ("bytes.txt", "no UTF-8 text")]:
        with pytest.raises(ValueError, match=said):
            analyse.digests(analyse.Config(**good, text_files=(str(tmp_path / name),)))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"texts": "a" * 2049}, "has 2049 tokens; tiny-random reads at most 2048"),
        ({"compare_top_k": 9}, "top_k 9 is not a number from 1 to 3"),
        ({"compare_top_k": 2}, "what the router has already"),
        ({"composition": "table", "compare_top_k": 2}, "VocabularyRouter"),
    ],
)
def test_what_only_the_model_knows_ends_the_run_with_a_line(folder, tmp_path, fields, said):
    chosen = str(folder / fields.pop("composition", "learned"))
    status, _, result = execute(tmp_path, composition=chosen, **fields)
    assert status == "failed" and said in result["error"]


def test_a_composition_for_another_base_is_refused(folder, tmp_path):
    status, _, result = execute(tmp_path, composition=str(folder / "other-base"))
    assert status == "failed" and "was made for the base" in result["error"]
