"""An experiment that needs no model: tests put their own `main` in its place."""

import dataclasses
from typing import Literal

from experiments.registry import check_config, place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A field of every type that configs use."""

    steps: int = 3
    rate: float = 0.5
    kind: Literal["linear", "cubic"] = "linear"
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    verbose: bool = False
    out: str = place()
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        if self.steps < 0:
            raise ValueError(f"Config.steps = {self.steps}: expected 0 or more")


def digests(config: Config) -> dict[str, str]:
    if config.out == "missing":
        raise ValueError("Config.out = 'missing': there is no such folder")
    return {"data": "d0", "base": "b0"}


def main(config: Config, run) -> None:
    for step in range(config.steps):
        run.log_metrics({"loss": config.rate**step}, step=step)
    run.finish(metrics={"loss": config.rate**config.steps}, report=f"# Toy\n\nrate {config.rate}")


def sweep_rates() -> list[str]:
    return [f"toy.Config.rate = {rate}" for rate in (0.25, 0.75)]


def sweep_steps() -> list[str]:
    return [f"toy.Config.steps = {steps}" for steps in (1, 2, 3)]


SWEEPS = {"rates": sweep_rates, "steps": sweep_steps}
