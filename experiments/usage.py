"""What --help prints: examples, the flags by what they are for, and every experiment."""

import re
import shutil
import textwrap

from absl import flags

from experiments import registry

EXAMPLES = (
    "                  (the demo: four LoRAs, one router, one pass)",
    "--experiment=train_adapter data=code.jsonl name=code out=out/code",
    "--experiment=train_router adapters=out/code,out/math data=code.jsonl,math.jsonl",
    "--experiment=train_adapter data=code.jsonl --sweep=lr,rank --launcher=local",
)
SETTING = (
    "field=value",
    "Set a field of the experiment's config, which --fields lists: lr=3e-4, name=code, "
    "projections=q_proj,v_proj. Text needs no quotes but the shell's own.",
)
# Every flag, with what stands for its value.
GROUPS = {
    "What to run": {"experiment": "NAME", "scale": "SCALE", "list": "", "fields": ""},
    "Settings": {"seed": "N", "gin_file": "FILE", "gin_bindings": "BINDING"},
    "Sweeps": {
        "sweep": "NAMES",
        "launcher": "WHO",
        "jobs": "N",
        "memory_gb": "GB",
        "retries": "N",
        "slurm": "SETTINGS",
    },
    "Devices and processes": {
        "mesh": "AXIS=N,...",
        "explain_sharding": "",
        "coordinator": "ADDRESS",
        "num_processes": "N",
        "process_id": "N",
    },
    "Results and repeating": {"workdir": "FOLDER", "rerun": "", "retrain": "", "verbosity": "N"},
}
# absl's own flag, whose help is about its numbers.
OF_ABSL = {"verbosity": "Log everything, with times and files: 0, or 1 for more."}
COLUMN = 24  # where explanations begin


def text(values: flags.FlagValues, program: str) -> str:
    """The whole help, as wide as the terminal up to 100 columns."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [
        f"usage: {program} [field=value ...] [--flag=value ...]",
        "",
        *textwrap.wrap(
            "Runs one experiment, or trains your own adapter or router, and leaves a folder with "
            "report, numbers and config. The same command again finds the finished run.",
            width,
        ),
        "",
    ]
    lines += [f"  {program} {example}" for example in EXAMPLES]
    for title, group in GROUPS.items():
        lines += ["", title]
        if title == "Settings":
            lines += _entry(*SETTING, width)
        for name, sample in group.items():
            lines += _entry(f"--{name}" + (f"={sample}" if sample else ""),
                            _said(values[name]), width)  # fmt: skip
    lines += ["", "Experiments, with the tables and figures of the paper that they answer"]
    for name, entry in registry.EXPERIMENTS.items():
        tables = f" ({entry.tables})" if entry.tables else ""
        lines += _entry(name, f"{entry.summary}{tables}", width)
    lines += ["", "Exit codes: 0 done, 1 failed or stopped, 2 misused (and nothing was started)."]
    return "\n".join(lines)


def _said(flag: flags.Flag) -> str:
    """A flag's help, its choices, and its default where that says something."""
    # absl writes choices before the help, and behind it that a flag may be repeated.
    said = OF_ABSL.get(flag.name) or re.sub(r"^<.*?>: |;\s+repeat this option.*$", "", flag.help)
    choices = getattr(flag.parser, "enum_values", None)
    notes = [" | ".join(choices)] if choices else []
    if flag.name not in OF_ABSL and flag.default not in (None, False, "", []):
        notes.append(f"default: {flag.default}")
    return f"{said} ({'; '.join(notes)})" if notes else said


def _entry(left: str, right: str, width: int) -> list[str]:
    """A flag and its explanation, beside it or below."""
    indent = " " * COLUMN
    wrapped = textwrap.wrap(right, max(width - COLUMN, 30))
    if len(left) + 2 > COLUMN - 2:
        return [f"  {left}", *(indent + line for line in wrapped)]
    return [f"  {left:<{COLUMN - 2}}{wrapped[0]}", *(indent + line for line in wrapped[1:])]
