"""A router over adapter folders, from a data file of each: a composition that can be served."""

import dataclasses
import pathlib

from experiments.registry import check_config, place, repeated
from experiments.run_folder import check_out, check_own, deliver
from molora_jax.adapters import AdapterBank, Composition, load_adapter
from molora_jax.adapters.composition_record import ADAPTERS_FOLDER, RECORD_FILE, ROUTER_FILE
from molora_jax.files import near_path
from molora_jax.models import base_digest, load_base
from molora_jax.models.digest import file_digest
from molora_jax.training import (
    RouterTrainConfig,
    base_arm,
    evaluate,
    oracle_arm,
    read_windows,
    train_router,
    uniform_arm,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RouterTrainConfig):
    """What is routed to what; steps, lr, top_k, label_coef and so on are RouterTrainConfig's.

    base       base model: a name, a folder or a .gguf file
    adapters   PEFT folders, two or more; their names become the labels
    data       one file of JSON lines for each adapter, in the same order
    heldout    the same, never trained on; empty measures nothing
    seq_len    tokens of a row
    out        another folder to copy the composition to, from `composition` in the run's own; one
               that holds anything but what this run made is refused
    overwrite  replaces another composition that lies in out
    """

    base: str = "smollm2-135m"
    adapters: tuple[str, ...] = place(())
    data: tuple[str, ...] = place(())
    heldout: tuple[str, ...] = place(())
    seq_len: int = 128
    checkpoint_every: int = 10
    out: str = place()
    overwrite: bool = place(False)

    def __post_init__(self):
        check_config(self)
        super().__post_init__()
        if len(self.adapters) < 2 or len(self.data) != len(self.adapters):
            raise ValueError(
                f"Config.adapters has {len(self.adapters)} entries and Config.data "
                f"{len(self.data)}: expected two adapters or more and one data file for each, as "
                "in adapters=out/code,out/math data=code.jsonl,math.jsonl"
            )
        if twice := repeated(str(_folder(path)) for path in self.adapters):
            raise ValueError(f"Config.adapters names {twice[0]!r} twice: expected each once")
        if self.top_k > len(self.adapters):
            raise ValueError(
                f"Config.top_k = {self.top_k}: expected at most {len(self.adapters)}, one for "
                "each of Config.adapters"
            )
        if self.heldout and len(self.heldout) != len(self.data):
            raise ValueError(
                f"Config.heldout has {len(self.heldout)} files: expected {len(self.data)}, one for "
                "each adapter in the order of Config.data, or none"
            )
        for path in (*self.data, *self.heldout):
            if not pathlib.Path(path).is_file():
                raise ValueError(
                    f"Config.data or heldout names {path!r}: there is no such file{near_path(path)}"
                )
        check_out(self.out, {ROUTER_FILE, RECORD_FILE, ADAPTERS_FOLDER})

    def training(self) -> RouterTrainConfig:
        """The part that training reads: a checkpoint does not depend on where results go."""
        names = [field.name for field in dataclasses.fields(RouterTrainConfig)]
        return RouterTrainConfig(**{name: getattr(self, name) for name in names})


SWEEPS = {
    "lr": lambda: [f"train_router.Config.lr = {lr}" for lr in (1e-3, 3e-3, 1e-2)],
    "top_k": lambda: [f"train_router.Config.top_k = {top_k}" for top_k in (1, 2)],
    "label_coef": lambda: [f"train_router.Config.label_coef = {c}" for c in (0.0, 0.1, 1.0)],
}


def digests(config: Config) -> dict[str, str]:
    """Of every adapter, every data file and the base."""
    found = {"base": base_digest(config.base)}
    for column, path in enumerate(config.adapters):
        try:
            found[f"adapter_{column}"] = load_adapter(path)[0].digest
        except FileNotFoundError as error:
            raise ValueError(f"Config.adapters: {error}") from None
    for kind in ("data", "heldout"):
        for column, path in enumerate(getattr(config, kind)):
            found[f"{kind}_{column}"] = file_digest(path)
    return found


def check_place(config: Config, path: pathlib.Path) -> None:
    """Before anything is trained: nothing of anybody else's is replaced unasked."""
    check_own(path / "composition", config.out, overwrite=config.overwrite)


def main(config: Config, run) -> None:
    """Trains the router, saves the composition, and measures it on held-out rows of each domain."""
    base = load_base(config.base)
    bank = _bank(base, config.adapters)
    names = [each.name for each in bank.list()]

    def windows(paths):
        return [
            read_windows(path, base.tokenizer, seq_len=config.seq_len)[0].labelled(column)
            for column, path in enumerate(paths)
        ]

    def make(folder):
        router, training = train_router(
            base, bank, windows(config.data), config.training(), run_dir=folder
        )
        Composition(
            base_name=base.name,
            base_digest=base.digest,
            bank=bank,
            router=router,
            column_digests=training.digests,
            labels_used=config.training().uses_labels(),
        ).save(folder / "composition", overwrite=True)

    found = digests(config)
    composition = run.artifact(
        "router",
        config=[config.training(), config.seq_len],
        digests={name: found[name] for name in found if not name.startswith("heldout")},
        make=make,
        load=lambda folder: Composition.load(folder / "composition", base),
        phase="router",
    )
    made = run.path / "composition"
    composition.save(made, overwrite=True)
    deliver(made, config.out)

    arms = {"base": base_arm, "uniform": uniform_arm(len(names)), "oracle": oracle_arm}
    metrics = {}
    for name, rows in zip(names, windows(config.heldout), strict=False):
        for arm, router in {**arms, "routed": composition.router}.items():
            measured = evaluate(
                base.decoder,
                rows,
                adapters=composition.bank.stacks,
                router=router,
                column_to_slot=composition.column_to_slot if arm == "routed" else None,
                label=arm,
            )
            metrics[f"{arm}/{name}"] = measured.nll
    table = "".join(f"| {name} | {value:.4f} |\n" for name, value in metrics.items())
    run.finish(
        metrics=metrics,
        report=f"# Router over {', '.join(names)}\n\n"
        f"A composition in `{made}`, base {config.base}; {config.training().label_use()}.\n"
        + (f"\n| held-out, nats a token | |\n| --- | --- |\n{table}" if table else ""),
    )


def found(config: Config, path: pathlib.Path) -> None:
    """Hands out the composition of a finished run."""
    deliver(path / "composition", config.out)


def _bank(base, paths) -> AdapterBank:
    """A bank that holds these adapters, slot after slot, and no more."""
    loaded = [
        load_adapter(path, name=label, config=base.config, base_name=base.name)[0]
        for path, label in zip(paths, _labels(paths), strict=True)
    ]
    bank = AdapterBank(
        base.config,
        num_slots=len(loaded),
        max_rank=max(adapter.rank for adapter in loaded),
        projections=sorted({name for adapter in loaded for name in adapter.projections}),
    )
    for adapter in loaded:
        print(bank.load(adapter))
    return bank


def _labels(paths) -> list[str]:
    """The folders' names, each with as many parents before it as tell it from the others."""
    split = [_folder(path).parts for path in paths]

    def label(own):
        depth = next(
            n for n in range(1, len(own) + 1) if sum(each[-n:] == own[-n:] for each in split) == 1
        )
        return "-".join(own[-depth:])

    return [label(own) for own in split]


def _folder(path: str) -> pathlib.Path:
    """The folder of an adapter that is named by it, or by a file in it."""
    resolved = pathlib.Path(path).resolve()
    return resolved.parent if resolved.is_file() else resolved
