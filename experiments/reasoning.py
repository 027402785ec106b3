"""Specialisation against scale: a small base, four LoRAs and a router against a larger base.

Both bases are trained here, on the same text for the same number of tokens. Letters beyond the
table of design.md: G tasks.
"""

import dataclasses
import hashlib
import math
from typing import Any, Literal

from experiments.registry import check_config

MAX_POSITIONS = 256  # of both bases
LEARNED = "MoLoRA, learned router"  # an arm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Two bases, what is trained on them, and how it is measured.

    small            width, inner width, layers and heads of the small base
    large            the same of the large one
    pretrain_steps   steps of the pretraining of both
    pretrain_rows    windows of one of its steps
    pretrain_lrs     peak learning rates of the small and the large one
    task_share       share of the documents of the pretraining text that are task questions
    seq_len          tokens of a training window
    base_seed        of the pretraining: the bases stay, whatever `seed` is
    rank             of the four adapters of the small base, with alpha = 2 · rank. The one LoRA on
                     the mixture has the rank, on each base, that comes nearest to the parameters
                     of the four and the router together
    adapter_steps    steps of one adapter; a LoRA on the mixture takes 4 times as many
    adapter_lr       peak learning rate on the small base
    large_lr         peak learning rate on the large base
    adapter_rows     windows of one of an adapter's steps
    router_rows      questions of each task that both routers are made from
    router_steps     steps of the learned router, on stored layer inputs, against the task a token
                     came from; with 0 that arm is left out
    router_lr        their peak learning rate
    asked            "heldout", or "validation" to choose settings by
    num_questions    questions a task that are asked
    num_seeds        seeds of adapters, router and questions: seed, seed + 1, …; no two share a
                     question
    """

    small: tuple[int, int, int, int] = (64, 176, 4, 4)
    large: tuple[int, int, int, int] = (128, 344, 5, 8)
    pretrain_steps: int = 4000
    pretrain_rows: int = 16
    pretrain_lrs: tuple[float, float] = (4e-3, 2e-3)
    task_share: float = 0.4
    seq_len: int = 64
    base_seed: int = 0
    rank: int = 8
    adapter_steps: int = 500
    adapter_lr: float = 4e-3
    large_lr: float = 2e-3
    adapter_rows: int = 8
    router_rows: int = 192
    router_steps: int = 600
    router_lr: float = 3e-3
    asked: Literal["heldout", "validation"] = "heldout"
    num_questions: int = 200
    num_seeds: int = 3
    seed: int = 10

    def __post_init__(self):
        # The start of the router keeps a sixth of its rows for the temperature.
        least = {"num_seeds": 1, "num_questions": 4, "router_rows": 2, "seq_len": 2}
        least |= dict.fromkeys(("pretrain_steps", "pretrain_rows", "adapter_steps"), 1)
        check_config(self, least=least)
        if self.seq_len > MAX_POSITIONS:
            raise ValueError(f"Config.seq_len = {self.seq_len}: expected at most {MAX_POSITIONS}")
        for name in ("small", "large"):
            width, *others = sizes = getattr(self, name)
            if min(sizes) < 1 or width % (2 * others[-1]):
                raise ValueError(
                    f"Config.{name} = {sizes}: expected (width, inner width, layers, heads), all "
                    "positive and the width a multiple of twice the heads"
                )
        if not 0 <= self.task_share < 1:
            raise ValueError(f"Config.task_share = {self.task_share}: expected 0 to below 1")
        self.pretraining("small"), self.pretraining("large")
        self.adapter_training(self.seed, lr=self.large_lr)  # refuse what training would
        self.adapter_training(self.seed), self.router_training(self.seed)

    def pretraining(self, size: str):
        from molora_jax.training.config import TrainConfig

        return TrainConfig(
            steps=self.pretrain_steps,
            lr=self.pretrain_lrs[size == "large"],
            warmup_steps=min(50, self.pretrain_steps),
            weight_decay=0.05,
            batch_size=self.pretrain_rows,
            seed=self.base_seed,
            checkpoint_every=250,
        )

    def adapter_training(self, seed: int, *, rank: int = 0, pooled: int = 1, lr: float = 0.0):
        """Of one task's adapter; with `pooled` tasks for as many steps together."""
        from molora_jax.training.config import AdapterTrainConfig

        rank = rank or self.rank
        return AdapterTrainConfig(
            rank=rank,
            alpha=2.0 * rank,
            steps=self.adapter_steps * pooled,
            lr=lr or self.adapter_lr,
            warmup_steps=min(20, self.adapter_steps),
            batch_size=self.adapter_rows,
            seed=seed,
            checkpoint_every=200,
        )

    def router_training(self, seed: int):
        """Of the learned router, which no gradient through the model touches."""
        from molora_jax.training.config import RouterTrainConfig

        return RouterTrainConfig(
            steps=0,
            feature_steps=self.router_steps,
            lr=self.router_lr,
            top_k=1,
            start_rows=4 * self.router_rows,
            # Inputs that come through a token's own adapter tell which one it is: a router fitted
            # on those is at chance once it chooses itself.
            start_states="base",
            joined_share=0.0,  # a question is of one task
            seed=seed,
        )


def digests(config: Config) -> dict[str, str]:
    """Of a sample of everything that is generated; the bases follow from it and the config."""
    import itertools

    from experiments import reasoning_tasks as tasks

    text = tasks.pretraining_text(task_share=config.task_share, seed=config.base_seed)
    said = [*tasks.vocabulary(), *itertools.islice(text, 2000)]
    for task in tasks.TASKS:
        for split in ("train", "validation", "heldout"):
            said += [each.text for each in tasks.questions(task, split, 100, seed=config.seed)]
    digest = hashlib.sha256("\n".join(said).encode()).hexdigest()
    return {"data": digest, "base": "pretrained by the run"}


def main(config: Config, run) -> None:
    from experiments import reasoning_report
    from experiments.reasoning_bases import SIZES, pretrained

    bases = {size: pretrained(run, config, size) for size in SIZES}
    ranks = {size: equal_rank(config, bases, size) for size in SIZES}
    seeds = [
        of_seed(run, config, bases, ranks, seed)
        for seed in range(config.seed, config.seed + config.num_seeds)
    ]
    result = reasoning_report.Result(
        config=config,
        bases=bases,
        ranks=ranks,
        seeds=seeds,
        label_use=config.router_training(config.seed).label_use(),
    )
    reasoning_report.draw(result, run.path)
    run.finish(
        metrics=reasoning_report.metrics(result),
        claims=reasoning_report.claims(result),
        report=reasoning_report.markdown(result),
    )


def molora_params(config: Config, small) -> int:
    """Parameters that MoLoRA adds to the small base: four adapters and the router's table."""
    return 4 * lora_params(small, config.rank) + 4 * small.vocab_size


def equal_rank(config: Config, bases: dict[str, Any], size: str) -> int:
    """The rank on a base whose parameters come nearest to what MoLoRA adds to the small one."""
    wanted = molora_params(config, bases["small"].model.config)
    return max(1, math.floor(wanted / lora_params(bases[size].model.config, 1) + 0.5))


def lora_params(model, rank: int) -> int:
    """Parameters of an adapter of a rank on all projections."""
    return rank * model.num_layers * sum(map(sum, model.projection_sizes().values()))


@dataclasses.dataclass(frozen=True)
class Seed:
    """What one seed measured: {arm: Scores}, and the loss curves."""

    arms: dict[str, Any]
    curves: dict[str, list[dict]]


def of_seed(run, config: Config, bases, ranks, seed: int) -> Seed:
    """Trains the adapters, the routers and the LoRAs on the mixture, and measures every arm."""
    import numpy as np

    from experiments.reasoning_bases import trained_adapter, trained_router
    from experiments.reasoning_data import question_rows, task_windows
    from experiments.reasoning_measure import ROW_LEN, Asked, score
    from experiments.reasoning_router import EvidenceRouter
    from experiments.reasoning_tasks import TASKS, questions
    from molora_jax.adapters import AdapterBank

    models = {size: base.model for size, base in bases.items()}
    small = models["small"]
    tokenizer, curves = small.tokenizer, {}

    def windows(tasks, steps):
        return task_windows(
            tokenizer, tasks, rows=steps * config.adapter_rows, seq_len=config.seq_len, seed=seed
        )

    folders = {}
    bank = AdapterBank(small.config, num_slots=len(TASKS), max_rank=config.rank)
    for task in TASKS:
        folders[task], curves[task] = trained_adapter(
            run, small, config.adapter_training(seed), windows([task], config.adapter_steps),
            name=f"{task}/{seed}", data=f"generated questions of the task {task}",
        )  # fmt: skip
        bank.load(folders[task], name=task)
    own = [
        question_rows(
            tokenizer, questions(task, "train", config.router_rows, seed=seed), seq_len=ROW_LEN
        )
        for task in TASKS
    ]
    routers = {"MoLoRA": EvidenceRouter.counted(own, vocab_size=small.config.vocab_size)}
    if config.router_steps:
        routers[LEARNED] = trained_router(
            run, small, bank, own, config.router_training(seed), name=str(seed)
        )
    # Beside the adapters lies the LoRA on the mixture: one bank, and so one compilation, a base.
    mixture = windows(TASKS, len(TASKS) * config.adapter_steps)
    banks = {}
    for size, base in models.items():
        lr = config.large_lr if size == "large" else config.adapter_lr
        training = config.adapter_training(seed, rank=ranks[size], pooled=len(TASKS), lr=lr)
        pooled, curves[mixture_label(size)] = trained_adapter(
            run, base, training, mixture,
            name=f"mixture on {size}/{seed}", data="generated questions of all tasks",
        )  # fmt: skip
        filling = (folders if size == "small" else {}) | {"mixture": pooled}
        # As many slots on either base, so that equal sizes would share a compilation too.
        highest = max(*ranks.values(), config.rank)
        banks[size] = AdapterBank(base.config, num_slots=len(TASKS) + 1, max_rank=highest)
        for name, folder in filling.items():
            banks[size].load(folder, name=name)

    # Seeds take turns in one series of different questions, so that no two share one.
    asked = Asked.of(
        tokenizer, TASKS, split=config.asked, count=config.num_questions, seed=config.seed,
        first=(seed - config.seed) * config.num_questions,
    )  # fmt: skip
    own_task = np.repeat(np.arange(len(TASKS)), config.num_questions)
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "small": ("small", {}),
        "large": ("large", {}),
        "small + oracle": ("small", {"slot": own_task}),
        **{label: ("small", {"router": router}) for label, router in routers.items()},
        mixture_label("small"): ("small", {"slot": len(TASKS)}),
        mixture_label("large"): ("large", {"slot": 0}),
    }
    arms = {}
    for label, (size, way) in ways.items():
        arms[label] = score(models[size], asked, banks[size], **way)
        print(f"seed {seed}, {label}: {arms[label].summary()}", flush=True)
    return Seed(arms=arms, curves=curves)


def mixture_label(size: str) -> str:
    """The arm of the one LoRA on all tasks together."""
    return f"{size} + LoRA on the mixture"
