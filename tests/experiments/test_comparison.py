"""Tables of runs: what differs, which is best, what is not in them, and the pictures."""

import csv
import fcntl
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from experiments import comparison, entries
from molora_jax import display


def write_run(
    folder, name, *, config=None, metrics=None, digests=None, experiment="toy", **changes
):
    """A run folder with these settings; `changes` are of its result."""
    path = folder / experiment / name
    path.mkdir(parents=True)
    saved = {
        "experiment": experiment,
        "config": {"lr": 0.1, "kind": "linear", "data": "a.jsonl", "out": "", **(config or {})},
        "places": ["data", "out"],
        "digests": {"base": "b" * 16, "data": "d" * 16, **(digests or {})},
    }
    (path / "config.json").write_text(json.dumps(saved))
    result = {
        "experiment": experiment,
        "status": "complete",
        "scale": "tiny",
        "seed": 0,
        "metrics": {"loss": 1.0} if metrics is None else metrics,
    }
    (path / "result.json").write_text(json.dumps({**result, **changes}))
    return path


def compared(folder, **options):
    return comparison.compare(map(entries.read, entries.find([folder])), **options)


def test_only_what_differs_is_a_column_and_the_best_is_first(tmp_path):
    for name, lr, loss in (("a", 0.1, 2.0), ("b", 0.01, 1.5), ("c", 1e-3, 1.75)):
        metrics = {"loss": loss, "accuracy": loss / 4, "steps": 3}
        write_run(tmp_path, name, config={"lr": lr, "out": name}, metrics=metrics)
    table = compared(tmp_path)
    assert table.names == ["lr"]
    assert [run.path.name for run in table.runs] == ["b", "c", "a"]
    lines = table.markdown().splitlines()
    assert lines[0] == "| run | lr | loss | accuracy | steps |"
    assert lines[2] == "| b | 0.01 | 1.5 | 0.375 | 3 |"
    assert lines[-1] == "Best first: lowest loss."
    turned = compared(tmp_path, by="accuracy")
    assert [run.path.name for run in turned.runs] == ["a", "c", "b"]
    assert "highest accuracy" in turned.markdown()
    assert compared(tmp_path, by="loss", order="higher").runs[0].path.name == "a"
    with pytest.raises(ValueError, match="--by=steps: its name does not tell"):
        compared(tmp_path, by="steps")
    with pytest.raises(ValueError, match="did you mean accuracy"):
        compared(tmp_path, by="acuracy")
    with pytest.raises(ValueError, match="name it with --by"):
        compared(tmp_path, order="lower")


def test_what_a_name_tells_comes_first_and_metrics_can_be_chosen(tmp_path):
    metrics = {f"share/{n}": n / 7 for n in range(20)} | {"loss/spread": 1.0, "routed/loss": 2.0}
    write_run(tmp_path, "a", metrics=metrics)
    table = compared(tmp_path, by="share/3", order="higher")
    assert table.metrics()[:3] == ["share/3", "routed/loss", "share/0"]
    assert len(table.shown()) == comparison.SHOWN_METRICS
    assert "14 more: --metrics or --csv." in table.markdown()
    for width, most in ((1, 1), (25, 2), (1000, 22)):
        shown = table.shown(width)
        assert len(shown) == most
        line = table.markdown(width).splitlines()[0]
        assert width == 1 or len(line.replace(" | ", "  ").strip("| ")) <= width
    chosen = compared(tmp_path, metrics=["loss/*", "share/1*", "share/1"])
    assert chosen.metrics()[:3] == ["loss/spread", "share/1", "share/10"]
    assert chosen.metrics().count("share/1") == 1
    assert "more" not in chosen.markdown()
    header = next(csv.reader(io.StringIO(chosen.csv())))
    assert header == ["run", "status", *chosen.metrics()]
    with pytest.raises(ValueError, match=r"--metrics=routed: .*did you mean routed/loss"):
        compared(tmp_path, metrics=["routed"])
    with pytest.raises(ValueError, match=r"--by=zz: .*; there are share/0, .* and 10 more"):
        compared(tmp_path, by="zz")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_terminal_shows_as_many_metrics_as_it_has_room_for(
    tmp_path, capsys, monkeypatch, columns
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in ("a", "b"):
        write_run(tmp_path, name, metrics={f"a_metric_of/{n:02}": n / 3 for n in range(30)})
    assert comparison.main([str(tmp_path)]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "|" not in text and text.startswith("toy")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    fitting = (columns - 3) // 16
    assert f"{30 - fitting} more: --metrics or --csv." in " ".join(text.split())
    assert f"a_metric_of/{fitting - 1:02}" in text and f"a_metric_of/{fitting:02}" not in text
    assert re.search(r"^a {17}0 ", text, re.MULTILINE)  # to the right


def test_a_place_counts_by_what_lies_there(tmp_path):
    write_run(tmp_path, "a", config={"data": "x/a.jsonl"})
    write_run(tmp_path, "b", config={"data": "y/b.jsonl"})
    assert compared(tmp_path).names == [], "the same content elsewhere"
    write_run(tmp_path, "c", config={"data": "x/a.jsonl"}, digests={"data": "e" * 16})
    table = compared(tmp_path)
    assert table.names == ["data"]
    assert {run.show("data") for run in table.runs} == {
        *("a.jsonl (dddddddd)", "b.jsonl (dddddddd)", "a.jsonl (eeeeeeee)"),
    }
    write_run(tmp_path, "d", config={"base": "other"}, digests={"base": "c" * 16})
    assert "base (digest)" not in compared(tmp_path).names
    write_run(tmp_path, "e", scale="cpu")
    assert "scale" in compared(tmp_path).names


def test_what_did_not_finish_is_listed_and_never_dropped(tmp_path):
    write_run(tmp_path, "good")
    write_run(tmp_path, "bad", status="failed", metrics={}, error="ValueError: no\nsuch | thing")
    write_run(tmp_path, "ended", status="stopped", metrics={})
    write_run(tmp_path, "killed", status="running", metrics={})
    (write_run(tmp_path, "torn") / "result.json").write_text('{"status": "comp')
    (write_run(tmp_path, "odd") / "result.json").write_text("[1]")
    at_work = write_run(tmp_path, "at_work", status="running", metrics={})
    with (at_work / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = compared(tmp_path)
    assert [run.path.name for run in table.runs] == ["good"]
    assert {run.path.name: run.problem for run in table.apart} == {
        "bad": "failed: ValueError: no such | thing",
        "ended": "stopped",
        "killed": "was killed",
        "torn": "no result.json that can be read",
        "odd": "no result.json that can be read",
        "at_work": "running now",
    }
    text = table.markdown()
    assert "Not in the table, 6:" in text and "/bad: failed: ValueError: no such | thing" in text
    assert len(list(csv.DictReader(io.StringIO(table.csv())))) == 7
    (tmp_path / "toy" / "good" / "previous").mkdir()
    for file in ("config.json", "result.json"):
        text = (tmp_path / "toy" / "good" / file).read_text()
        (tmp_path / "toy" / "good" / "previous" / file).write_text(text)
    assert len(entries.find([tmp_path, tmp_path / "toy" / "good"])) == 7, "each once"


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no result\.json there or below"):
        entries.find([tmp_path])
    with pytest.raises(ValueError, match="there is no such folder"):
        entries.find([tmp_path / "nowhere"])


def test_numbers_that_are_missing_come_last_and_csv_is_unrounded(tmp_path):
    for name, loss in (("a", None), ("b", 0.123456789), ("c", 0.2)):
        write_run(tmp_path, name, config={"lr": name, "kind": "x|y"}, metrics={"loss": loss})
    table = compared(tmp_path)
    assert [run.path.name for run in table.runs] == ["b", "c", "a"]
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["loss"] for row in rows] == ["0.123456789", "0.2", ""]
    assert "| a | a | - |" in table.markdown()


def test_the_metric_to_go_by(tmp_path):
    metrics = {"base_loss": 1.0, "routed/code": 3.0, "routed/math": 1.0, "first_loss": 2.0}
    for name, code in (("a", 3.0), ("b", 2.0)):
        write_run(
            tmp_path,
            name,
            experiment="train_router",
            metrics={**metrics, "routed/code": code, "first_loss": code},
        )
    table = compared(tmp_path)
    assert (table.by, table.lower) == ("routed/*", True)
    assert [run.path.name for run in table.runs] == ["b", "a"]
    assert comparison.score(table.runs[0], table.judged) == 1.5
    assert "lowest mean of routed/*" in table.markdown()
    assert table.metrics()[:2] == ["routed/code", "routed/math"]
    for name, direction in {
        "heldout_loss": "lower",
        "exact_match": "higher",
        "loss_over_accuracy": "",
        "tokens_per_s": "",
        "decode_ms": "lower",
    }.items():
        assert comparison.direction_of(name) == direction


def test_a_mean_is_of_what_all_runs_have(tmp_path):
    for name, routed in (
        ("both", {"routed/code": 2.0, "routed/math": 3.0}),
        ("one", {"routed/code": 2.1}),
    ):
        write_run(tmp_path, name, experiment="train_router", metrics=routed)
    table = compared(tmp_path)
    assert [run.path.name for run in table.runs] == ["both", "one"]
    assert "Best first: lowest mean of routed/code, which all have." in table.markdown()
    assert table.judged == ("routed/code",)
    write_run(tmp_path, "other", experiment="train_router", metrics={"routed/law": 1.0})
    table = compared(tmp_path)
    assert table.judged == () and "no metric of routed/* is in all of them" in table.markdown()


def test_two_settings_are_a_grid_and_others_parallel_axes(tmp_path):
    for number, (lr, kind) in enumerate([(0.1, "a"), (0.01, "a"), (0.01, "b")]):
        config = {"lr": lr, "kind": kind}
        write_run(tmp_path / "two", str(number), config=config, metrics={"loss": float(number)})
        write_run(tmp_path / "one", str(number), config={"lr": number}, metrics={"loss": -number})
    (image,) = compared(tmp_path / "two").figure().axes[0].images
    np.testing.assert_array_equal(image.get_array(), [[1, 0], [2, np.nan]])
    figure = compared(tmp_path / "one").figure()
    lines = [line for line in figure.axes[0].lines if len(set(line.get_xdata())) == 2]
    assert len(lines) == 3 and max(line.get_linewidth() for line in lines) == 2.5
    assert lines[-1].get_linewidth() == 2.5, "the best on top"
    assert compared(tmp_path / "two" / "toy" / "0").figure() is None


def test_figures_are_drawn_whatever_the_values(tmp_path):
    columns = {
        "a_name_that_is_much_too_long_for_an_axis $x$": ["字", "b\n", "$y", None],
        "same": [1, 1, 1, 1],
        "lr": [1e-6, 1e-3, 1.0, 0.0],
        "loss": [float(10**n) for n in range(4)],
    }
    figures = [
        display.parallel_figure(columns, lower_is_better=lower, title="$t")
        for lower in (False, True)
    ]
    for values in ([[np.nan]], [[1.0, 1.0]], [[1.0, np.nan], [3.0, 2.0]]):
        x = ("x $", ["字"] * len(values[0]))
        y = ("y", [(1, 2)] * len(values))
        figures.append(
            display.grid_figure(np.array(values), x=x, y=y, label="l", lower_is_better=True)
        )
    for number, figure in enumerate(figures):
        assert display.save_figure(figure, tmp_path / f"{number}.png").stat().st_size > 3000


def test_the_command(tmp_path, capsys):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / "runs", name, config={"lr": lr}, metrics={"loss": lr})
    out = tmp_path / "out"
    assert comparison.main([str(tmp_path / "runs"), f"--out={out}"]) == 0
    assert capsys.readouterr().out.startswith("# toy\n\n| run | lr | loss |")
    assert {each.name for each in out.iterdir()} == {"table.md", "table.csv", "table.png"}
    assert comparison.main([str(tmp_path / "runs"), "--csv"]) == 0
    assert capsys.readouterr().out == (out / "table.csv").read_text()
    write_run(tmp_path / "runs", "c", experiment="other")
    assert comparison.main([str(tmp_path / "runs"), f"--out={out}"]) == 0
    assert "# other" in capsys.readouterr().out
    assert (out / "other" / "table.md").exists()
    command = [sys.executable, "-m", "experiments.results", str(tmp_path / "runs"), "--csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "python -m experiments.results: "
        "--csv is one table, and these are runs 1 of other, 2 of toy: name those of one"
    )


def test_a_run_is_held_only_while_a_process_is_at_it(tmp_path):
    assert not entries.is_held(tmp_path)
    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert entries.is_held(tmp_path)
    assert not entries.is_held(tmp_path)
