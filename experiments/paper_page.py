"""One page of the whole paper: each of its tables and figures, its numbers beside ours.

No number of ours stands in this file: all come from the result.json of complete runs.
"""

import dataclasses
import pathlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from experiments import artifacts, registry
from experiments.gallery import FoundRun, best_runs, find_runs
from experiments.paper_tables import PAPER, Entry, entries_of
from experiments.registry import check_config, place

VERDICTS = {True: "holds", False: "does not hold", None: "not said here"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the page is made of.

    folders      where complete runs lie: workdirs and the committed `results`; of each
                 experiment the run at the largest scale is taken, of several the newest
    run_missing  first run each experiment that answers a table or figure and has no complete run
                 there, at this run's own scale (hours at scale cpu), into the first of the folders
    seed         of nothing here; of the runs that run_missing starts
    """

    folders: tuple[str, ...] = place(("runs", "results"))
    run_missing: bool = False
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        if not self.folders:
            raise ValueError("Config.folders is empty: name the folder that runs lie in")
        if not self.run_missing and not any(pathlib.Path(each).is_dir() for each in self.folders):
            raise ValueError(
                f"Config.folders = {self.folders!r}: there is none of them; name a --workdir of "
                "runs, or set run_missing=true"
            )


def digests(config: Config) -> dict[str, str]:
    """Of the result of every run that would be shown."""
    return {name: artifacts.digest_of(run.result) for name, run in _best(config).items()}


def _best(config: Config) -> dict[str, FoundRun]:
    return best_runs(find_runs(map(pathlib.Path, config.folders)))


def main(config: Config, run) -> None:
    from experiments.paper_html import html_page

    failed = _run_missing(config, run.scale) if config.run_missing else {}
    page = Page.of(_best(config), failed)
    (run.path / "paper.html").write_text(html_page(page), encoding="utf-8")
    run.finish(metrics=page.counts(), report=markdown(page))


def _run_missing(config: Config, scale: str) -> dict[str, str]:
    """Runs what no complete run answers; {experiment: why it did not come to an end}."""
    failed, known = {}, _best(config)
    for name, entry in registry.EXPERIMENTS.items():
        if not entry.tables or name in known:
            continue
        command = [
            *registry.worker_program(), f"--experiment={name}", f"--scale={scale}",
            f"--workdir={config.folders[0]}", f"--seed={config.seed}",
        ]  # fmt: skip
        logging.info("%s: has no complete run; running it", name)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            failed[name] = registry.one_line(last[0])
            logging.warning("%s: did not come to an end: %s", name, failed[name])
    return failed


@dataclasses.dataclass(frozen=True)
class Section:
    """One table or figure, or what goes beyond them (entry None).

    claims   (run, claim of its result.json)
    runs     that answer it, or hold a claim on it
    missing  {experiment: why} that answer it by the registry and have no complete run
    """

    entry: Entry | None
    claims: Sequence[tuple[FoundRun, Mapping[str, Any]]]
    runs: Sequence[FoundRun]
    missing: Mapping[str, str]

    @property
    def title(self) -> str:
        if self.entry is None:
            return "Beyond the paper's tables"
        return f"{self.entry.label}: {self.entry.measured}"

    def count(self, verdict: bool | None) -> int:
        return sum(claim["holds"] is verdict for _, claim in self.claims)

    @property
    def state(self) -> str:
        """One word or two for the overview."""
        if not self.runs:
            return "missing"
        if not self.claims:
            return "no claim"
        parts = [f"{self.count(each)} {VERDICTS[each]}" for each in VERDICTS if self.count(each)]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Page:
    """Every section in the paper's order, then what goes beyond it."""

    sections: Sequence[Section]
    runs: Mapping[str, FoundRun]

    @classmethod
    def of(cls, runs: Mapping[str, FoundRun], failed: Mapping[str, str]) -> "Page":
        """From the run of each experiment, and why those that were tried did not come to an end."""
        claims = [(run, claim) for run in runs.values() for claim in run.result["claims"]]
        answers = {name: entries_of(each.tables) for name, each in registry.EXPERIMENTS.items()}
        known = {entry.id for entry in PAPER}

        def home(run, claim) -> str | None:
            """The table of its name, else the first that its experiment answers."""
            subject = claim["id"].partition(".")[0]
            return (
                subject if subject in known else next(iter(answers.get(run.experiment, ())), None)
            )

        sections = []
        for entry in PAPER:
            names = [name for name, ids in answers.items() if entry.id in ids]
            # The experiment of that very name first.
            names.sort(key=lambda name: (name != entry.id, name))
            own = [(run, claim) for run, claim in claims if home(run, claim) == entry.id]
            shown = [runs[name] for name in names if name in runs]
            shown += [run for run, _ in own if run not in shown]
            shown = list({run.experiment: run for run in shown}.values())
            missing = {n: failed.get(n, "not run") for n in names if n not in runs}
            own.sort(key=lambda pair: shown.index(pair[0]))
            sections.append(Section(entry, own, shown, missing))
        rest = [(run, claim) for run, claim in claims if home(run, claim) is None]
        beside = ("analyse", "paper_page", "train_adapter", "train_router")  # measure no claim
        others = [run for name, run in runs.items() if not answers.get(name) and name not in beside]
        sections.append(Section(None, rest, others, {}))
        return cls(sections, runs)

    def counts(self) -> dict[str, int]:
        """The metrics: claims by verdict, and tables and figures by whether a run answers them."""
        of_paper = [section for section in self.sections if section.entry]
        names = {True: "holds", False: "not", None: "no_verdict"}
        numbers = {
            f"claims/{name}": sum(section.count(verdict) for section in self.sections)
            for verdict, name in names.items()
        }
        answered = sum(bool(section.runs) for section in of_paper)
        return {
            **numbers,
            "tables/answered": answered,
            "tables/missing": len(of_paper) - answered,
            "runs": len(self.runs),
        }


def claim_cells(run: FoundRun, claim: Mapping[str, Any]) -> list[str]:
    """A claim as a row: id, paper, ours, verdict, note, which experiment."""
    from experiments.run_folder import show

    numbers = [show(claim[name], claim["unit"]) for name in ("paper", "ours")]
    return [claim["id"], *numbers, VERDICTS[claim["holds"]], claim["note"], run.experiment]


CLAIM_HEADER = ("claim", "paper", "ours", "verdict", "note", "by")


def lead(page: Page) -> str:
    """The page's first paragraph."""
    counts = page.counts()
    return (
        f"{counts['tables/answered']} of the paper's tables and figures are answered by a complete "
        f"run here, {counts['tables/missing']} are missing. Of the claims {counts['claims/holds']} "
        f"hold, {counts['claims/not']} do not, and on {counts['claims/no_verdict']} this hardware "
        "or scale cannot say. A time off a GPU is never judged; 'holds' means at least as good as "
        "the paper's number."
    )


def markdown(page: Page) -> str:
    """report.md."""
    from experiments.run_folder import markdown as table

    overview = [
        [section.entry.label, section.entry.measured, section.state, _scales(section)]
        for section in page.sections
        if section.entry
    ]
    lines = [
        "# Every table and figure of the paper, its numbers beside ours",
        lead(page),
        table(["", "what is measured", "claims", "scale"], overview),
    ]
    for section in page.sections:
        lines.append(f"## {section.title}")
        if section.entry:
            lines.append(f"The paper: {section.entry.numbers}.")
        if section.claims:
            rows = [_escaped(claim_cells(run, claim)) for run, claim in section.claims]
            lines.append(table(CLAIM_HEADER, rows))
        lines += [f"- {run_line(run)}" for run in section.runs]
        lines += missing_lines(section)
    return "\n\n".join(lines).replace("\n\n- ", "\n- ")


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]


def _scales(section: Section) -> str:
    return ", ".join(dict.fromkeys(run.scale for run in section.runs)) or "-"


def run_line(run: FoundRun) -> str:
    """Where a run's numbers come from, in a line."""
    seeds = f"seeds {run.seeds}" if "to" in run.seeds else f"seed {run.seeds}"
    return f"{run.experiment}: scale {run.scale}, {run.environment}, {seeds}; `{run.command}`"


def missing_lines(section: Section) -> list[str]:
    """What is not there, and how to have it."""
    lines = [
        f"Missing: {name} ({why}); `{registry.program()} --experiment={name}`"
        for name, why in section.missing.items()
    ]
    if section.entry and not section.runs and not section.missing:
        lines.append("Missing: no experiment answers this one.")
    return lines
