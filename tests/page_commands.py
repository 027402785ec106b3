"""A command of a page: run in small, checked as far as it goes without running, or listed."""

import contextlib
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import main as experiments
from experiments import registry, sweeps
from tests.pages import ROOT

# What does not run here, by how it begins, and why; each must still be met.
NOT_RUN = {
    "curl": "needs the server of the page; tests/serving asks one of the same requests",
    "export": "the shell of the person",
    "git": "the clone of the person",
    "hf download": "needs a network",
    "make": "makes an environment of its own, and takes minutes to hours; its names are looked up",
    "molora serve": "stays up; tests/serving starts it",
    "pip": "needs a network and minutes; CI installs the same",
    "pytest": "this is one",
    "python -c": "asks for a GPU",
    "python -m pallas_kernels.device_check": "needs a GPU",
    "python -m pallas_kernels.deviceless": "needs the CUDA compiler: `make deviceless`",
    "python -m tests.parallel.memory": "compiles for minutes, on devices of its own",
    "python -m tests.parity.against_peft": "needs torch and peft: `make parity`",
    "python -m venv": "the environment of the person",
    "source": "the shell of the person",
    "srun": "needs Slurm",
}
# What stands for a thing of the reader's.
STANDS_FOR = {"$BASE": "tiny-random", "smollm2-135m": "tiny-random", "BASE": "tiny-random",
              "NAME": "tiny-random", "ADAPTER": "out/code", "RUNS": "runs"}  # fmt: skip
# A sentence that names an experiment leaves out what the experiment cannot do without.
NEEDED = {
    "analyse": ["composition=out/two"],
    "train_adapter": ["data=code.jsonl"],
    "train_router": ["adapters=out/code,out/math", "data=code.jsonl,math.jsonl"],
}
# Shapes of commands of the tools that have run: another one of the same options is only parsed.
RUN_ALREADY: set[tuple[str, ...]] = set()
RUN_TOOLS = ("inspect", "convert", "merge", "statistics", "compose", "probe", "generate")


def check(command, capsys) -> None:
    """Runs a command, or checks what can be without; AssertionError where it is wrong."""
    called, arguments = command.called, [substituted(each) for each in command.arguments]
    if command.partial and "…" in " ".join(command.words):
        arguments = []
    verb = called.split()[1]
    capsys.readouterr()
    if called.startswith("molora run"):
        check_run(arguments, partial=command.partial)
    elif called.startswith("molora ") and verb in (*RUN_TOOLS, "serve"):
        check_tool(verb, arguments, command, capsys)
    elif called.startswith("molora plan"):
        check_plan(["--plan", *[each for each in arguments if each != "--plan"]])
    elif called.startswith("molora "):
        check_molora(verb, arguments)
    elif called.startswith("python docs/"):
        assert (ROOT / command.words[1]).is_file(), command  # tests of their own, below
    else:
        assert any(called.startswith(begins) for begins in NOT_RUN), f"{command}: not known"
        check_listed(command, called, arguments)


def substituted(word: str) -> str:
    """The word with what stands for the reader's own things put in."""
    for name, value in STANDS_FOR.items():
        word = re.sub(rf"(?<![\w]){re.escape(name)}(?!\w)", value, word)
    return word.removesuffix("...")


def check_run(arguments: list[str], *, partial: bool) -> None:
    """Flags, experiment, bindings and sweeps are what the program would take."""
    arguments = [each.replace("=tiny-random", "=table2") if "experiment" in each else each
                 for each in arguments]  # fmt: skip
    with flagsaver.flagsaver():
        try:
            _, *given = experiments.parse_flags(["molora run", *arguments])
        except SystemExit as stop:
            if stop.code:
                pytest.fail(f"{arguments} are refused")
            return  # --help
        values = flags.FLAGS
        if values.list:
            assert experiments.main(["molora run"]) == 0
            return
        name = values.experiment
        assert name in registry.EXPERIMENTS, name
        module = registry.EXPERIMENTS[name].load()
        names = {each.partition("=")[0] for each in given}
        names |= set(re.findall(r"Config\.(\w+)", " ".join(values.gin_bindings)))
        needed = [each for each in NEEDED.get(name, []) if each.partition("=")[0] not in names]
        if values.fields:
            assert experiments.main(["molora run", *given]) == 0
            return
        assert partial or not needed or name == "analyse", f"{arguments} lacks {needed}"
        given = [*needed, *given]
        sweeps.check_flags(values)
        if values.mesh:
            from molora_jax.parallel.mesh import parse_mesh

            parse_mesh(values.mesh)
        for point in sweeps.points(module, sweeps.names_of(values.sweep)):
            experiments.resolve(name, module, given=given, sweep_point=point)


def check_tool(verb: str, arguments: list[str], command, capsys) -> None:
    from molora_jax.tools.__main__ import main
    from molora_jax.tools.arguments import parse

    if not [each for each in arguments if not each.startswith("-")]:
        with pytest.raises(SystemExit):  # --help: the verb is there
            parse([verb, "--help"])
        return
    if "..." in command.words:  # what is said of it must be an option
        with contextlib.suppress(SystemExit):
            parse([verb, *arguments, "--help"])
        return
    options = parse([verb, *arguments])
    options_given = {word for word in arguments if word.startswith("--")} - {"--max_tokens"}
    shape = (verb, *sorted(options_given))
    if verb == "serve" or shape in RUN_ALREADY:
        return
    RUN_ALREADY.add(shape)
    small = {"statistics": ["--seq_len", "32", "--rows", "4", "--features", "8", "--overwrite"]}
    if verb == "generate":  # one arm of several, for each compiles
        only = "routed" if options.composition else Path(options.adapter[0]).name
        small["generate"] = ["--max_tokens", "2", "--only", only]
    owned = ["--overwrite"] if verb in ("convert", "merge", "compose") else []
    code = main([verb, *arguments, *small.get(verb, owned)])
    assert code == 0, f"{command}: {capsys.readouterr().err}"


def check_plan(arguments: list[str]) -> None:
    from molora_jax.parallel import __main__ as plan

    options = plan._parse(arguments, plan.MODULE)
    if options.model and len(options.model) == 1 and not getattr(options, "compile", False):
        assert plan.main(arguments) == 0


def check_molora(verb: str, arguments: list[str]) -> None:
    from experiments import command

    if verb == "results":  # its runs are the reader's
        with pytest.raises(SystemExit) as stop:
            command.main(["results", *arguments, "--help"])
        assert stop.value.code == 0
        return
    assert command.main([verb, *arguments]) == 0, verb


def check_listed(command, called: str, arguments: list[str]) -> None:
    """What does not run is still held against what it names."""
    if called.startswith("make "):
        makefile = (ROOT / "Makefile").read_text()
        for word in command.words[1:]:
            name, is_variable, _ = word.partition("=")
            form = rf"^{name} \??=" if is_variable else rf"^{name}:"
            assert re.search(form, makefile, re.MULTILINE), f"{command}: no {name} in the Makefile"
    elif called.startswith("pytest"):
        for word in arguments:
            assert "/" not in word or (ROOT / word.split("::")[0]).exists(), f"{command}: no {word}"
    elif found := re.match(r"python -m (pallas_kernels|tests)(\.\w+)+", called):
        name = found[0].removeprefix("python -m ")
        assert importlib.util.find_spec(name), command
        if name.startswith("pallas_kernels"):
            importlib.import_module(name)._parser().parse_args(arguments)
    elif called.startswith("curl") and "-d" in command.words:
        json.loads(command.words[command.words.index("-d") + 1])
    elif called.startswith("srun"):
        check_run(list(command.words[command.words.index("run") + 1 : -1]), partial=True)
