"""Run folders as they are found: what each was set to, what it measured, and what is wrong."""

import dataclasses
import fcntl
import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from experiments import registry

if TYPE_CHECKING:
    from molora_jax.display import Table

RESULT, CONFIG = "result.json", "config.json"
DIGEST = " (digest)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One run folder as read.

    settings  its config, with what lies at a place in the place's stead
    shown     how a table has those that it shows in other words
    problem   why it is in no table; "" where it is complete
    """

    path: pathlib.Path
    experiment: str
    settings: dict[str, Any]
    shown: dict[str, str]
    metrics: dict[str, float | None]
    problem: str = ""
    claims: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def claim_table(self) -> "Table":
        """The paper's claims beside this run's numbers, as a notebook shows them."""
        from molora_jax.display import Table  # reading folders needs no JAX

        verdict = {True: "yes", False: "no", None: "no verdict"}
        rows = [
            [c["id"], c["paper"], c["ours"], c["direction"], verdict[c["holds"]], c["note"]]
            for c in self.claims
        ]
        header = ["claim", "paper", "ours", "better", "holds", "note"]
        return Table(header, rows, title=f"{self.experiment} ({self.path.name})")

    def show(self, name: str) -> Any:
        """A setting for people, "" where the run has none of that name."""
        return self.shown.get(name, self.settings.get(name, ""))


def find(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The run folders among `paths` and in them, each once.

    Raises:
      ValueError: one is no run and holds none.
    """
    from molora_jax.files import near_path

    found: dict[pathlib.Path, pathlib.Path] = {}
    for path in paths:
        below = [path] if (path / RESULT).exists() else sorted(_runs_below(path))
        if not below:
            near = "" if path.is_dir() else near_path(path)
            what = f"no {RESULT} there or below" if path.is_dir() else "there is no such folder"
            raise ValueError(
                f"{path}: expected a run's folder, or one that holds runs; {what}{near}"
            )
        for each in below:
            found.setdefault(each.resolve(), each)
    return list(found.values())


def _runs_below(path: pathlib.Path) -> Iterable[pathlib.Path]:
    """Folders of runs, also of those that were killed before they could write a result."""
    for file in [*path.rglob(RESULT), *path.rglob(CONFIG)]:
        folder = file.parent
        if "previous" in file.relative_to(path).parts:
            continue
        if file.name == RESULT or _json(file, "experiment"):
            yield folder


def read(path: pathlib.Path, *, experiment: str = "") -> Entry:
    """One run folder; whatever is wrong with it becomes its `problem`.

    Args:
      experiment: what it is a run of, where its files cannot say.
    """
    saved = _json(path / CONFIG, "experiment", "config")
    result = read_result(path)
    status = result.get("status", f"no {RESULT} that can be read")
    problem = "" if status == "complete" else status
    if status == "running":
        problem = "running now" if is_held(path) else "was killed"
    elif "error" in result:
        problem = f"{status}: {result['error']}"
    settings, shown = _settings(saved, result)
    return Entry(
        path=path,
        experiment=(result or saved).get("experiment", experiment),
        settings=settings,
        shown=shown,
        metrics=result.get("metrics", {}),
        problem=registry.one_line(problem),
        claims=result.get("claims", []),
    )


def load_runs(*paths: str | pathlib.Path) -> list[Entry]:
    """Every run among `paths` and in them: run folders, workdirs, or a gallery such as results/.

    Raises:
      ValueError: one is no run and holds none.

        >>> (run,) = load_runs("results/table14")
        >>> run.experiment, len(run.claims)
        ('table14', 2)
    """
    return [read(path) for path in find(map(pathlib.Path, paths))]


def read_result(path: pathlib.Path) -> dict[str, Any]:
    """What a run's folder says of its end; empty where it says nothing that can be read."""
    return _json(path / RESULT, "experiment", "status", "metrics")


def _settings(
    saved: dict[str, Any], result: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What may differ between runs: a place counts by the digest of what lies there."""
    settings: dict[str, Any] = {"scale": result.get("scale"), **saved.get("config", {})}
    settings.setdefault("seed", result.get("seed"))
    places = {name: settings.pop(name, None) for name in saved.get("places", ())}
    shown = {}
    for name, digest in saved.get("digests", {}).items():
        file = places.get(name)
        if isinstance(file, str) and file:
            settings[name], shown[name] = digest, f"{pathlib.Path(file).name} ({digest[:8]})"
        else:
            settings[name + DIGEST] = digest[:8]
    return settings, shown


def is_held(path: pathlib.Path) -> bool:
    """Whether a process is at the run of this folder."""
    try:
        with (path / ".lock").open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nobody was ever there
        return False
    return False


def _json(path: pathlib.Path, *keys: str) -> dict[str, Any]:
    """The object in a file; empty where it is not there, cut short or lacks a key."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) and all(key in value for key in keys) else {}
