"""When specialists win: one budget split over K adapters, or spent on one of K times the rank.

Held-out loss of K adapters of rank r, each trained on its own domain, and of one adapter of rank
K·r trained on the very same rows pooled: over the share of questions on which the domains conflict,
over K and over steps, where a row says its domain and where it does not.
"""

import dataclasses
from collections.abc import Sequence

from experiments.registry import check_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The task, the base and the grid.

    questions       n, and as many answers; a row has `pairs` of both
    pairs           questions of a row, each with its answer
    width           of the base
    layers          of the base; adapters act in the last alone, behind those in which a token
                    learns of its row's mark
    base_steps      of the base's pretraining; 0: its random start
    conflicts       shares of questions with another answer in every domain, rising
    adapters        the values of K
    rank            r of a specialist
    steps           of all K specialists together, and of the pooled adapter
    batch_rows      rows of a step, a multiple of every K: pooled, each has as many of every domain
    points          how many budgets are measured: steps, steps/2, steps/4, …
    lrs             learning rates; each arm, K and budget has the best of a seed of its own
    router_rows     rows of each domain that the router's statistics are of
    val_rows        held-out rows a domain
    num_seeds       seeds seed, seed + 1, …: answers, rows and adapters; the base is one
    """

    questions: int = 32
    pairs: int = 4
    width: int = 64
    layers: int = 3
    base_steps: int = 400
    conflicts: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    adapters: Sequence[int] = (2, 4, 8)
    rank: int = 4
    steps: int = 1024
    batch_rows: int = 8
    points: int = 5
    lrs: Sequence[float] = (3e-3, 1e-2, 3e-2)
    router_rows: int = 64
    val_rows: int = 64
    num_seeds: int = 3
    seed: int = 0

    def __post_init__(self):
        check_config(self, least={
            "questions": 2, "pairs": 1, "layers": 2, "base_steps": 0, "rank": 1,
            "steps": 1, "batch_rows": 1, "points": 1, "router_rows": 1, "val_rows": 1,
            "num_seeds": 1,
        })  # fmt: skip
        if self.width < 8 or self.width % 8:
            raise ValueError(f"Config.width = {self.width}: expected a multiple of 8 (4 heads)")
        shares = list(self.conflicts)
        if not shares or shares != sorted(set(shares)) or not 0 <= shares[0] <= shares[-1] <= 1:
            raise ValueError(
                f"Config.conflicts = {self.conflicts}: expected rising shares from 0 to 1"
            )
        if not self.lrs or min(self.lrs) <= 0:
            raise ValueError(f"Config.lrs = {self.lrs}: expected positive learning rates")
        counts = list(self.adapters)
        if not counts or counts != sorted(set(counts)) or counts[0] < 2:
            raise ValueError(f"Config.adapters = {self.adapters}: expected rising numbers from 2")
        if counts[-1] > self.questions:
            raise ValueError(
                f"Config.adapters has {counts[-1]}, more than the {self.questions} questions: so "
                "many domains cannot all differ in an answer"
            )
        for count in counts:
            if self.batch_rows % count or self.first_point % count:
                raise ValueError(
                    f"Config.adapters has {count}: expected a divisor of batch_rows "
                    f"({self.batch_rows}) and of the first budget measured, steps / "
                    f"2^(points − 1) = {self.steps / 2 ** (self.points - 1):g}"
                )

    @property
    def first_point(self) -> int:
        """The smallest budget measured."""
        return self.steps // 2 ** (self.points - 1)

    @property
    def budgets(self) -> list[int]:
        """Total steps that are measured, rising."""
        return [self.first_point * 2**index for index in range(self.points)]


def digests(config: Config) -> dict[str, str]:
    return {}  # the task is made from the config


def main(config: Config, run) -> None:
    from experiments import specialists_report
    from experiments.specialists_training import chosen_rates, trained_base, tuned_arm

    base = trained_base(run, config)
    rates = chosen_rates(run, base, config)
    seeds = range(config.seed, config.seed + config.num_seeds)
    found = {
        (marked, count): [
            {
                arm: tuned_arm(
                    run, base, config, arm, count, rates[arm, count], marked=marked, seed=seed
                )
                for arm in ("split", "pooled")
            }
            for seed in seeds
        ]
        for marked in (True, False)
        for count in config.adapters
    }
    specialists_report.write(config, run, found, rates)
