"""Tables 15 and 17: which adapter the tokens and documents of each content type go to.

Letters beyond the table of design.md: G content types, W rows; adapter g is trained on
type g alone.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

from experiments import compose
from experiments.registry import check_config
from experiments.seeds import SeedRun

TYPES = {
    "table15": ("code", "math", "creative"),
    "table17": ("code", "math", "creative", "technical"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Adapters apart, one router over them, held-out documents; what is not here is compose's.

    base               base model: a name, a folder or a .gguf file
    data               as in compose.Config: "auto" takes the real sets where MOLORA_DATA is set
    rank, adapter_*, train_rows, router_*
                       as in compose.Config, so that adapters are shared with it
    free_steps         gradient steps of a router that never sees a label: random start,
                       language-model loss alone; 0 leaves that arm out
    free_lr            its peak learning rate
    eval_docs          held-out documents of each type, one row each, of at most eval_len tokens
    eval_len           most tokens of a held-out document
    loss_docs          the first so many are also measured in every other arm
    mixed_rows         held-out rows of `mixed_spans` spans, neighbours of different types
    mixed_spans        spans of such a row
    num_seeds          seeds seed, seed + 1, ...: of data split, adapters, router and mixed rows
    """

    base: str = "smollm2-135m"
    data: Literal["auto", "embedded", "molora_data"] = "auto"
    rank: int = 8
    adapter_steps: int = 40
    adapter_len: int = 128
    train_rows: int = 96
    router_start_rows: int = 144
    router_steps: int = 10
    free_steps: int = 20
    free_lr: float = 3e-3
    eval_docs: int = 16
    loss_docs: int = 4
    eval_len: int = 192
    mixed_rows: int = 16
    mixed_spans: int = 3
    num_seeds: int = 3
    seed: int = 0

    def __post_init__(self):
        least = {"num_seeds": 1, "eval_docs": 1, "loss_docs": 1, "mixed_rows": 1, "mixed_spans": 2}
        check_config(self, least={**least, "free_steps": 0})
        if self.loss_docs > self.eval_docs:
            raise ValueError(
                f"Config.loss_docs = {self.loss_docs}: expected at most eval_docs, {self.eval_docs}"
            )
        if self.eval_len < 8 * self.mixed_spans:
            raise ValueError(
                f"Config.eval_len = {self.eval_len}: expected at least 8 tokens for each of the "
                f"{self.mixed_spans} spans of a mixed row"
            )
        self.composed(self.seed)  # refuse what compose would

    def composed(self, seed: int, kind: type[compose.Config] = compose.Config, **changed: Any):
        """The same sizes as a Config of compose, whose functions train what is measured here."""
        sizes: dict[str, Any] = {
            "base": self.base,
            "data": self.data,
            "rank": self.rank,
            "adapter_steps": self.adapter_steps,
            "adapter_len": self.adapter_len,
            "train_rows": self.train_rows,
            "router_start_rows": self.router_start_rows,
            "router_steps": self.router_steps,
            "eval_len": self.eval_len,
        }
        return kind(**sizes | changed, seed=seed)


class FreeConfig(compose.Config):
    """A router that is told nothing: random start, and no label in its loss."""

    def router_training(self):
        return dataclasses.replace(super().router_training(), start="random", label_coef=0.0)


def digests(config: Config) -> dict[str, str]:
    from experiments.domains import load_types
    from molora_jax.models import base_digest

    found = {"base": base_digest(config.base)}
    for seed in range(config.seed, config.seed + config.num_seeds):
        types = load_types(source=config.data, seed=seed)
        found |= {f"{each.name}/{seed}": each.digest for each in types}
    return found


def main(config: Config, run) -> None:
    from experiments import content_types_report
    from experiments.domains import load_types
    from molora_jax.models import load_base

    names = TYPES[run.experiment]
    base = load_base(config.base)
    seeds, types = [], []
    for seed in range(config.seed, config.seed + config.num_seeds):
        every = load_types(source=config.data, seed=seed)
        types = [each for each in every if each.name in names]
        print(f"{run.experiment}, seed {seed}", flush=True)
        seeds.append(measured(SeedRun(run, f"seed {seed}"), base, types, config, seed))
    content_types_report.draw(seeds, base, run.path)
    numbers = content_types_report.metrics(seeds, run.experiment)
    run.finish(
        metrics=numbers,
        claims=content_types_report.claims(numbers, run.experiment),
        report=content_types_report.markdown(seeds, numbers, config, types, run.experiment),
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """One seed. Rows are documents, type by type, then the mixed rows.

    labels    (W, S) type of each token, −1 for padding;  documents  how many rows are documents
    routed    Evaluation of all rows with routing;  free  of `compared`, or None
    compared  numbers of the rows that every other arm was measured on
    arms      {label: Evaluation} of those rows
    curves    {name: records of its training}
    label_use where the router's training read the own-data label, in words
    """

    names: list[str]
    tokens: np.ndarray
    labels: np.ndarray
    documents: int
    routed: Any
    free: Any
    compared: np.ndarray
    arms: dict[str, Any]
    curves: dict[str, list[dict]]
    label_use: str


def measured(run: SeedRun, base, types, config: Config, seed: int) -> Measured:
    """Trains what is not cached, then measures every arm on held-out documents."""
    from molora_jax.adapters import AdapterBank
    from molora_jax.training import base_arm, evaluate, oracle_arm, single_arm, uniform_arm
    from molora_jax.training.data import concatenate

    composed = config.composed(seed)
    names = [each.name for each in types]
    train = [
        compose.packed(each.train_docs, base.tokenizer, rows=config.train_rows,
                       seq_len=config.adapter_len)
        for each in types
    ]  # fmt: skip
    curves = {}
    bank = AdapterBank(base.config, num_slots=len(names), max_rank=config.rank)
    for name, windows in zip(names, train, strict=True):
        folder, curves[name] = compose.trained_adapter(run, base, composed, {name: windows})
        bank.load(folder, name=name)
    router, curves["router"], label_use = compose.trained_router(run, base, bank, train, composed)

    documents = [document_rows(each, base.tokenizer, config) for each in types]
    documents = [rows.labelled(at) for at, rows in enumerate(documents)]
    mixed = mixed_rows(documents, config, seed)
    windows = concatenate([*documents, mixed])
    starts = np.cumsum([0, *(rows.num_rows for rows in documents)])
    compared = np.concatenate(
        [np.arange(start, min(start + config.loss_docs, end))
         for start, end in zip(starts, [*starts[1:], windows.num_rows], strict=True)]
    )  # fmt: skip
    columns = bank.column_to_slot([each.digest for each in bank.list()])

    def losses(rows, arm, label, *, return_routing=False):
        return evaluate(base.decoder, rows, batch_size=4, adapters=bank.stacks, router=arm,
                        column_to_slot=columns, return_routing=return_routing,
                        label=label)  # fmt: skip

    routed = losses(windows, router, "routed", return_routing=True)
    print(f"held-out loss of all {windows.num_rows} rows, routed: {routed.nll:.4f}", flush=True)
    free = None
    if config.free_steps:
        untold = config.composed(
            seed, FreeConfig, router_steps=config.free_steps, router_lr=config.free_lr
        )
        no_label, curves["router without labels"], use = compose.trained_router(
            SeedRun(run, "without labels"), base, bank, train, untold
        )
        assert use.endswith(": no"), use
        free = losses(
            windows.rows(compared), no_label, "routed without labels", return_routing=True
        )
    arms: dict[str, Any] = {"base": base_arm}
    arms |= {f"{name} only": single_arm(at) for at, name in enumerate(names)}
    arms |= {"oracle": oracle_arm, "uniform": uniform_arm(len(names))}
    found = {label: losses(windows.rows(compared), arm, label) for label, arm in arms.items()}
    in_table = np.isin(np.arange(windows.num_rows), compared)[:, None]
    nll = {label: each.nll for label, each in found.items()} | {"routed": routed.mean(in_table)}
    for label, each in nll.items():
        rows = f"the {len(compared)} rows of the report's table"
        print(f"held-out loss of {rows}, {label}: {each:.4f}", flush=True)
    return Measured(
        names=names,
        tokens=windows.tokens,
        labels=windows.labels,
        documents=int(starts[-1]),
        routed=routed,
        free=free,
        compared=compared,
        arms=found,
        curves=curves,
        label_use=label_use,
    )


def document_rows(domain, tokenizer, config: Config):
    """One row for each of the first held-out documents, padded where it is short.

    As in training, of a long document the excerpt a third into it, since beginnings are alike;
    those of fewer than an eighth of a row are passed over: a vote of so few says little.
    """
    from molora_jax.training.data import make_batch

    S, rows = config.eval_len, []
    for document in domain.heldout_docs:
        ids = tokenizer.encode(compose.excerpt(document, 8 * S))[:S]
        if len(ids) >= S // 8:
            rows.append(ids)
        if len(rows) == config.eval_docs:
            break
    if not rows:
        raise ValueError(f"{domain.name}: no held-out document of {S // 8} tokens or more")
    tokens = np.zeros((len(rows), S), np.int32)
    mask = np.zeros((len(rows), S), bool)
    for at, ids in enumerate(rows):
        tokens[at, : len(ids)], mask[at, : len(ids)] = ids, True
    return make_batch(tokens, mask, mask)


def mixed_rows(documents, config: Config, seed: int):
    """Rows of spans of equal length, each the beginning of some document's row.

    No two neighbours are of one type. The first token of a span is no target: nothing before it
    announces it.
    """
    from molora_jax.training.data import make_batch

    rng = np.random.default_rng(seed)
    length = config.eval_len // config.mixed_spans
    shape = (config.mixed_rows, length * config.mixed_spans)
    tokens, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    long_enough = [np.flatnonzero(rows.mask[:, :length].all(axis=1)) for rows in documents]
    for at, rows in enumerate(long_enough):
        if not len(rows):
            raise ValueError(f"type {at}: no held-out document has the {length} tokens of a span")
    for row in range(config.mixed_rows):
        last = -1
        for span in range(config.mixed_spans):
            last = int(rng.choice([g for g in range(len(documents)) if g != last]))
            source = rng.choice(long_enough[last])
            where = slice(span * length, (span + 1) * length)
            tokens[row, where] = documents[last].tokens[source, :length]
            labels[row, where] = last
    padding = ((0, 0), (0, config.eval_len - shape[1]))
    mask = np.pad(np.ones(shape, bool), padding)
    is_target = mask.copy()
    is_target[:, length : shape[1] : length] = False
    return make_batch(
        np.pad(tokens, padding), mask, is_target, labels=np.pad(labels, padding, constant_values=-1)
    )
