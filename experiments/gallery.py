"""Finished runs: found, the best of each experiment chosen, and copied small into `results/`.

    python -m experiments.gallery runs --out results

RESULTS/EXPERIMENT/ then holds result.json, config.gin without the places where things lay, and at
most four PNGs of under 150 KB; RESULTS/README.md says what each is and the command that made it.
"""

import argparse
import ast
import contextlib
import dataclasses
import io
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import artifacts, gin_files, registry, settings
from experiments.run_folder import markdown, read_result, show

SCALES = ("tiny", "cpu", "paper")  # the last tells most
MOST_PICTURES = 4
MOST_BYTES = 150_000
OWN_FILES = {"result.json", "config.gin"}


@dataclasses.dataclass(frozen=True)
class FoundRun:
    """A complete run: its folder and what its result.json says."""

    path: pathlib.Path
    result: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        return self.result["experiment"]

    @property
    def scale(self) -> str:
        return self.result["scale"]

    @property
    def environment(self) -> str:
        """Device, cores and JAX."""
        made_by = self.result["environment"]
        return f"{made_by['device']}, {made_by['cpu_count']} cores, JAX {made_by['jax']}"

    @property
    def seeds(self) -> str:
        """The first seed and, where the config has one, the number of seeds: "0" or "0 to 2"."""
        first, count = self.result["seed"], self.value("num_seeds") or 1
        return str(first) if count == 1 else f"{first} to {first + count - 1}"

    @property
    def command(self) -> str:
        """What makes it again: its settings; or its config.gin, where it needs a place, which that
        leaves out, or where its fields are no longer the experiment's."""
        name, scale = self.experiment, self.scale
        if name in registry.EXPERIMENTS:
            module = registry.EXPERIMENTS[name].load()
            with contextlib.suppress(ValueError):
                own = gin_files.own_values(name, module, scale, lenient=True)
                values = gin_files.bindings(module, files=[self.path / "config.gin"])
                return settings.command(
                    name, module.Config(**values), own, module=module, scale=scale
                )
        return f"molora run --experiment={name} --gin_file=config.gin"

    def value(self, field: str) -> Any:
        """A field of its config, None where there is none."""
        path = self.path / "config.gin"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        match = re.search(rf"^\w+\.Config\.{field} = (.*)$", text, flags=re.MULTILINE)
        return ast.literal_eval(match[1]) if match else None

    def pictures(self) -> list[pathlib.Path]:
        """PNGs in the order in which report.md shows them, then the others by name."""
        report = self.path / "report.md"
        text = report.read_text(encoding="utf-8") if report.exists() else ""
        shown = [self.path / name for name in re.findall(r"!\[[^]]*\]\(([\w.-]+\.png)\)", text)]
        every = [*shown, *sorted(self.path.glob("*.png"))]
        return [path for path in dict.fromkeys(every) if path.is_file()]


def find_runs(folders: Iterable[pathlib.Path]) -> list[FoundRun]:
    """Every complete run below the folders: workdirs, run folders, or what `collect` made."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("result.json")):
            if "previous" in file.relative_to(folder).parts:  # what a --rerun replaced
                continue
            result = read_result(file.parent)
            if isinstance(result, dict) and result.get("status") == "complete":
                found[file.parent.resolve()] = FoundRun(file.parent, result)
    return list(found.values())


def best_runs(runs: Sequence[FoundRun]) -> dict[str, FoundRun]:
    """The run of each experiment at the largest scale; of several the newest. By name.

    A run folder goes before a copy in a gallery, whose time is that of the checkout.
    """

    def rank(run):
        scale = SCALES.index(run.scale) if run.scale in SCALES else -1
        measured_here = (run.path / "metrics.jsonl").exists()
        return scale, measured_here, (run.path / "result.json").stat().st_mtime_ns

    best = {}
    for run in sorted(runs, key=rank):
        best[run.experiment] = run
    return dict(sorted(best.items()))


def collect(runs: Mapping[str, FoundRun], out: pathlib.Path) -> str:
    """Copies the small files of each run into `out` and writes its README.md, which is returned.

    What another call left there of the same experiments is replaced.

    Raises ValueError where `out` holds something else under an experiment's name.
    """
    kept = {}
    for name, run in runs.items():
        target = out / name
        if run.path.resolve() != target.resolve():
            _copy(run, target)
        kept[name] = FoundRun(target, run.result)
    header = ["experiment", "answers", "paper", "scale", "seeds", "holds / not / not said"]
    lines = [
        "# Results",
        "A folder an experiment: `result.json` (every number, and each claim with what the paper "
        "says of it), `config.gin` (the whole config but the places where things lie, for "
        "`--gin_file`) and pictures. `python -m experiments.gallery RUNS --out results` writes it "
        "from complete runs, the largest scale of each and the newest at it. What to make of them "
        "is in [what was found](../docs/findings.md).",
        markdown(header, [_row(run) for run in kept.values()]).rstrip(),
        *(_section(run) for run in kept.values()),
    ]
    text = "\n\n".join(lines)
    artifacts.write_atomically(out / "README.md", text.rstrip() + "\n")
    return text


def _row(run: FoundRun) -> list[str]:
    entry = registry.EXPERIMENTS.get(run.experiment)
    verdicts = [claim["holds"] for claim in run.result["claims"]]
    counts = " / ".join(str(verdicts.count(each)) for each in (True, False, None))
    return [
        f"[{run.experiment}](#{run.experiment})",
        entry.summary if entry else "",
        (entry.tables if entry else "") or "–",
        run.scale,
        run.seeds,
        counts,
    ]


def _section(run: FoundRun) -> str:
    """What it answers, how it was made, what came out beside the paper, and the pictures."""
    name, entry = run.experiment, registry.EXPERIMENTS.get(run.experiment)
    parts = [f"## {name}"]
    if entry and entry.summary:
        parts.append(f"{entry.summary[0].upper()}{entry.summary[1:]}.")
    parts.append(f"```\n{run.command}\n```")
    files = f"[Every number]({name}/result.json), [config]({name}/config.gin)"
    parts.append(f"{run.environment}. {files}.")
    if run.result["claims"]:
        rows = [
            [
                f"`{claim['id']}`",
                f"{show(claim['ours'])} {claim['unit']}".rstrip(),
                "–" if claim["paper"] is None else show(claim["paper"]),
                {True: "holds", False: "does not hold", None: "not said"}[claim["holds"]],
                claim["note"].replace("|", r"\|"),
            ]
            for claim in run.result["claims"]
        ]
        parts.append(markdown(["claim", "here", "paper", "", "how it is meant"], rows).rstrip())
    parts.append(
        "\n".join(
            f'<img src="{name}/{path.name}" alt="{path.stem}" width="{_width(path)}">'
            for path in sorted(run.path.glob("*.png"))
        )
    )
    return "\n\n".join(part for part in parts if part)


def _width(path: pathlib.Path) -> str:
    """Two pictures beside each other, but for those that are long and low."""
    from PIL import Image  # of matplotlib's own requirements

    with Image.open(path) as picture:
        width, height = picture.size
    return "100%" if width > 3 * height else "49%"


def _copy(run: FoundRun, target: pathlib.Path) -> None:
    if target.exists():
        odd = [each.name for each in target.iterdir() if not _ours(each)]
        if odd:
            raise ValueError(
                f"{target} holds {', '.join(sorted(odd))}, which no run left there: name another "
                "folder with --out"
            )
        shutil.rmtree(target)
    texts = {"result.json": (run.path / "result.json").read_text(encoding="utf-8")}
    if (run.path / "config.gin").exists():
        texts["config.gin"] = _without_places(run)
    for name, text in texts.items():
        private = [str(each) for each in (pathlib.Path.home(), run.path.resolve().parents[1])]
        if found := [each for each in private if len(each) > 1 and each in text]:
            raise ValueError(f"{run.path / name} names {found[0]}, a place of this machine")
    target.mkdir(parents=True)
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
    for path in run.pictures()[:MOST_PICTURES]:
        (target / path.name).write_bytes(small_png(path))


def _ours(path: pathlib.Path) -> bool:
    return path.is_file() and (path.name in OWN_FILES or path.suffix == ".png")


def _without_places(run: FoundRun) -> str:
    """config.gin less the fields that say where something lies."""
    places = set()
    if run.experiment in registry.EXPERIMENTS:
        config = registry.EXPERIMENTS[run.experiment].load().Config
        places = {each.name for each in dataclasses.fields(config) if each.metadata.get("place")}
    lines = (run.path / "config.gin").read_text(encoding="utf-8").splitlines()
    kept = [
        line
        for line in lines
        if not ((match := re.match(r"\w+\.Config\.(\w+) = ", line)) and match[1] in places)
    ]
    return "\n".join(kept) + "\n"


def small_png(path: pathlib.Path, *, most: int = MOST_BYTES) -> bytes:
    """The picture in under `most` bytes: as it is, else with 256 colours, else smaller too."""
    data = path.read_bytes()
    if len(data) < most:
        return data
    from PIL import Image  # of matplotlib's own requirements

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    while len(data) >= most:
        buffer = io.BytesIO()
        picture.quantize(256).save(buffer, format="PNG", optimize=True)
        data = buffer.getvalue()
        width, height = picture.size
        picture = picture.resize((max(1, width * 3 // 4), max(1, height * 3 // 4)))
    return data


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gallery", description=__doc__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="workdirs or run folders")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"))
    given = parser.parse_args(argv)
    try:
        if absent := [str(path) for path in given.runs if not path.is_dir()]:
            raise ValueError(f"{', '.join(absent)}: there is no such folder")
        # Those that only an earlier call knows stay: their run folders may be gone.
        folders = [*given.runs, *([given.out] if given.out.is_dir() else [])]
        best = best_runs([*find_runs(folders[len(given.runs) :]), *find_runs(given.runs)])
        if not best:
            raise ValueError(f"no complete run below {', '.join(map(str, given.runs))}")
        collect(best, given.out)
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        return 2
    print(f"{len(best)} experiments in {given.out}: {', '.join(best)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
