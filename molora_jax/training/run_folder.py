"""What a training run leaves in its folder: metrics.jsonl, a line a step, and checkpoints/."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from molora_jax.files import naming_path
from molora_jax.models.cache import write_atomically
from molora_jax.parallel import broadcast, is_primary
from molora_jax.training.checkpoint import CheckpointWriter, on_primary, restore_newest
from molora_jax.training.data import Batch


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on: steps done, their records, and what `save` was given beside the state.

    summary  None where the run begins, or where that was given
    """

    step: int
    state: Any
    records: list[dict]
    summary: Any = None


class RunFolder:
    """Writes records and checkpoints, and finds where a killed run goes on.

    A run is the same one if its configuration, its data and `identity` (digests of what is
    frozen, which is never stored itself) are the same; another one's folder is refused. `about`
    stands in its checkpoints too, for who reads them later, and is not compared.

    With the state, the number of steps done says all: it is the position in the data (a batch is a
    function of the step and the seed), and nothing random is drawn after the start, which comes
    from config.seed.

    A context manager: while it is entered no other process can train in the folder, and leaving it
    waits for the last checkpoint. Every process of a run has a folder of its own; the checkpoints
    lie in that of the first.
    """

    def __init__(
        self,
        path: Path,
        config: Any,
        *,
        same_run: dict[str, Any],
        about: Mapping[str, Any],
    ):
        self._held = contextlib.ExitStack()
        if broadcast(str(path.resolve())) == str(path.resolve()) and not is_primary():
            # That of the first process, in which it alone writes.
            path = Path(self._held.enter_context(tempfile.TemporaryDirectory()))
        self.path, self.config, self.about = path, config, dict(about)
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.same_run = same_run
        self._writer = CheckpointWriter(self.checkpoints)
        path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "RunFolder":
        def hold() -> None:
            self._held.enter_context(_held(self.path))

        on_primary(hold)
        self._held.enter_context(self._writer)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._held.__exit__(*raised)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step (counted from 0)."""
        every = self.config.checkpoint_every
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self.config.steps)

    def save(self, steps_done: int, state: Any, *, summary: Any = None) -> None:
        """Begins a checkpoint; `summary` is any JSON object that belongs to the state.

        Raises OSError if the one before could not be written.
        """
        meta = {**self.same_run, "about": self.about, "summary": summary}
        self._writer.save(steps_done, state, meta=meta)

    def resume(self, state: Any) -> Resumed:
        """What the newest whole checkpoint holds, or step 0 with `state` as it is.

        Records that were written after that checkpoint are dropped: those steps are run again.
        """
        restored = restore_newest(self.checkpoints, state, check=self._check_same_run)
        step, summary, records = 0, None, []
        if restored is not None:
            state, meta = restored
            step, summary = meta["step"], meta.get("summary")
            records = on_primary(lambda: self._records(step))
            print(f"{self.path}: resumed after step {step} of {self.config.steps}", flush=True)
        for stray in self.path.glob(f"{self.metrics.name}.*.tmp"):  # of a kill in the next line
            stray.unlink()
        write_atomically(self.metrics, "".join(f"{json.dumps(each)}\n" for each in records))
        return Resumed(step, state, records, summary)

    def log(self, record: dict) -> None:
        """Appends one line; NaN and infinity are written as null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with naming_path(self.metrics), self.metrics.open("a") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")

    def _records(self, steps: int) -> list[dict]:
        """Those of the first `steps` steps, without what a kill cut short."""
        records: dict[int, dict] = {}
        for line in self.metrics.read_bytes().splitlines() if self.metrics.exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                records.setdefault(record["step"], record)
        found = [records[step] for step in range(steps) if step in records]
        if len(found) < steps:
            logging.warning(
                "%s has no record of %d of the first %d steps; what is trained is not affected",
                self.metrics,
                steps - len(found),
                steps,
            )
        return found

    def _check_same_run(self, meta: dict) -> None:
        # Through JSON, as the stored one went: tuples become lists.
        now, then = (
            flat(json.loads(json.dumps(self.same_run))),
            flat({key: meta.get(key) for key in self.same_run}),
        )
        differing = [
            f"{key} was {then.get(key)!r} and is now {now.get(key)!r}"
            for key in sorted(now.keys() | then.keys())
            if now.get(key) != then.get(key)
        ]
        if differing:
            raise ValueError(
                f"{self.checkpoints} belongs to another run: {'; '.join(differing)}. "
                "Resume with the settings and data it was started with, or choose another run_dir."
            )


def same_run_of(config: Any, *, data: Batch, identity: Mapping[str, str]) -> dict[str, Any]:
    """What makes a training run the same one: settings, data, and digests of what is frozen."""
    return {
        "config": dataclasses.asdict(config),
        "data": _digest(data),
        "identity": dict(identity),
    }


def flat(meta: dict, prefix: str = "") -> dict[str, Any]:
    """A nested mapping with its path as each name: {"config.lr": 0.001, ...}."""
    found = {}
    for key, value in meta.items():
        name = f"{prefix}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return found


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        digest.update(f"{leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Holds the folder for this process; the kernel lets go of it when the process dies, however.

    Raises ValueError while another one holds it.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows, where nothing is held
        yield
        return
    with contextlib.ExitStack() as stack:
        handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process trains in {folder}: wait for it, stop it, or choose another "
                "run_dir"
            ) from None
        except OSError as error:  # some network file systems
            logging.warning("%s has no locks (%s): train there once at a time", folder, error)
        yield
