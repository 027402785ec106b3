"""Three adapters and a router; then a fourth and a fifth arrive, and nothing is trained.

Letters beyond the table of design.md: G domains; adapter g is trained on domain g alone.
"""

import dataclasses
from typing import Literal

from experiments import compose
from experiments.content_types import digests as digests  # of the same texts and seeds
from experiments.registry import check_config
from experiments.seeds import SeedRun

KNOWN = 3  # domains that the first router knows; the rest of load_types arrive later


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What arrives, and what each router may read of it; what is not here is compose's.

    base               base model: a name, a folder or a .gguf file
    data               as in compose.Config: "auto" takes the real sets where MOLORA_DATA is set
    rank, adapter_*, train_rows, router_*
                       as in compose.Config, so that adapters are shared with it
    features           of the statistics that travel (m); those of all channels are beside it
    statistics_rows    windows of its own data that each adapter's statistics sum
    gate_steps         steps of the gate that PHATGOOSE trains with each adapter alone
    calibration        tokens of each domain on which a grown column is set
    top_k              adapters per token in every routed arm
    eval_rows          held-out rows of each domain;  eval_joined  rows that change domain
    eval_len           tokens of such a row
    num_seeds          seeds seed, seed + 1, ...: of the split, adapters and routers
    """

    base: str = "smollm2-135m"
    data: Literal["auto", "embedded", "molora_data"] = "auto"
    rank: int = 8
    adapter_steps: int = 40
    adapter_len: int = 128
    train_rows: int = 96
    router_start_rows: int = 144
    router_steps: int = 10
    features: int = 256
    statistics_rows: int = 64
    gate_steps: int = 20
    calibration: int = 64
    top_k: int = 1
    eval_rows: int = 2
    eval_joined: int = 20
    eval_len: int = 256
    num_seeds: int = 3
    seed: int = 0

    def __post_init__(self):
        positive = ("features", "statistics_rows", "gate_steps", "calibration", "num_seeds")
        check_config(self, least=dict.fromkeys(positive, 1))
        if not 1 <= self.top_k <= KNOWN:
            raise ValueError(
                f"Config.top_k = {self.top_k}: expected 1 to {KNOWN}, the adapters at the start"
            )
        self.composed(self.seed)  # refuse what compose would

    def composed(self, seed: int) -> compose.Config:
        """The same sizes as a Config of compose, whose functions train what is measured here."""
        shared = {field.name for field in dataclasses.fields(compose.Config)}
        own = {name: value for name, value in vars(self).items() if name in shared}
        return compose.Config(**own | {"seed": seed})


def main(config: Config, run) -> None:
    from experiments import add_adapter_report
    from experiments.domains import load_types
    from molora_jax.models import load_base

    base = load_base(config.base)
    seeds, types = [], []
    for seed in range(config.seed, config.seed + config.num_seeds):
        types = load_types(source=config.data, seed=seed)
        print(f"add_adapter, seed {seed}", flush=True)
        seeds.append(measured(SeedRun(run, f"seed {seed}"), base, types, config, seed))
    add_adapter_report.draw(seeds, run.path)
    numbers = add_adapter_report.metrics(seeds)
    run.finish(
        metrics=numbers,
        claims=add_adapter_report.claims(numbers),
        report=add_adapter_report.markdown(numbers, seeds, config, types),
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """One seed.

    names          of the domains, in the order in which their adapters arrived
    before         {arm: {domain or "joined": nats}} while KNOWN adapters were there; "joined" then
                   has only rows of these
    after          the same with all of them
    compilations   of the evaluated step when adapters arrived, under the router from statistics
    in_any_order, unloads_exactly    whether the router from statistics passed, bit for bit
    file_bytes     of one adapter's statistics
    """

    names: list[str]
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    compilations: int
    in_any_order: bool
    unloads_exactly: bool
    file_bytes: int


def measured(run, base, types, config: Config, seed: int) -> Measured:
    """Trains apart, evaluates with three adapters, loads the others, evaluates again."""
    import numpy as np

    from experiments import add_adapter_routers as routers
    from molora_jax import count_compilations
    from molora_jax.adapters import AdapterBank
    from molora_jax.training import base_arm, oracle_arm, uniform_arm
    from molora_jax.training.data import concatenate

    composed = config.composed(seed)
    names, G = [each.name for each in types], len(types)
    train, heldout = compose.windows_of(types, base.tokenizer, composed)
    windows = concatenate(heldout)
    folders = [
        compose.trained_adapter(run, base, composed, {name: own})[0]
        for name, own in zip(names, train, strict=True)
    ]
    bank = AdapterBank(base.config, num_slots=G, max_rank=config.rank)
    for column in range(KNOWN):
        bank.load(folders[column], name=names[column])
    trained, _, _ = compose.trained_router(run, base, bank, train[:KNOWN], composed)
    shipped = routers.shipped(run, base, folders, train, names, config, seed)

    def losses(router, width: int, rows=windows):
        slots = np.where(np.arange(width) < len(bank.list()), np.arange(width), -1)
        return routers.by_domain(base, bank, rows, names, router, slots.astype(np.int32))

    def routed(found):
        result = {}
        for arm, router in found.items():
            result[arm] = losses(router.with_top_k(config.top_k), router.num_columns)
            shown = " ".join(f"{name} {loss:.3f}" for name, loss in result[arm].items())
            print(f"{len(bank.list())} adapters, {arm}: {shown}", flush=True)
        return result

    few = shipped.routers(KNOWN, num_columns=G)
    before = routed({"trained": trained, **few, **shipped.prototypes(KNOWN, num_columns=G)})
    for column in range(KNOWN, G):
        bank.load(folders[column], name=names[column])
    with count_compilations() as compiled:
        after = routed(shipped.routers(G, num_columns=G))
    compilations = sum("_evaluate_batch" in program for program in compiled)
    grown = routers.grown(base, trained, shipped, train, config, seed)
    every, _, _ = compose.trained_router(SeedRun(run, "all"), base, bank, train, composed)
    after |= routed(
        {
            "trained": trained,
            **shipped.prototypes(G, num_columns=G),
            "grown": grown,
            "trained on all": every,
        }
    )
    arms = {"base": base_arm, "oracle": oracle_arm, "uniform": uniform_arm(G)}
    after |= {arm: losses(router, G) for arm, router in arms.items()}
    return Measured(
        names=names,
        before=before,
        after=after,
        compilations=compilations,
        in_any_order=shipped.in_any_order(),
        unloads_exactly=shipped.unloads_exactly(few, KNOWN),
        file_bytes=shipped.file_bytes,
    )
