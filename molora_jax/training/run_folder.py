"""What a training run leaves in its folder: metrics.jsonl, a line a step, and checkpoints/."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from molora_jax.training.checkpoint import restore_newest, save_checkpoint
from molora_jax.training.data import Batch


class RunFolder:
    """Writes records and checkpoints, and finds where a killed run goes on.

    A run is the same one if its configuration, its data and `identity` (digests of what is
    frozen) are the same; another one's folder is refused. `about` stands in its checkpoints too,
    for who reads them later, and is not compared.
    """

    def __init__(
        self,
        path: Path,
        config: Any,
        *,
        data: Batch,
        identity: Mapping[str, str],
        about: Mapping[str, Any],
    ):
        self.path, self.config, self.about = path, config, dict(about)
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.same_run = {
            "config": dataclasses.asdict(config),
            "data": _digest(data),
            "identity": dict(identity),
        }
        path.mkdir(parents=True, exist_ok=True)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step (counted from 0)."""
        every = self.config.checkpoint_every
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self.config.steps)

    def save(self, steps_done: int, state: Any) -> None:
        meta = {**self.same_run, "about": self.about}
        save_checkpoint(self.checkpoints, steps_done, state, meta=meta)

    def resume(self, state: Any) -> tuple[int, Any, list[dict]]:
        """(steps done, state, their records) of the newest checkpoint, or (0, state, []).

        Records that were written after that checkpoint are dropped: those steps are run again.
        """
        restored = restore_newest(self.checkpoints, state)
        if restored is None:
            self.metrics.write_text("")
            return 0, state, []
        state, meta = restored
        self._check_same_run(meta)
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        lines = lines[: meta["step"]]
        self.metrics.write_text("".join(f"{line}\n" for line in lines))
        print(f"{self.path}: resumed after step {meta['step']} of {self.config.steps}", flush=True)
        return meta["step"], state, [json.loads(line) for line in lines]

    def log(self, record: dict) -> None:
        """Appends one line; NaN and infinity are written as null."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with self.metrics.open("a") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")

    def _check_same_run(self, meta: dict) -> None:
        # Through JSON, as the stored one went: tuples become lists.
        now, then = (
            _leaves(json.loads(json.dumps(self.same_run))),
            _leaves({key: meta.get(key) for key in self.same_run}),
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


def _leaves(meta: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in meta.items():
        name = f"{prefix}{key}"
        flat.update(_leaves(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return flat


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        digest.update(f"{leaf.dtype} {leaf.shape}\n".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:16]
