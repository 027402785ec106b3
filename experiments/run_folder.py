"""What one run writes: its log, its claims, its report and result.json."""

import dataclasses
import filecmp
import json
import math
import numbers
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar

import jax
from absl import logging

from experiments import artifacts, registry
from experiments.provenance import environment
from molora_jax.adapters.folders import check_folder, new_folder
from molora_jax.parallel.processes import is_primary

T = TypeVar("T")
Number = float | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One of the paper's claims beside our number.

    `holds`: ours is at least as good as the paper's number. False is a result, not an error; None,
    with the reason in `note`, where this hardware cannot say (always so for kind "time" off a GPU).
    `paper` is None where only an order is claimed.
    """

    id: str
    kind: Literal["time", "ratio", "share", "order"]
    ours: Number
    direction: Literal["higher", "lower"]
    holds: bool | None
    paper: Number = None
    unit: str = ""
    note: str = ""

    def __post_init__(self):
        for name in ("ours", "paper"):
            object.__setattr__(self, name, number(getattr(self, name), f"claim {self.id}, {name}"))
        registry.check_config(self)
        if self.holds is None and not self.note:
            raise ValueError(f"claim {self.id}: holds is None, so note must say why")


class Run:
    """What an experiment's `main(config, run)` is given: a folder, a log, the artifact cache.

    Attributes: `path` (the run's folder; pictures go there), `id`, `experiment`, `scale`, `seed`.
    """

    def __init__(
        self,
        *,
        path: pathlib.Path,
        experiment: str,
        scale: str,
        seed: int,
        command: str,
        retrain: bool = False,
        resume: bool = False,
    ):
        self.path, self.id = path, path.name
        self.experiment, self.scale, self.seed = experiment, scale, seed
        self.finished = False
        self._command = command
        self._retrain = retrain
        self._remade: set[str] = set()
        self._metrics_path = path / "metrics.jsonl"
        self._last_step: dict[str, int] = {}
        if resume and self._metrics_path.exists():
            self._rewrite_metrics(lambda line: True)
        else:
            artifacts.write_atomically(self._metrics_path, "")

    def log_metrics(self, values: Mapping[str, Any], *, step: int, phase: str = "") -> None:
        """Appends {"phase", "step", **values} to metrics.jsonl; NaN becomes null.

        `values` holds numbers, strings, or lists of these.

        A step logged again, as after a resume from a checkpoint, replaces its phase's lines from
        that step on, so the file reads as if nothing had happened.
        """
        if step <= self._last_step.get(phase, -1):
            self._rewrite_metrics(lambda line: line["phase"] != phase or line["step"] < step)
        line = {"phase": phase, "step": step}
        for name, value in values.items():
            line[name] = _json_value(value, name)
        with self._metrics_path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")
        self._last_step[phase] = step

    def artifact(
        self,
        kind: str,
        *,
        config: Any,
        digests: Mapping[str, str],
        make: Callable[[pathlib.Path], None],
        load: Callable[[pathlib.Path], T],
        phase: str = "",
    ) -> T:
        """A trained thing from the cache, or made now: `experiments.artifacts.cached`.

        make(folder) may keep checkpoints in folder / "checkpoints" and a line a step in
        folder / "metrics.jsonl"; those lines are copied into the run's own metrics.jsonl as phase
        `phase` ("kind/hash" unless given; each artifact needs its own), whether the artifact is old
        or new. With `--retrain` every artifact is made anew, once a run.
        """
        key = artifacts.digest_of([kind, config, digests])

        def load_and_log(folder: pathlib.Path) -> T:
            self._copy_metrics(folder / "metrics.jsonl", phase or f"{kind}/{key[:8]}")
            return load(folder)

        remake = self._retrain and key not in self._remade
        value = artifacts.cached(
            kind, config=config, digests=digests, make=make, load=load_and_log, remake=remake
        )
        self._remade.add(key)
        return value

    def finish(
        self, *, metrics: Mapping[str, Number], claims: Sequence[Claim] = (), report: str
    ) -> None:
        """Writes report.md and result.json.

        `report` is markdown; the claims follow as a table, a line on where all of it came from, and
        the command that makes it again.
        At scale tiny no claim has a verdict.

        Raises:
          ValueError: a claim of kind "time" is judged without a GPU, or an id stands twice.
        """
        on_gpu = jax.default_backend() == "gpu"
        for claim in claims:
            if claim.kind == "time" and claim.holds is not None and not on_gpu:
                raise ValueError(f"claim {claim.id}: a time off a GPU must leave holds None")
        if twice := registry.repeated(claim.id for claim in claims):
            raise ValueError(f"claims {', '.join(twice)}: an id stands more than once")
        checked = {name: number(value, name) for name, value in metrics.items()}
        if self.scale == "tiny":
            claims = [
                dataclasses.replace(
                    claim, holds=None, note="tiny sizes" + (claim.note and f"; {claim.note}")
                )
                for claim in claims
            ]
        text = report.strip() + "\n" + _claims_table(claims) + "\n" + self._provenance() + "\n"
        artifacts.write_atomically(self.path / "report.md", text)
        self.write_result("complete", metrics=checked, claims=claims)
        self.finished = True

    def write_result(
        self,
        status: Literal["running", "complete", "failed", "stopped"],
        *,
        metrics: Mapping[str, Number] | None = None,
        claims: Sequence[Claim] = (),
        error: str | None = None,
    ) -> None:
        """Writes result.json in one piece; the experiments themselves call `finish`."""
        result = {
            "experiment": self.experiment,
            "status": status,
            "scale": self.scale,
            "seed": self.seed,
            "environment": environment(),
            "metrics": dict(metrics or {}),
            "claims": [dataclasses.asdict(claim) for claim in claims],
        }
        if error:
            result["error"] = error
        text = json.dumps(result, indent=1, allow_nan=False)
        artifacts.write_atomically(self.path / "result.json", text + "\n")

    def _provenance(self) -> str:
        """The report's last lines; a code block, so that the command can be pasted as it stands."""
        made_by = environment()
        return (
            f"JAX {made_by['jax']}, {made_by['device']}, {made_by['cpu_count']} cores, "
            f"commit {made_by['commit'] or 'unknown'}, source {made_by['source']}. The same again:"
            f"\n\n    {self._command}"
        )

    def _copy_metrics(self, path: pathlib.Path, phase: str) -> None:
        if not path.exists():
            return
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            self.log_metrics(line, step=line.pop("step"), phase=phase)

    def _rewrite_metrics(self, keep: Callable[[dict], bool]) -> None:
        """Leaves the lines that `keep` wants, less one that a kill cut in half."""
        kept = []
        for text in self._metrics_path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                logging.warning("%s: dropped a line cut short: %r", self._metrics_path, text[:80])
                continue
            if keep(line):
                kept.append(text)
                self._last_step[line["phase"]] = line["step"]
        artifacts.write_atomically(self._metrics_path, "".join(f"{line}\n" for line in kept))


def check_out(out: str, owned: Set[str]) -> None:
    """Refuses, before anything is trained, a place to which `deliver` could not copy.

    owned  the names that a copy there would have, so that an earlier one may be replaced

    Raises ValueError with what is in the way.
    """
    try:
        if out:
            check_folder(out, owned=owned, overwrite=True)
    except (ValueError, OSError) as error:
        raise ValueError(f"Config.out: {error}") from None


def check_own(made: pathlib.Path, out: str, *, overwrite: bool) -> None:
    """Refuses, before anything is trained, to replace what another run or person left in `out`.

    made  the run's own folder, where an earlier try may have left what it copied to `out`

    Raises ValueError with the way out.
    """
    place = pathlib.Path(out)
    if not out or overwrite or not place.is_dir() or not any(place.iterdir()):
        return
    if not _is_copy(made, place):
        raise ValueError(
            f"Config.out = {out!r} exists already, and does not hold what this run made: choose "
            "another folder, or replace it with overwrite=true"
        )


def _is_copy(made: pathlib.Path, place: pathlib.Path) -> bool:
    """Whether every file of `made` lies in `place` too; what was added there does not matter."""
    files = [each.relative_to(made) for each in made.rglob("*") if each.is_file()]
    return bool(files) and all(
        (place / each).is_file() and filecmp.cmp(made / each, place / each, shallow=False)
        for each in files
    )


def deliver(made: pathlib.Path, out: str, *, owned: Collection[str] = ()) -> None:
    """Copies the folder that a run made to where its config wants it, if it says so, and says what
    became of that place. One that holds it is left as it is, with what was added to it.

    owned  names, beside those in `made`, that an earlier delivery may have left in `out`

    Raises:
      FileNotFoundError: `made` is not there.
      ValueError: `out` holds files of another kind; nothing is replaced.
    """
    names = {each.name for each in made.iterdir()} | set(owned)
    if not out or not is_primary():
        return
    there = pathlib.Path(out).is_dir() and any(pathlib.Path(out).iterdir())
    if there and _is_copy(made, pathlib.Path(out)):
        print(f"{out}: unchanged")
    else:
        with new_folder(out, owned=names, overwrite=True) as folder:
            shutil.copytree(made, folder, dirs_exist_ok=True)
        print(f"{out}: replaced" if there else f"Copied to {out}")


def read_result(path: pathlib.Path) -> dict | None:
    """The folder's result.json, or None where there is none that can be read."""
    try:
        return json.loads((path / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        logging.warning("%s: unreadable (%s); the run counts as not made", path, error)
        return None


def number(value: Any, name: str) -> Number:
    """A Python number from whatever holds one; NaN and infinity become None (JSON has neither)."""
    if value is None:
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        if isinstance(value, str):
            raise TypeError  # float() would read "1.3"
        value = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} = {value!r}: expected a number or None") from None
    return value if math.isfinite(value) else None


def _json_value(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item, name) for item in value]
    return number(value, name)


def _claims_table(claims: Sequence[Claim]) -> str:
    if not claims:
        return ""
    verdict = {True: "yes", False: "no", None: "no verdict"}
    rows = [
        [c.id, show(c.paper, c.unit), show(c.ours, c.unit), verdict[c.holds], c.note]
        for c in claims
    ]
    header = ["claim", "paper", "ours", "holds", "note"]
    meaning = (
        "A claim with a number of the paper holds where ours is at least as good; one without, "
        "where it is as its note says.\n\n"
    )
    return f"\n## Claims\n\n{meaning}" + markdown(header, rows)


def show(value: Number, unit: str = "") -> str:
    """A number as a table has it, "-" where there is none."""
    return "-" if value is None else f"{value:.4g}{unit and ' ' + unit}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join(lines) + "\n"
