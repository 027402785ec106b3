"""Run folders: ids, what is written, found, rerun, retrained, resumed, failed and stopped."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from experiments import artifacts, results
from experiments import main as command_line
from tests.experiments import toy

ROOT = pathlib.Path(command_line.__file__).parents[1]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "runs"


def execute(workdir, main, *, config=None, scale="tiny", **options):
    config = toy.Config() if config is None else config
    module = types.SimpleNamespace(__name__=toy.__name__, Config=toy.Config, main=main)
    return results.execute(
        "toy", module, config, toy.digests(config), scale=scale, workdir=workdir, **options
    )


def result_of(path):
    return json.loads((path / "result.json").read_text())


def metrics_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def trains(made, *, value="w"):
    """A main that trains one artifact in two logged steps and reports how often it was made."""

    def make(folder):
        made.append(1)
        (folder / "weights").write_text(value)
        lines = [json.dumps({"step": step, "loss": 3.0 - step}) for step in range(2)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def main(config, run):
        read = run.artifact(
            "toy",
            config={"rate": config.rate},
            digests={"base": "b0"},
            make=make,
            load=lambda folder: (folder / "weights").read_text(),
            phase="adapter/code",
        )
        assert read == value
        run.finish(metrics={"made": len(made)}, report=f"# made {len(made)} times")

    return main


def test_a_run_writes_its_folder(workdir):
    def main(config, run):
        run.log_metrics({"loss": float("nan"), "share": [0.5, 0.5]}, step=0, phase="train")
        run.finish(
            metrics={"loss": float("nan"), "steps": 3},
            claims=[
                results.Claim(
                    id="table15.share",
                    kind="share",
                    paper=100.0,
                    ours=93.0,
                    unit="%",
                    direction="higher",
                    holds=False,
                    note="two cores",
                )
            ],
            report="# Title",
        )

    status, path = execute(workdir, main, config=toy.Config(seed=7), scale="cpu")
    assert status == "complete"
    assert path.parent == workdir / "toy"
    result = result_of(path)
    assert set(result) == {
        *("experiment", "status", "scale", "seed", "environment", "metrics", "claims"),
    }
    assert (result["experiment"], result["status"]) == ("toy", "complete")
    assert (result["scale"], result["seed"]) == ("cpu", 7)
    assert result["metrics"] == {"loss": None, "steps": 3}
    assert result["claims"] == [
        {
            "id": "table15.share",
            "kind": "share",
            "paper": 100.0,
            "ours": 93.0,
            "unit": "%",
            "direction": "higher",
            "holds": False,
            "note": "two cores",
        }
    ]
    assert {"jax", "device", "cpu_count", "source"} <= set(result["environment"])
    assert metrics_of(path) == [{"phase": "train", "step": 0, "loss": None, "share": [0.5, 0.5]}]
    report = (path / "report.md").read_text()
    assert report.startswith("# Title")
    assert "| table15.share | 100 % | 93 % | no | two cores |" in report
    assert "where ours is at least as good" in report
    *_, made_by, empty, last = report.splitlines()
    assert (empty, last) == ("", f"    molora run --experiment=toy seed=7 --workdir={workdir}")
    assert all(str(value) in made_by for value in result["environment"].values())
    saved = json.loads((path / "config.json").read_text())
    assert saved["config"]["seed"] == 7
    assert saved["digests"] == {"data": "d0", "base": "b0"}


def test_the_id_knows_config_and_digests_and_no_places():
    config = toy.Config()
    same = results.run_id("toy", dataclasses.replace(config, out="elsewhere"), {"data": "d"})
    assert same == results.run_id("toy", config, {"data": "d"})
    assert same != results.run_id("toy", config, {"data": "e"})
    assert same != results.run_id("other", config, {"data": "d"})
    assert same != results.run_id("toy", dataclasses.replace(config, seed=1), {"data": "d"})


def test_config_gin_makes_the_config_again(workdir):
    config = toy.Config(rate=0.1, kind="cubic", sizes=(5,), limit=2, verbose=True, out="a'b")
    _, path = execute(workdir, toy.main, config=config)
    values = command_line.bindings(toy, files=[path / "config.gin"])
    assert toy.Config(**values) == config


def test_a_finished_run_is_found_and_its_report_printed(workdir, capsys):
    made = []
    first = execute(workdir, trains(made))
    capsys.readouterr()
    assert execute(workdir, trains(made)) == first
    said = capsys.readouterr().out
    assert "# made 1 times" in said
    assert "Other source code" not in said
    result = result_of(first[1])
    result["environment"]["source"] = "0123"
    (first[1] / "result.json").write_text(json.dumps(result))
    execute(workdir, trains(made))
    said = capsys.readouterr().out
    assert "Other source code made this run (0123" in said
    assert "Another environment" not in said
    result["environment"]["jax"] = "0.0.1"
    (first[1] / "result.json").write_text(json.dumps(result))
    execute(workdir, trains(made))
    assert "Another environment made this run (JAX 0.0.1 on" in capsys.readouterr().out
    assert made == [1]


def test_a_run_is_asked_for_again_by_the_command_of_now(workdir, capsys, monkeypatch):
    """Places are not part of a run: another caller finds it with files of another name."""
    execute(workdir, toy.main, config=toy.Config(out="/there"))
    assert f"    molora run --experiment=toy --scale=tiny out=/there --workdir={workdir}\n" in (
        capsys.readouterr().out
    )
    execute(workdir, toy.main, config=toy.Config(out="/elsewhere"))
    now = f"molora run --experiment=toy --scale=tiny out=/elsewhere --workdir={workdir}"
    assert f"As asked now:\n\n    {now}\n" in capsys.readouterr().out
    execute(workdir, toy.main, config=toy.Config(out="/there"))
    assert "As asked now" not in capsys.readouterr().out


def test_rerun_measures_again_and_retrain_trains_again(workdir):
    made, measured = [], []

    def main(config, run):
        measured.append(1)
        trains(made)(config, run)

    _, path = execute(workdir, main)
    execute(workdir, main, rerun=True)
    assert (len(measured), len(made)) == (2, 1)
    execute(workdir, main, retrain=True)
    assert (len(measured), len(made)) == (3, 2)
    assert result_of(path)["metrics"] == {"made": 2}
    # Its training is in every run's log, whether it was trained there or found.
    logged = [{"phase": "adapter/code", "step": step, "loss": 3.0 - step} for step in range(2)]
    assert metrics_of(path) == logged


@pytest.mark.parametrize("end", ["failed", "complete"])
def test_a_rerun_keeps_what_it_replaces(workdir, end):
    def measures_again(config, run):
        if end == "failed":
            raise RuntimeError("no")
        run.finish(metrics={"loss": 9}, report="# again")

    _, path = execute(workdir, toy.main)
    files = {each.name: each.read_text() for each in path.iterdir() if each.name != ".lock"}
    assert execute(workdir, measures_again, rerun=True)[0] == end
    assert result_of(path)["status"] == end
    assert {each.name: each.read_text() for each in (path / "previous").iterdir()} == files
    # What a failed try leaves is no measurement: the next one does not take its place.
    execute(workdir, toy.main, rerun=True)
    kept = json.loads((path / "previous" / "result.json").read_text())["metrics"]["loss"]
    assert kept == (9 if end == "complete" else 0.125)


def test_a_finished_run_without_its_report_is_measured_again(workdir, caplog):
    _, path = execute(workdir, toy.main)
    (path / "report.md").unlink()
    assert execute(workdir, toy.main) == ("complete", path)
    assert "report.md is gone" in caplog.text
    assert (path / "report.md").read_text().startswith("# Toy")


def test_two_artifacts_without_a_phase_keep_their_own_lines(workdir):
    def make(folder):
        (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')

    def main(config, run):
        for rank in (1, 2):
            options = {"digests": {}, "make": make, "load": lambda folder: None}
            run.artifact("toy", config={"rank": rank}, **options)
        run.finish(metrics={}, report="#")

    _, path = execute(workdir, main)
    assert len({line["phase"] for line in metrics_of(path)}) == 2


def test_one_retrain_makes_an_artifact_once_though_it_is_asked_for_twice(workdir):
    made = []

    def main(config, run):
        finish, run.finish = run.finish, lambda **_: None
        trains(made)(config, run)
        trains(made)(config, run)
        finish(metrics={}, report="#")

    execute(workdir, main)
    execute(workdir, main, retrain=True)
    assert len(made) == 2


def test_a_failure_says_why_and_the_next_try_resumes(workdir, caplog):
    made = []

    def fails(config, run):
        run.log_metrics({"x": 1}, step=0, phase="early")
        trains(made)(config, types.SimpleNamespace(artifact=run.artifact, finish=lambda **_: None))
        raise RuntimeError("no such luck")

    status, path = execute(workdir, fails)
    assert status == "failed"
    result = result_of(path)
    assert result["status"] == "failed"
    assert result["error"] == "RuntimeError: no such luck"
    with caplog.at_level("INFO", logger="absl"):
        status, again = execute(workdir, trains(made))
    assert (status, again) == ("complete", path)
    assert "an earlier try failed (RuntimeError: no such luck); measuring again" in caplog.text
    assert "from the cache" in caplog.text
    assert made == [1]
    assert "error" not in result_of(path)
    assert [line["phase"] for line in metrics_of(path)] == ["early", *["adapter/code"] * 2]


def test_a_main_that_never_finishes_is_a_failure(workdir):
    status, path = execute(workdir, lambda config, run: None)
    assert status == "failed"
    assert "without run.finish" in result_of(path)["error"]


def test_an_interrupt_is_stopped(workdir):
    def main(config, run):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    status, path = execute(workdir, main)
    assert status == "stopped"
    assert result_of(path)["status"] == "stopped"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_logged_again_replaces_its_phase_from_there_on(workdir):
    def main(config, run):
        for step in range(4):
            run.log_metrics({"try": 1}, step=step, phase="a")
        run.log_metrics({"try": 1}, step=0, phase="b")
        for step in range(2, 5):
            run.log_metrics({"try": 2}, step=step, phase="a")
        run.finish(metrics={}, report="#")

    _, path = execute(workdir, main)
    lines = [(line["phase"], line["step"], line["try"]) for line in metrics_of(path)]
    assert lines == [
        *[("a", 0, 1), ("a", 1, 1), ("b", 0, 1)],
        *[("a", 2, 2), ("a", 3, 2), ("a", 4, 2)],
    ]


def test_a_run_that_another_process_holds_is_left_alone(workdir, caplog):
    def main(config, run):
        with caplog.at_level("ERROR", logger="absl"):
            status, path = execute(workdir, toy.main)
        assert status == "failed"
        assert "another process" in caplog.text
        assert result_of(path)["status"] == "running"
        run.finish(metrics={}, report="#")

    assert execute(workdir, main)[0] == "complete"


def test_a_run_that_another_process_finished_meanwhile_is_found(workdir, monkeypatch):
    read, reads = results.read_result, []

    def finished_after_the_first_look(path):
        found = read(path)
        reads.append(path)
        if len(reads) == 1:
            monkeypatch.setattr(results, "read_result", read)
            execute(workdir, toy.main)
        return found

    measured = []
    monkeypatch.setattr(results, "read_result", finished_after_the_first_look)
    status, path = execute(workdir, lambda config, run: measured.append(run))
    assert (status, measured) == ("complete", [])
    assert result_of(path)["status"] == "complete"


def test_an_unreadable_result_counts_as_no_run(workdir):
    _, path = execute(workdir, toy.main)
    (path / "result.json").write_text('{"status": "comp')
    assert execute(workdir, toy.main)[0] == "complete"
    assert result_of(path)["status"] == "complete"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "speed"}, "Claim.kind"),
        ({"direction": "up"}, "Claim.direction"),
        ({"holds": None}, "note must say why"),
        ({"ours": "fast"}, "expected a number"),
        ({"paper": "1.3"}, "expected a number"),
    ],
)
def test_a_claim_checks_itself(changes, said):
    good = {"id": "t", "kind": "ratio", "ours": 1.3, "direction": "lower", "holds": True}
    assert results.Claim(**good).ours == 1.3
    with pytest.raises(ValueError, match=r"claim t|Claim") as caught:
        results.Claim(**good | changes)
    assert said in str(caught.value)


def test_a_time_without_a_gpu_is_not_judged(workdir):
    def main(config, run):
        claim = results.Claim(id="t", kind="time", ours=1.0, direction="lower", holds=True)
        run.finish(metrics={}, claims=[claim], report="#")

    status, path = execute(workdir, main)
    assert status == "failed"
    assert "a time off a GPU" in result_of(path)["error"]


def test_tiny_sizes_have_no_verdict(workdir):
    def main(config, run):
        claim = results.Claim(
            id="t", kind="ratio", ours=1.0, direction="lower", holds=True, note="CPU"
        )
        run.finish(metrics={}, claims=[claim], report="#")

    for scale, verdict in (("tiny", None), ("cpu", True)):
        status, path = execute(workdir, main, scale=scale, rerun=True)
        assert status == "complete"
        (claim,) = result_of(path)["claims"]
        assert claim["holds"] is verdict
        assert claim["note"] == ("tiny sizes; CPU" if scale == "tiny" else "CPU")


# A whole program, killed: the artifact's own checkpoint decides where the next try goes on.
PROGRAM = """
import sys, time, pathlib, types
from experiments import main as command_line
from experiments import registry
from tests.experiments import toy

def make(folder):
    checkpoint = folder / "checkpoints" / "step"
    checkpoint.parent.mkdir(exist_ok=True)
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (folder / "metrics.jsonl").open("a") as log:
        for step in range(first, 6):
            print(f'{{"step": {step}, "first": {first}}}', file=log, flush=True)
            checkpoint.write_text(str(step + 1))
            print("step", step, flush=True)
            if first == 0 and step == 2:
                time.sleep(60)

def main(config, run):
    load = lambda folder: (folder / "metrics.jsonl").read_text()
    run.artifact("toy", config={}, digests={}, make=make, load=load)
    run.finish(metrics={}, report="# done")

toy.main = main
entries = {"toy": registry.Experiment(module="tests.experiments.toy", summary="a toy")}
program = lambda argv: command_line.main(argv, entries=entries)
command_line.start(program)
"""


@pytest.mark.parametrize(
    ("sent", "left", "code"),
    [(signal.SIGKILL, "running", -signal.SIGKILL), (signal.SIGTERM, "stopped", 1)],
)
def test_a_killed_program_resumes(workdir, sent, left, code):
    def start():
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--experiment=toy", f"--workdir={workdir}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with start() as program:
        for line in program.stdout:
            if line == "step 2\n":
                program.send_signal(sent)
                break
        assert program.wait(timeout=180) == code
    (path,) = [each.parent for each in workdir.glob("toy/*/result.json")]
    assert result_of(path)["status"] == left
    with start() as program:
        _, errors = program.communicate(timeout=180)
    assert program.returncode == 0, errors
    assert "an earlier try was" in errors
    assert result_of(path)["status"] == "complete"
    lines = [(line["step"], line["first"]) for line in metrics_of(path)]
    assert lines == [(0, 0), (1, 0), (2, 0), (3, 3), (4, 3), (5, 3)]
    assert not list((pathlib.Path(os.environ["MOLORA_CACHE"])).rglob("*.partial"))
    assert artifacts.MANIFEST in {each.name for each in workdir.parent.rglob("artifact.json")}
