"""Tables 13 and 14: a synthetic multimodal task, adapters and router trained together.

The base never sees the task's grammars; adapters learn them from few rows, so that a model can
overfit. `table13` compares arms on validation rows, `table14` looks at whether the router finds the
modalities, of which it is told nothing.
"""

import dataclasses

from experiments.registry import check_config
from molora_jax.adapters import PROJECTIONS

TABLES = {
    "table13": ("single", "single_equal", "oracle", "molora", "molora_l", "language_only"),
    "table14": ("molora", "molora_l", "language_only"),
}
ARMS = tuple(dict.fromkeys(arm for arms in TABLES.values() for arm in arms))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The task, the base, and how every arm is trained: the same steps on the same rows.

    symbols         n symbols a modality
    noise           share of tokens that no grammar foretells
    width, layers   of the base
    base_steps      steps of its pretraining on mixed grammars; 0: its random start
    base_rows       rows that it is pretrained on
    rows            rows to train on;  val_rows  rows held out
    seq_len         tokens of a row
    rank            of every adapter of the routed arms; the scale is 2 everywhere
    projections     which of the seven they adapt
    steps           of every arm
    lr              peak learning rate of every arm
    batch_rows      rows of one step
    info_coef       × label-free loss over neighbouring tokens; see JointTrainConfig
    temperature     the router's, at the first and the last step
    measure_every   steps between two measurements on the held-out rows
    arms            those of the table's arms to train, "molora" among them; (): all
    num_seeds       seeds seed, seed + 1, …: grammars, rows, adapters and router; the base is one
    more_seeds      table14: further seeds of the 4-adapter model, for the rate of failure
    """

    symbols: int = 32
    noise: float = 0.1
    width: int = 64
    layers: int = 3
    base_steps: int = 600
    base_rows: int = 4096
    rows: int = 256
    val_rows: int = 64
    seq_len: int = 96
    rank: int = 8
    projections: tuple[str, ...] = PROJECTIONS
    steps: int = 200
    lr: float = 5e-3
    batch_rows: int = 16
    info_coef: float = 1.0
    temperature: tuple[float, float] = (3.0, 1.0)
    measure_every: int = 20
    arms: tuple[str, ...] = ()
    num_seeds: int = 3
    more_seeds: int = 7
    seed: int = 0

    def __post_init__(self):
        check_config(self, least={
            "symbols": 2, "layers": 1, "base_steps": 0, "rows": 1, "val_rows": 1, "seq_len": 8,
            "measure_every": 1, "num_seeds": 1, "more_seeds": 0,
        })  # fmt: skip
        if self.width < 8 or self.width % 8:
            raise ValueError(f"Config.width = {self.width}: expected a multiple of 8 (4 heads)")
        if self.arms and ("molora" not in self.arms or not set(self.arms) <= set(ARMS)):
            raise ValueError(
                f"Config.arms = {self.arms}: expected (), or molora and some of {', '.join(ARMS)}"
            )


def digests(config: Config) -> dict[str, str]:
    return {}  # the task is made from the config


def main(config: Config, run) -> None:
    from experiments import synthetic_report
    from experiments.synthetic_training import trained_arm, trained_base

    base = trained_base(run, config)
    arms = [arm for arm in TABLES[run.experiment] if not config.arms or arm in config.arms]
    results = {
        arm: [
            trained_arm(run, base, config, arm, seed=config.seed + index)
            for index in range(config.num_seeds)
        ]
        for arm in arms
    }
    if run.experiment == "table13":
        synthetic_report.table13(config, run, results)
        return
    more = [
        trained_arm(run, base, config, "molora", seed=config.seed + config.num_seeds + index)
        for index in range(config.more_seeds)
    ]
    synthetic_report.table14(config, run, results, more)
