"""Writes the table of reproducing.md from the registry, the configs and the committed results."""

import json
import pathlib
import re

from experiments.registry import EXPERIMENTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reproducing.md"
START, END = "<!-- table -->\n", "<!-- end -->"


def main() -> None:
    """Replaces what lies between the two marks."""
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    """The page with the table as it must be."""
    before, _, rest = page.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def table() -> str:
    """A row for each experiment, those of the paper first, in the paper's order."""
    rows = [
        "| paper | `--experiment=` | scale `paper` | time at `cpu` | holds / not / not said |",
        "| --- | --- | --- | --- | --- |",
    ]
    of_paper = (ROOT / "configs" / "paper.gin").read_text(encoding="utf-8")
    for name in sorted(EXPERIMENTS, key=_place):
        entry = EXPERIMENTS[name]
        module = entry.module.rpartition(".")[2]
        scaled = "yes" if re.search(rf"^{module}\.Config\.", of_paper, re.MULTILINE) else "–"
        rows.append(
            f"| {entry.tables or '–'} | {name} | {scaled} | {_time(name)} | {_verdict(name)} |"
        )
    return "\n".join(rows) + "\n"


def _place(name: str) -> tuple:
    tables = EXPERIMENTS[name].tables
    number = re.search(r"\d+", tables)
    return (not tables, tables.startswith("Fig"), int(number[0]) if number else 0, name)


def _time(name: str) -> str:
    """The first sentence behind "Expected:" in the config's head."""
    lines = (ROOT / "configs" / f"{name}.gin").read_text(encoding="utf-8").splitlines()
    head = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    found = re.search(r"Expected: (.*?)[;.](?: |$)", head)
    return found[1].replace("|", "\\|") if found else "–"


def _verdict(name: str) -> str:
    result = ROOT / "results" / name / "result.json"
    if not result.exists():
        return "–"
    held = [claim["holds"] for claim in json.loads(result.read_text(encoding="utf-8"))["claims"]]
    counts = " / ".join(str(held.count(each)) for each in (True, False, None))
    return f"[{counts}](../results/{name}/result.json)"


if __name__ == "__main__":
    main()
