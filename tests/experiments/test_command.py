"""The one installed command: where its words go, and what it says of those it does not know."""

import importlib.metadata
import json
import subprocess

import pytest
from absl.testing import flagsaver

from experiments import command, registry


def test_every_tool_and_no_other_word_is_known(capsys):
    for verb in command.VERBS:
        with pytest.raises(SystemExit) as left:
            command.main([verb, "--help"])
        assert left.value.code == 0
        assert verb in capsys.readouterr().out
    assert command.main(["inspct", "x"]) == 2
    assert "did you mean inspect?" in capsys.readouterr().err


def test_it_lists_the_experiments(capsys):
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
        command.main(["run", "--list"])
    assert not left.value.code
    listed = capsys.readouterr().out
    assert all(name in listed for name in registry.EXPERIMENTS)


def test_it_plans_compares_and_says_its_version(capsys):
    assert command.main(["plan", "--model", "qwen3-4b", "--devices", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert command.main(["results", "no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("molora-jax")
    assert command.main([]) == 0
    assert "molora run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("molora ins", ["inspect"]),
        ("molora run --experiment=fig3", ["fig3"]),
        ("molora run --scale=t", ["tiny"]),
        ("molora run --experiment=train_adapter projec", ["projections="]),
        ("molora run --experiment train_adapter lr=1 ste", ["steps="]),
        ("molora run --experiment=train_adapter rank=--ex", []),
        ("molora run router_j", ["router_joined="]),
        ("molora generate --compo", ["--composition"]),
        ("molora compose a b --base tiny-random --add", ["--add_to"]),
        ("molora generate --base tiny", []),
        ("molora completion z", ["zsh"]),
    ],
)
def test_a_shell_completes_words(line, wanted):
    script = f"""
    {command.completion("bash")}
    COMP_WORDS=({line.replace("=", " = ")}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _molora
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == wanted


def test_an_unknown_shell_is_refused(capsys):
    assert command.main(["completion", "fish"]) == 2
    assert "expected bash or zsh" in capsys.readouterr().err
