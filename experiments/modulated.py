"""A scale with a memory (MaLoRA, as we read it) against plain LoRA and a scale without one.

MaLoRA is a preprint of which we know an abstract: the scaling factor of a LoRA becomes a function
of the input with a recurrent state along the sequence, where other modulators are stateless. What
`ModulatedRouter` makes of it is our reading. Three arms with equal parameters, steps and rows.
"""

import dataclasses
from collections.abc import Sequence

from experiments.domains import Source, load_domains
from experiments.registry import check_config

TASKS = {
    "marks": "marked rows, all projections adapted",
    "marks_mlp": "marked rows, MLP adapted only",
    "text": "bytes of real text, all projections adapted",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The tasks, the bases, and how every arm is trained: the same steps on the same rows.

    tasks           some of marks, marks_mlp, text
    questions       n of the marked rows, and as many answers
    width, layers   of the bases, one for marked rows and one for text
    base_steps      of a base's pretraining; 0: its random start
    data            of the text: its third domain is the base's, its fourth the adapters'
    seq_len         tokens of a row
    rank            of the modulated adapters; the plain one has more, in place of a modulator
    state_size      n numbers that the modulator carries in a layer
    steps           of every arm
    batch_rows      rows of one step
    measure_every   steps between two measurements on the held-out rows
    lrs             learning rates; of several each arm has the best of a seed of its own
    val_rows        held-out rows
    num_seeds       seeds seed, seed + 1, …: answers, rows, adapter and modulator; bases are one
    """

    tasks: Sequence[str] = tuple(TASKS)
    questions: int = 32
    width: int = 64
    layers: int = 2
    base_steps: int = 500
    data: Source = "auto"
    seq_len: int = 64
    rank: int = 4
    state_size: int = 8
    steps: int = 200
    batch_rows: int = 8
    measure_every: int = 20
    lrs: Sequence[float] = (1e-2,)
    val_rows: int = 64
    num_seeds: int = 3
    seed: int = 0

    def __post_init__(self):
        check_config(self, least={
            "questions": 2, "layers": 1, "base_steps": 0, "seq_len": 4, "rank": 1,
            "state_size": 1, "steps": 1, "batch_rows": 1, "measure_every": 1, "val_rows": 1,
            "num_seeds": 1,
        })  # fmt: skip
        if self.width < 8 or self.width % 8:
            raise ValueError(f"Config.width = {self.width}: expected a multiple of 8 (4 heads)")
        if self.questions > 127:
            raise ValueError(
                f"Config.questions = {self.questions}: expected at most 127, since questions, "
                "answers and two marks share 256 ids"
            )
        if not self.tasks or not set(self.tasks) <= set(TASKS):
            raise ValueError(f"Config.tasks = {self.tasks}: expected some of {', '.join(TASKS)}")
        if not self.lrs or min(self.lrs) <= 0:
            raise ValueError(f"Config.lrs = {self.lrs}: expected positive learning rates")


def digests(config: Config) -> dict[str, str]:
    if "text" not in config.tasks:
        return {}  # marked rows are made from the config
    of_base, of_adapter = load_domains(source=config.data)[2:4]
    return {"data": of_base.digest + of_adapter.digest}


def main(config: Config, run) -> None:
    from experiments import modulated_report
    from experiments.modulated_training import ARMS, Task, chosen_rate, measured_arm

    found, rates = {}, {}
    for name in config.tasks:
        task = Task(run, config, name)
        for arm in ARMS:
            rates[name, arm] = chosen_rate(run, task, config, arm)
            found[name, arm] = [
                measured_arm(run, task, config, arm, lr=rates[name, arm], seed=config.seed + index)
                for index in range(config.num_seeds)
            ]
    modulated_report.write(config, run, found, rates)
