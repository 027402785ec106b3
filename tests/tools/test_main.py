"""The command line of the tools: help, exit codes, one line for a mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from molora_jax.tools.arguments import Misuse, named_paths, parse

VERBS = ("inspect", "convert", "merge", "statistics", "compose", "probe", "generate", "serve")


def test_messages_and_hints_begin_with_what_was_typed(capsys, folders, tmp_path):
    from experiments import command
    from molora_jax.tools.__main__ import main

    pair = ["compose", str(folders["a"]), str(folders["b"]), "--base", "tiny-random", "--out"]
    for run, prog in ((main, "python -m molora_jax.tools"), (command.main, "molora")):
        for argv, words in (
            (["inspect"], "required: path"),
            (["inspect", "nowhere"], "no adapter at nowhere"),
            ([*pair, str(tmp_path / "x")], f"`{prog} statistics`"),
        ):
            assert run(argv) in (1, 2)
            said = capsys.readouterr().err.splitlines()[-1]
            assert said.startswith(f"{prog} {argv[0]}: ")
            assert words in said
        with pytest.raises(SystemExit):
            run(["compose", "--help"])
        text = capsys.readouterr().out
        assert text.startswith(f"usage: {prog} compose ")
        assert f"example:\n  {prog} compose out/code" in text


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_groups_defaults_and_an_example(verb, capsys):
    from molora_jax.tools.__main__ import main

    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = capsys.readouterr().out
    for part in ("\nwhat:\n", "\nhow:\n", f"\nexample:\n  python -m molora_jax.tools {verb} "):
        assert part in text
    assert "default: None" not in text and "default: False" not in text
    assert ("default: 64" in text) == (verb in ("generate", "statistics", "serve"))


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_answers_without_importing_jax(verb):
    code = (
        "import sys; from molora_jax.tools.__main__ import main\n"
        f"try: main({[verb] * bool(verb)} + ['--help'])\n"
        "finally: heavy = {'jax', 'numpy', 'tokenizers'} & sys.modules.keys(); assert not heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stderr) == (0, "")
    for word in VERBS if not verb else (verb, "--"):
        assert word in done.stdout


def test_the_module_runs_as_a_program(folders):
    done = subprocess.run(
        [sys.executable, "-m", "molora_jax.tools", "inspect", str(folders["b"])],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "adapter 'b'" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_has_read_enough_gets_no_trace(folders):
    command = f"{sys.executable} -m molora_jax.tools inspect {folders['a']} --json | head -c 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert (done.stdout, done.stderr) == ("{", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["inspekt", "x"], "unknown 'inspekt' (known: inspect, convert, merge, statistics, "
                           "compose, probe, generate, serve); did you mean 'inspect'?"),
        ([], "the following arguments are required: VERB"),
        (["merge", "a", "--outt", "b"], "unknown option --outt; did you mean '--out'?"),
        (["inspect"], "required: path"),
        (["convert", "a", "b", "--to", "pefft"], "unknown 'pefft'"),
        (["convert", "a", "b", "--max_rank", "0"], "'0': expected a whole number of at least 1"),
        (["merge", "a", "--out", "b", "--weights", "a"], "'a': expected name=number pairs"),
        (["merge", "a", "--out", "b", "--weights", "a=x"], "'x': expected a finite number"),
        (["merge", "a", "--out", "b", "--weights", "a=nan"], "'nan': expected a finite number"),
        (["merge", "a", "--out", "b", "--weights", "a=0"], "'0': expected a finite number that is"),
        (["merge", "a", "--out", "b", "--weights", "a=1,a=2"], "each name once"),
        (["merge", "a", "--out", "b", "--weights", "c=1"], "no adapter is called 'c'"),
        (["merge", "x/a", "y/a", "--out", "b"], "two adapters are called 'a' (x/a and y/a)"),
        (["merge", "a", "--base", "tiny-random", "--rank", "2", "--out", "b"], "--rank is of an"),
        (["merge", "a", "--dtype", "float16", "--out", "b"], "--dtype is of a model"),
        (["probe", "a"], "required: --base"),
        (["generate", "--base", "tiny-random"], "--prompt"),
        (["generate", "--base", "x", "--prompt", "a", "--top_p", "2"], "top_p 2.0: expected"),
        (["generate", "--base", "x", "--prompt", "a", "--adapter", "base=x"], "names an arm"),
        (["generate", "--base", "x", "--prompt", "a", "--seed", "-1"], "a seed from 0 to 4294967"),
        (["generate", "--base", "x", "--prompt", "a", "--seed", "4294967296"], "'4294967296': exp"),
    ],
)  # fmt: skip
def test_a_misuse_is_one_line_and_exit_code_2(tool, argv, words):
    result = tool(*argv)
    assert result.code == 2
    assert words in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["inspect", "nowhere"], "no adapter at nowhere"),
        (["convert", "nowhere", "{tmp}/x"], "no adapter at nowhere"),
        (["merge", "nowhere", "--out", "{tmp}/x"], "no adapter at nowhere"),
        (["probe", "nowhere", "--base", "tiny-random"], "no adapter at nowhere"),
        (["probe", "{a}", "--base", "tiny-randon"], "did you mean tiny-random?"),
        (["probe", "{a}", "--base", "tiny-random", "--prompt_file", "{tmp}/no"], "no file"),
        (["probe", "{a}", "--base", "tiny-random", "--text", " "], "the text is empty"),
        (["generate", "--base", "tiny-random", "--prompt", "x", "--composition", "no"], "no comp"),
        # What is read is looked for before a base is loaded.
        (["inspect", "nowhere", "--base", "no/base"], "no adapter at nowhere"),
        (["probe", "nowhere", "--base", "no/base"], "no adapter at nowhere"),
        (["statistics", "nowhere", "--base", "no/base", "--data", "x"], "no adapter at nowhere"),
        (["compose", "{a}", "nowhere", "--base", "no/base", "--out", "{tmp}/x"], "at nowhere"),
        (["compose", "--add_to", "no", "--base", "no/base", "--out", "{tmp}/x"], "no composition"),
        (["generate", "--base", "no/base", "--prompt", "x", "--adapter", "nowhere"], "at nowhere"),
        (["generate", "--base", "no/base", "--prompt", "x", "--composition", "no"], "no comp"),
        (["generate", "--base", "no/base", "--prompt", "x", "--composition", "{a}"], "an adapter"),
        (["serve", "--base", "no/base", "--adapters", "a=nowhere"], "no adapter at nowhere"),
        (["serve", "--model", "no/base", "--composition", "no"], "no composition at no"),
        (["merge", "{a}", "--out", "/proc/nope/x"], "no folder can be made in /proc (No such"),
        (["convert", "{a}", "{a}/README.md/x"], "/README.md is no folder. Choose another path"),
    ],
)
def test_what_is_not_there_is_one_line_and_exit_code_1(tool, tmp_path, folders, argv, words):
    result = tool(*(each.format(tmp=tmp_path, a=folders["a"]) for each in argv))
    assert result.code == 1
    assert words in result.err
    assert not list(tmp_path.iterdir())


def test_a_home_folder_begins_a_path_and_no_text(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    argv = ["compose", "q=~/m", "n", "--base", "~/b", "--out=~/x", "--check", "q=~/f.jsonl"]
    args = parse(argv)
    assert (args.out, args.base, args.adapters) == (
        "/home/ada/x",
        "/home/ada/b",
        ["q=/home/ada/m", "n"],
    )
    assert args.check == ["q=/home/ada/f.jsonl"]
    args = parse(["generate", "--base", "a~b", "--prompt", "~ is a tilde", "--stop", "~"])
    assert (args.base, args.prompt, args.stop) == ("a~b", "~ is a tilde", ["~"])


def test_adapters_are_named_by_their_folder_or_as_the_caller_says(tmp_path):
    odd = tmp_path / "rank=4"
    odd.mkdir()
    found = named_paths(["x/sql", "code=y/sql", "org/name@main", str(odd)])
    assert found == {
        "sql": "x/sql", "code": "y/sql", "name": "org/name@main", "rank=4": str(odd)
    }  # fmt: skip
    for item in ("=x", "a="):
        with pytest.raises(Misuse, match="expected NAME=PATH"):
            named_paths([item])
