"""The command line: flags, gin, scales, sweeps and exit codes."""

import dataclasses
import errno
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main as run
from experiments import registry, settings, sweeps, usage
from molora_jax.training import NonFiniteLossError
from tests.experiments import toy, toy_program

ROOT = pathlib.Path(run.__file__).parents[1]
ENTRIES = {
    "toy": registry.Experiment(module="tests.experiments.toy", summary="a toy"),
    "table2": registry.Experiment(module="no.such.module", summary="never loaded", tables="Tab 2"),
}


@pytest.fixture
def configs(tmp_path) -> pathlib.Path:
    folder = tmp_path / "configs"
    folder.mkdir()
    start = "from __gin__ import dynamic_registration\nfrom tests.experiments import toy\n"
    (folder / "toy.gin").write_text(start + "toy.Config.rate = 0.1\ntoy.Config.steps = 1\n")
    (folder / "tiny.gin").write_text(start + "toy.Config.steps = 2\ntoy.Config.limit = 5\n")
    return folder


@pytest.fixture
def call(configs, tmp_path):
    """Runs the command line in this process: (exit code, folders of runs)."""

    def run_it(*arguments: str) -> tuple[int, list[pathlib.Path]]:
        workdir = tmp_path / "runs"
        with flagsaver.flagsaver():
            try:
                argv = run.parse_flags(["molora run", "--experiment=toy", *arguments])
                flags.FLAGS.workdir = str(workdir)
                code = run.main(argv, entries=ENTRIES, configs=configs)
            except SystemExit as stop:
                code = stop.code
        return code, sorted(workdir.glob("toy/*/result.json"))

    return run_it


def the_config(result: pathlib.Path) -> dict:
    return json.loads((result.parent / "config.json").read_text())["config"]


def test_list_and_help_import_nothing_heavy():
    script = (
        "import sys; from experiments import main as run\n"
        "run.parse_flags(['run.py', '--list'])\n"
        "code = run.main(['run.py'])\n"
        "try:\n"
        "    run.parse_flags(['run.py', '--help'])\n"
        "except SystemExit as stop:\n"
        "    code = code or stop.code\n"
        "heavy = {'jax', 'flax', 'gin', 'numpy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = list(registry.EXPERIMENTS)
    header, *lines = lines
    assert header.split()[:2] == ["experiment", "paper"]
    assert [line.split()[0] for line in lines[: len(names)]] == names
    assert lines[len(names)].startswith("usage: ") and "Sweeps" in lines
    assert any(line.startswith("compose ") and "Tab 15" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: python run.py [field=value ...]"),
        (
            ["compose"],
            2,
            "python run.py: unexpected argument 'compose': write --experiment=compose",
        ),
        (["--experiment=tabel2"], 2, "unknown experiment"),
        (["--experimnt=compose"], 2, "did you mean --experiment"),
    ],
)
def test_exit_codes_of_the_program(arguments, code, said, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"--workdir={tmp_path / 'runs'}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--experiment=tabel2"], "did you mean table2?"),
        (["--rerunn"], "did you mean --rerun"),
        (["--scale=tinny"], "tiny|cpu|paper"),
        (["--seed=x"], "--seed=x"),
        (["--exp=toy"], "did you mean --experiment"),
        (["steps=3", "--seed=4", "seed=3"], "seed=3 and --seed=4: give one of the two"),
        (["stepps=3"], "stepps=3: there is no such field; did you mean steps"),
        (["steps=1.5"], "steps=1.5: expected a whole number, as in steps=3"),
        (["steps=-1"], "Config.steps = -1: expected 0 or more"),
        (["--lr=1"], "--lr is a setting, without dashes: lr=VALUE"),
        (["lora_alpha"], "write lora_alpha=VALUE"),
        (["--sweep=rates", "out=x"], "copied over the one before"),
        (["--fields", "rate=x"], "expected a number"),
        (["toy"], "write field=value or --flag=value"),
        (["compose"], "'compose': write --experiment=compose"),
        (["--scale=paper"], "has no --scale=paper"),
        (["--sweep=rate"], "did you mean rates?"),
        (["--sweep=rates", "--sweep=rates"], "named twice"),
        (["--sweep=rates,steps,rates"], "named twice"),
        (["--sweep=rates,"], "unknown sweep ''"),
        (["--sweep=seed", "--seed=3"], "make the same run: what they vary is set by"),
        (["--sweep=rates", "--gin_bindings=toy.Config.out='x'"], "copied over the one before"),
        (["--launcher=lokal"], "here|local|slurm"),
        (["--sweep=rates", "--jobs=2"], "--jobs=2: needs --launcher=local"),
        (["--memory_gb=3"], "--memory_gb=3: needs --launcher=local"),
        (["--memory_gb=nan", "--launcher=local"], "expected a number of GB"),
        (["--memory_gb=1e9", "--launcher=local"], "GB are free"),
        (["--jobs=-1"], "--jobs"),
        (["--sweep=rates", "--process_id=1"], "every run of a sweep is one process"),
        (["--retries=-1"], "--retries"),
        (["--slurm=time=5", "--launcher=local"], "it is for --launcher=slurm"),
        (["--slurm=tim=5", "--launcher=slurm"], "did you mean time?"),
        (["--sweep=rates", "--launcher=slurm"], "no sbatch, srun"),
        (["--gin_file=nowhere.gin"], "there is no such file"),
        (["--gin_bindings=toy.Config.stepps=1"], "did you mean toy.Config.steps"),
        (["--gin_bindings=Trainer.verbos=True"], "did you mean toy.Config.verbose?"),
        (["--gin_bindings=toy.Confg.steps=1"], "did you mean toy.Config.steps"),
        (["--gin_bindings=steps=1"], "did you mean toy.Config.steps"),
        (["--gin_bindings=tiny/toy.Config.steps=1"], "has no effect"),
        (["--gin_bindings=toy.sweep_rates.steps=1"], "parameter named 'steps'"),
        (["--gin_bindings=toy.Config.steps=%many"], "macro %many"),
        (["--gin_bindings=toy.Config.steps=many"], "quotes"),
        (["--gin_bindings=gin.macro.value=3"], "has no effect"),
        (["--gin_bindings=toy.Config.steps=1.5"], "Config.steps = 1.5: expected int"),
        (["--gin_bindings=toy.Config.steps=True"], "expected int"),
        (["--gin_bindings=toy.Config.kind='cubik'"], "did you mean 'cubic'?"),
        (["--gin_bindings=toy.Config.steps=-1"], "expected 0 or more"),
        (["--gin_bindings=toy.Config.out='missing'"], "no such folder"),
        (["--gin_bindings=toy.Config.rate=" + "9" * 400], "expected a finite number"),
        (["--norerun=yes"], "does not take an argument"),
        (["--gin_bindings=import os"], "may import only from"),
        (["--gin_bindings=from os import system"], "'os.system'"),
        (["--gin_bindings=include '/etc/passwd'"], "no such .gin file"),
        (["--gin_bindings=toy.Config.seed=-1"], "seed -1: expected 0 to 4294967295"),
        (["--seed=4294967296"], "seed 4294967296"),
        (
            [
                "--gin_bindings=a = %b",
                "--gin_bindings=b = %a",
                "--gin_bindings=toy.Config.steps = %a",
            ],
            "refers to itself",
        ),
        (["--gin_bindings=toy.Config.steps=" + "(" * 5000], "nested too deep"),
        (["--gin_file=" + "x" * 5000], "--gin_file=xxx"),
        (["--two\nlines"], "unknown flag --two lines"),
    ],
)
def test_misuse_leaves_with_2_and_starts_nothing(call, capsys, arguments, said):
    code, results = call(*arguments)
    assert (code, results) == (2, [])
    words = capsys.readouterr().err
    assert said in words and len(words) < 1500 and len(words.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learnig_rate", "lr?"),
        ("learning_rate", "lr?"),
        ("r", "rank?"),
        ("lora_alpha", "alpha?"),
        ("num_steps", "steps?"),
        ("max_seq_lenght", "seq_len?"),
        ("target_modules", "projections?"),
        ("per_device_batch_size", "batch_size?"),
        ("gradient_accumulation_steps", "accumulate?"),
        ("ranks", "rank?"),
    ],
)
def test_the_usual_name_of_a_field_leads_to_ours(capsys, name, said):
    for word, meant in (
        (f"{name}=1", f"did you mean {said} (--fields describes them)"),
        (f"--gin_bindings=train_adapter.Config.{name}=1", f"train_adapter.Config.{said}"),
    ):
        with flagsaver.flagsaver():
            argv = run.parse_flags(["run.py", "--experiment=train_adapter", word])
            with pytest.raises(SystemExit) as stop:
                run.main(argv)
        assert stop.value.code == 2
        assert capsys.readouterr().err.endswith(f"{meant}\n")


def test_a_usual_name_is_no_hint_where_the_config_has_no_such_field():
    module = registry.EXPERIMENTS["train_router"].load()
    assert "rank" not in settings.nearest_fields("lora_r", module)
    fields = {
        field.name
        for name in registry.EXPERIMENTS
        for field in dataclasses.fields(registry.EXPERIMENTS[name].load().Config)
    }
    assert set(settings.USUAL_NAMES.values()) <= fields
    assert not set(settings.USUAL_NAMES) & fields


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("line 3 of\nx.jsonl"), "toy failed: line 3 of x.jsonl; the traceback is in "),
        (KeyError("text"), "toy failed: KeyError: 'text'; the"),
        (FileNotFoundError("no x"), "toy failed: no x; the"),
        (FloatingPointError("nan"), "toy failed: nan; the"),
        (NonFiniteLossError("after step 3."), "toy failed: after step 3; the"),
    ],
)
def test_what_does_not_fit_is_one_line_and_its_trace_a_file(call, capsys, monkeypatch, error, said):
    def main(config, run):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(toy, "main", main)
        code, (result,) = call()
    assert code == 1
    assert json.loads(result.read_text())["status"] == "failed"
    words = capsys.readouterr().err
    file = result.parent / "error.txt"
    assert words.startswith(said) and words.endswith(f" traceback is in {file}\n")
    assert words.count("\n") == 1
    assert file.read_text().startswith("Traceback (most recent call last)")
    assert call()[0] == 0
    assert not file.exists(), "of an earlier try"


def test_a_workdir_that_cannot_be_made_is_a_misuse(call, capsys, tmp_path):
    (tmp_path / "runs").write_text("a file")
    assert call()[0] == 2
    assert "--workdir=" in capsys.readouterr().err


def test_a_full_disk_is_one_line_with_the_file(call, capsys, monkeypatch):
    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    code, made = call()
    assert (code, made) == (1, [])
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(r"molora run: \[Errno 28\] No space left on device: '.*/toy/.*'$", said)


def test_a_mistake_in_the_code_shows_its_trace(call, caplog, monkeypatch):
    def main(config, run):
        raise TypeError("no such argument")

    monkeypatch.setattr(toy, "main", main)
    assert call()[0] == 1
    assert "Traceback" in caplog.text


def test_a_gin_file_imports_nothing_but_the_project(call, capsys, tmp_path):
    """An import runs code, and the files of an experiment are passed from hand to hand."""
    marker, module = tmp_path / "ran", tmp_path / "evil.py"
    module.write_text(f"open({str(marker)!r}, 'w').close()\n")
    inner, file = tmp_path / "inner.gin", tmp_path / "mine.gin"
    inner.write_text("from __gin__ import dynamic_registration\nimport evil\n")
    file.write_text(f"include '{inner}'\n")
    sys.path.insert(0, str(tmp_path))
    try:
        for path in (inner, file):
            assert call(f"--gin_file={path}") == (2, [])
            assert "import of 'evil'" in capsys.readouterr().err
    finally:
        sys.path.remove(str(tmp_path))
    assert not marker.exists()
    file.write_text(f"include '{file}'\n")
    assert call(f"--gin_file={file}") == (2, [])
    assert "include each other" in capsys.readouterr().err


def test_a_strategy_that_is_not_there_is_refused_before_anything_starts(capsys, tmp_path):
    with flagsaver.flagsaver():
        arguments = ["--experiment=overhead", "--scale=tiny", f"--workdir={tmp_path / 'runs'}"]
        binding = "--gin_bindings=overhead.Config.strategy='groupd'"
        run.parse_flags(["run.py", *arguments, binding])
        with pytest.raises(SystemExit) as stop:
            run.main([])
    assert stop.value.code == 2
    assert "Did you mean 'grouped'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dead_binding_in_a_users_gin_file_is_refused(call, capsys, tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "from experiments import registry\n"
        "registry.nearest.count = 1\n"
    )
    code, results = call(f"--gin_file={file}")
    assert (code, results) == (2, [])
    assert "registry.nearest.count" in capsys.readouterr().err


def test_later_sources_of_values_win(call, tmp_path):
    file = tmp_path / "mine.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\n"
        "import tests.experiments.toy\n"
        "size = 7\n"
        "tests.experiments.toy.Config.limit = 6\n"
        "tests.experiments.toy.Config.sizes = (%size, %size)\n"
    )
    code, (result,) = call(
        "--scale=tiny",
        f"--gin_file={file}",
        "--gin_bindings=toy.Config.sizes = [8]",
        "--gin_bindings=toy.Config.seed = 3",
        "--seed=4",
    )
    assert code == 0
    config = the_config(result)
    assert config["rate"] == 0.1  # toy.gin over the default
    assert config["steps"] == 2  # tiny.gin over toy.gin
    assert config["limit"] == 6  # --gin_file over tiny.gin
    assert config["sizes"] == [8]  # --gin_bindings over --gin_file
    assert config["seed"] == 4  # --seed over a binding
    saved = json.loads(result.read_text())
    assert (saved["scale"], saved["seed"], saved["status"]) == ("tiny", 4, "complete")


def test_settings_stand_anywhere_and_go_over_gin(call):
    code, (result,) = call(
        "rate=2", "--gin_bindings=toy.Config.sizes = [8]", "sizes=9,10", "--scale=tiny",
        "out=a = b", "--gin_bindings=toy.Config.rate = 3", "seed=5",
    )  # fmt: skip
    assert code == 0
    config = the_config(result)
    assert (config["rate"], config["sizes"], config["seed"]) == (2.0, [9, 10], 5)
    assert (config["out"], config["steps"], config["limit"]) == ("a = b", 2, 5)
    report = (result.parent / "report.md").read_text().splitlines()
    again = "    molora run --experiment=toy --scale=tiny rate=2 sizes=9,10 'out=a = b' seed=5"
    assert report[-1].startswith(f"{again} --workdir=")
    assert call(*shlex.split(again)[3:]) == (0, [result]), "the same run"


def test_a_sweeps_point_goes_over_settings(call):
    code, results = call("--sweep=rates", "rate=5", "steps=4")
    assert code == 0
    found = [(the_config(each)["rate"], the_config(each)["steps"]) for each in results]
    assert sorted(found) == [(0.25, 4), (0.75, 4)]


def test_fields_are_listed_with_the_values_given(call, capsys):
    assert call("--fields", "--scale=tiny", "kind=cubic", "sizes=4,5") == (0, [])
    said = capsys.readouterr().out
    assert "Settings of toy at scale tiny" in said
    rows = {line.split()[0]: line for line in said.splitlines() if line}
    assert "linear or cubic" in rows["kind"] and " cubic  " in rows["kind"]
    assert "whole numbers" in rows["sizes"] and "4, 5" in rows["sizes"]
    assert "whole number or None" in rows["limit"] and " 5" in rows["limit"]


def test_every_flag_stands_in_one_group_of_the_help():
    listed = [name for group in usage.GROUPS.values() for name in group]
    assert set(run._own_flags()) | {"verbosity"} == set(listed)
    assert len(listed) == len(set(listed))
    text = usage.text(flags.FLAGS, "molora run")
    assert max(map(len, text.splitlines())) <= 100
    assert "(here | local | slurm; default: here)" in " ".join(text.split())
    assert "repeat this option" not in text and "run.py" not in text


@pytest.mark.parametrize(("asked", "prefixed"), [([], False), (["--verbosity=0"], True)])
def test_a_log_is_plain_lines_unless_all_of_it_is_asked_for(tmp_path, asked, prefixed):
    script = (
        "from absl import app, logging\n"
        "from experiments import main\n"
        "def run(argv):\n"
        "    main._log_plainly()\n"
        "    logging.info('a detail')\n"
        "    logging.warning('mind %s', 'this')\n"
        "app.run(run, flags_parser=main.parse_flags)\n"
    )
    command = [sys.executable, "-c", script, *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if prefixed:
        assert re.search(r"^I\d{4} .*\] a detail\nW\d{4} .*\] mind this$", done.stderr.strip())
    else:
        assert done.stderr == "warning: mind this\n"


def test_sweeps_multiply_and_end_in_a_table(call, capsys, tmp_path):
    code, results = call("--sweep=rates", "--sweep=steps")
    assert code == 0
    points = {(the_config(each)["rate"], the_config(each)["steps"]) for each in results}
    assert points == {(rate, steps) for rate in (0.25, 0.75) for steps in (1, 2, 3)}
    (folder,) = (tmp_path / "runs" / "toy").glob("sweep-rates-steps-*")
    assert {each.name for each in folder.iterdir()} == {"table.csv", "table.md", "table.png"}
    header, *rows = (folder / "table.csv").read_text().splitlines()
    assert header == "run,status,steps,rate,loss"
    assert len(rows) == 6
    assert any(row.endswith("complete,2,0.75,0.5625") for row in rows)
    assert rows[0].endswith("complete,3,0.25,0.015625"), "the best first"
    said = capsys.readouterr().out
    assert "| run | steps | rate | loss |" in said and "6 of 6 points have a result" in said
    assert call("--sweep=rates,steps") == (0, results), "the same, as a list"
    assert "6 of 6 points have a result (6 found)" in capsys.readouterr().out


def test_every_experiment_has_a_sweep_over_seeds(call):
    code, results = call("--sweep=seed", "--gin_bindings=toy.Config.steps=0")
    assert code == 0
    assert sorted(the_config(each)["seed"] for each in results) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", list(registry.EXPERIMENTS))
def test_every_point_of_every_sweep_can_be_bound(name):
    module = registry.EXPERIMENTS[name].load()
    for sweep in sweeps.of_module(module):
        found = sweeps.points(module, [sweep])
        assert len(set(found)) == len(found)
        for point in found:
            assert run.bindings(module, texts=[point])


def test_a_sweep_in_processes_hands_them_every_other_flag(configs, tmp_path, capsys):
    """What a worker makes of its command line must be the run that the sweep expects."""
    workdir, file = tmp_path / "runs", tmp_path / "mine.gin"
    start = "from __gin__ import dynamic_registration\nfrom tests.experiments import toy\n"
    file.write_text(start + "toy.Config.limit = 6\n")
    with flagsaver.flagsaver():
        argv = run.parse_flags(
            [
                *("run.py", "--experiment", "toy", "-sweep", "rates", "--launcher=local"),
                *("--jobs=2", "--retries=0", "--memory_gb=2", f"--workdir={workdir}"),
                *(f"--gin_file={file}", "--seed=7", "--norerun", "-v=1"),
                "--gin_bindings=toy.Config.sizes = (\n 5,\n 6)",
                "verbose=true",
                "rate=9",
                "--gin_bindings=toy.Config.kind = 'cubic'",
            ]
        )
        handed = sweeps.flags_of_a_run(flags.FLAGS)
        code = toy_program.main(argv)
    said = capsys.readouterr().out
    assert code == 0, said
    assert not {flag for flag in handed if re.match("--(sweep|launcher|jobs|ret|mem|sl)", flag)}
    assert "2 points, 2 at once, each in at most 2.0 GB of memory" in said
    assert "2 of 2 points have a result (0 found)" in said
    found = [the_config(each) for each in workdir.glob("toy/*/result.json")]
    assert sorted(each["rate"] for each in found) == [0.25, 0.75]
    for each in found:
        assert (each["seed"], each["limit"], each["kind"]) == (7, 6, "cubic")
        assert each["sizes"] == [5, 6] and each["verbose"] is True


def test_a_failed_point_fails_the_sweep_and_the_others_run(call, monkeypatch):
    measured = []

    def main(config, run):
        measured.append(config.rate)
        if config.rate == 0.25:
            raise RuntimeError("no")
        run.finish(metrics={"loss": 1.0}, report="# fine")

    monkeypatch.setattr(toy, "main", main)
    code, results = call("--sweep=rates")
    assert code == 1
    assert measured == [0.25, 0.75]
    assert {json.loads(each.read_text())["status"] for each in results} == {"failed", "complete"}


def test_an_interrupt_ends_the_whole_sweep(call, monkeypatch):
    def main(config, run):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "main", main)
    code, results = call("--sweep=rates")
    assert code == 1
    assert [json.loads(each.read_text())["status"] for each in results] == ["stopped"]


@pytest.mark.parametrize("name", list(registry.EXPERIMENTS))
def test_every_field_of_every_config_can_be_bound(name):
    module = registry.EXPERIMENTS[name].load()
    fields = dataclasses.fields(module.Config)
    assert "seed" in {field.name for field in fields}
    assert all(field.kw_only for field in fields)
    assert module.Config.__dataclass_params__.frozen
    short = module.__name__.rpartition(".")[2]
    texts = [f"{short}.Config.{field.name} = {i + 1000}" for i, field in enumerate(fields)]
    bound = run.bindings(module, texts=texts)
    assert bound == {field.name: i + 1000 for i, field in enumerate(fields)}


@pytest.mark.parametrize("name", list(registry.EXPERIMENTS))
def test_every_experiment_has_its_gin_file_and_a_tiny_scale(name):
    file = run.CONFIGS / f"{name}.gin"
    comment = file.read_text().split("\nfrom __gin__")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert f"molora run --experiment={name}" in comment
    assert "Expected:" in comment
    module = registry.EXPERIMENTS[name].load()
    run.bindings(module, files=[file])
    bound = run.bindings(module, files=[run.CONFIGS / "tiny.gin"], shared=True)
    assert bound, "a section in tiny.gin"
    assert bound.get("base", "tiny-random") == "tiny-random", "where it has a base model"
