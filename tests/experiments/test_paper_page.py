"""The page of the whole paper and the results folder, from made-up runs of the real Run API."""

import dataclasses
import json
import pathlib
import re
import types

import numpy as np
import pytest
from PIL import Image

from experiments import artifacts, gallery, paper_page, registry, results
from experiments import main as command_line
from experiments.gallery import best_runs, find_runs
from experiments.paper_tables import PAPER, entries_of
from experiments.run_folder import Claim
from molora_jax.display import curve_figure, save_figure
from tests.experiments import toy


def made(workdir, name, *, scale="cpu", seed=0, claims=(), metrics=None, pictures=(), fail=False):
    """A run of a made-up experiment under a real one's name: its folder."""

    def main(config, run):
        if fail:
            raise ValueError("nothing came of it")
        for picture in pictures:
            save_figure(curve_figure({"a": ([0, 1], [2.0, 1.0])}), run.path / f"{picture}.png")
        shown = " ".join(f"![{each}]({each}.png)" for each in reversed(pictures))
        run.finish(metrics=metrics or {}, claims=claims, report=f"# {name}\n\n{shown}")

    config = dataclasses.replace(toy.Config(), seed=seed, out="/somewhere/private")
    module = types.SimpleNamespace(__name__=toy.__name__, Config=toy.Config, main=main)
    _, path = results.execute(
        name, module, config, {}, scale=scale, workdir=workdir, configs=workdir
    )
    return path


def claim(name, holds, *, ours=0.5, kind="share", note="a <b>note</b> | with a bar"):
    return Claim(
        id=name, kind=kind, ours=ours, paper=0.983, direction="higher", holds=holds, note=note
    )


@pytest.fixture
def workdir(tmp_path):
    folder = tmp_path / "runs"
    made(
        folder,
        "compose",
        claims=[claim("table17.own_share", False, ours=0.8125), claim("compose.order", True)],
        metrics={"loss": 2.71828, "nothing": float("nan")},
        pictures=("shares", "layers"),
    )
    made(folder, "table17", scale="tiny", claims=[claim("table17.documents", True)])
    made(folder, "table3", claims=[claim("table3.ratio", None, kind="time", note="no GPU")])
    made(folder, "serving", claims=[claim("serving.mixed", True)])
    made(folder, "table4", fail=True)
    return folder


def page(tmp_path, workdir, **fields):
    config = paper_page.Config(folders=(str(workdir),), **fields)
    status, path = results.execute(
        "paper_page", paper_page, config, paper_page.digests(config), scale="tiny",
        workdir=tmp_path / "pages",
    )  # fmt: skip
    assert status == "complete"
    return path, json.loads((path / "result.json").read_text())["metrics"]


def section(text, label):
    return re.search(rf"## {label}:.*?(?=\n## )", text, flags=re.DOTALL)[0]


def test_every_table_stands_in_order_with_ours_beside_the_papers(tmp_path, workdir):
    path, metrics = page(tmp_path, workdir)
    report = (path / "report.md").read_text()
    labels = re.findall(r"^## ((?:Tab|Fig) \d+):", report, flags=re.MULTILINE)
    assert labels == [entry.label for entry in PAPER]
    of_17 = section(report, "Tab 17")
    assert "code 98.6, math 96.6" in of_17  # the paper's
    assert "| table17.own_share | 0.983 | 0.8125 | does not hold | a <b>note</b> \\| with" in of_17
    # At scale tiny no claim has a verdict, whatever was said.
    assert "| table17.documents | 0.983 | 0.5 | not said here | tiny sizes" in of_17
    assert "compose: scale cpu" in of_17 and "table17: scale tiny" in of_17
    assert "`molora run --experiment=compose --gin_file=config.gin`" in of_17  # of other fields
    assert "no GPU" in section(report, "Tab 3")
    assert "Missing: table4 (not run)" in section(report, "Tab 4")  # a failed run is none
    assert "no experiment answers this one" in section(report, "Tab 12")
    assert "compose.order" in section(report, "Fig 3")  # the first that compose answers
    beyond = report.split("## Beyond the paper's tables")[1]
    assert "serving.mixed" in beyond and "compose" not in beyond
    assert metrics["claims/holds"] == 2 and metrics["claims/not"] == 1
    assert metrics["claims/no_verdict"] == 2
    assert metrics["tables/answered"] + metrics["tables/missing"] == len(PAPER)


def test_the_html_page_holds_the_pictures_and_lets_nothing_in(tmp_path, workdir):
    path, _ = page(tmp_path, workdir)
    text = (path / "paper.html").read_text()
    assert text.count("data:image/png;base64,") == 2  # once, though compose answers three
    assert "a &lt;b&gt;note&lt;/b&gt;" in text and "<b>note" not in text
    assert "2.718" in text and "{{" not in text
    assert not re.search(r"https?:|<script|url\(|@import", text)
    for entry in PAPER:
        assert f'id="{entry.id}"' in text


def test_new_runs_make_a_new_page(tmp_path, workdir):
    first, _ = page(tmp_path, workdir)
    again, _ = page(tmp_path, workdir)
    made(workdir, "table4", seed=1, claims=[claim("table4.ladder", True)])
    after, metrics = page(tmp_path, workdir)
    assert first == again != after
    assert metrics["claims/holds"] == 3


def test_missing_experiments_are_run_where_asked_and_failures_named(tmp_path, workdir, monkeypatch):
    asked = []

    def run_it(command, **_):
        (name,) = [each[13:] for each in command if each.startswith("--experiment=")]
        asked.append(name)
        assert {"--scale=tiny", f"--workdir={workdir}"} <= set(command)
        if name == "table5":
            return types.SimpleNamespace(returncode=1, stderr="a\ntable5 failed: no room")
        made(workdir, name, scale="tiny", seed=2)
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(paper_page.subprocess, "run", run_it)
    path, _ = page(tmp_path, workdir, run_missing=True)
    assert "table4" in asked and "table5" in asked
    assert not {"compose", "table3", "serving"} & set(asked)  # there already, or of no table
    report = (path / "report.md").read_text()
    assert "Missing: table5 (table5 failed: no room)" in report
    assert "table4: scale tiny" in report


def test_folders_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="there is none of them"):
        paper_page.Config(folders=("nowhere",))
    paper_page.Config(folders=("nowhere",), run_missing=True)


def test_every_experiment_of_a_table_names_one_of_the_papers():
    known = {entry.id for entry in PAPER}
    for name, entry in registry.EXPERIMENTS.items():
        assert set(entries_of(entry.tables)) <= known, name
    assert entries_of("Fig 3, Tab 15, 17") == ["fig3", "table15", "table17"]
    with pytest.raises(ValueError, match="'x' is not like"):
        entries_of("Tab 3, x")


# The results folder


def test_the_best_run_of_each_experiment_is_the_newest_at_the_largest_scale(tmp_path):
    import os

    for at, (scale, seed) in enumerate([("tiny", 0), ("cpu", 1), ("cpu", 2), ("tiny", 3)]):
        path = made(tmp_path, "table3", scale=scale, seed=seed)
        os.utime(path / "result.json", (at, at))
    made(tmp_path, "table3", scale="paper", seed=4, fail=True)
    best = best_runs(find_runs([tmp_path]))
    assert {name: run.seeds for name, run in best.items()} == {"table3": "2"}


def test_results_hold_small_files_and_no_place_of_this_machine(tmp_path, workdir, monkeypatch):
    # The config of the made-up runs is toy's, whose place is `out`.
    entry = registry.Experiment(module="tests.experiments.toy", summary="", tables="Tab 17")
    monkeypatch.setitem(registry.EXPERIMENTS, "compose", entry)
    run = find_runs([workdir / "compose"])[0].path
    for name in ("a", "b", "c"):
        (run / f"{name}.png").write_bytes((run / "shares.png").read_bytes())
    (run / "report.pdf").write_bytes(b"large")
    noise = np.random.default_rng(0).integers(0, 256, (400, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(run / "layers.png")
    assert (run / "layers.png").stat().st_size > gallery.MOST_BYTES
    out = tmp_path / "results"
    assert gallery.main([str(workdir), "--out", str(out)]) == 0
    files = {path.name: path for path in (out / "compose").iterdir()}
    # The report's pictures first, in its order; then the others, four in all.
    assert set(files) == {"result.json", "config.gin", "layers.png", "shares.png", "a.png", "b.png"}
    assert all(each.stat().st_size < gallery.MOST_BYTES for each in files.values())
    with Image.open(files["layers.png"]) as picture:
        assert picture.size[0] > 100
    config = files["config.gin"].read_text()
    assert "toy.Config.steps = 3" in config and "private" not in config
    assert files["result.json"].read_text() == (run / "result.json").read_text()
    readme = (out / "README.md").read_text()
    assert "\nmolora run --experiment=compose\n" in readme, readme[:900]
    assert "| Tab 17 | cpu |" in readme and '<img src="compose/layers.png"' in readme
    claims = json.loads(files["result.json"].read_text())["claims"]
    assert claims and all(f"| `{claim['id']}` | {claim['ours']:.4g}" in readme for claim in claims)
    assert str(tmp_path) not in readme


def test_results_are_regenerated_and_read_again(tmp_path, workdir):
    out = tmp_path / "results"
    assert gallery.main([str(workdir / "compose"), "--out", str(out)]) == 0
    before = artifacts._file_digests(out)
    assert gallery.main([str(workdir / "compose"), "--out", str(out)]) == 0
    assert artifacts._file_digests(out) == before
    # What only an earlier call knew stays.
    assert gallery.main([str(workdir / "table3"), "--out", str(out)]) == 0
    assert set(best_runs(find_runs([out]))) == {"compose", "table3"}
    path, _ = page(tmp_path, out)
    assert "0.8125" in (path / "report.md").read_text()


def test_a_results_folder_of_another_kind_is_not_replaced(tmp_path, workdir, capsys):
    out = tmp_path / "results"
    (out / "compose").mkdir(parents=True)
    (out / "compose" / "thesis.tex").write_text("years of work")
    assert gallery.main([str(workdir), "--out", str(out)]) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (out / "compose" / "thesis.tex").exists()
    assert gallery.main([str(tmp_path / "none"), "--out", str(out)]) == 2
    (tmp_path / "empty").mkdir()
    assert gallery.main([str(tmp_path / "empty"), "--out", str(tmp_path / "o")]) == 2


def test_the_committed_results_can_be_read():
    folder = pathlib.Path(command_line.__file__).parents[1] / "results"
    for run in find_runs([folder] if folder.is_dir() else []):
        assert run.experiment == run.path.name
        assert (run.path / "config.gin").exists()
        assert all(path.stat().st_size < gallery.MOST_BYTES for path in run.pictures())
