"""A LoRA adapter from a user's own JSON lines: a PEFT folder, with held-out loss where asked."""

import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from experiments import settings
from experiments.registry import check_config, place
from experiments.run_folder import check_out, check_own, deliver
from experiments.shipped import statistics_of
from molora_jax.adapters import Adapter, AdapterBank, AdapterCard, load_adapter, save_adapter
from molora_jax.adapters.peft_folder import ADAPTER_FILES
from molora_jax.files import near_path
from molora_jax.models import base_digest, load_base
from molora_jax.models.digest import file_digest
from molora_jax.training import (
    AdapterTrainConfig,
    TrainConfig,
    base_arm,
    evaluate,
    read_windows,
    single_arm,
    train_adapter,
)
from molora_jax.training.adapter_checkpoint import load_start, start_settings

OF_THE_ADAPTER = ("rank", "alpha", "use_rslora", "projections")  # where one is gone on from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainConfig):
    """What is trained on what; steps, lr and so on are TrainConfig's, the last four fields
    AdapterTrainConfig's, whose defaults stand in for None.

    base            base model: a name, a folder or a .gguf file
    data            JSON lines, each with `text`, or `messages` for the chat template
    heldout         the same, never trained on; empty measures nothing
    responses_only  only the assistant's tokens are targets (needs `messages`)
    seq_len         tokens of a row
    name            the adapter's label, and the name of its folder in the run's own
    init_from       an adapter to go on from, a PEFT folder or a training checkpoint: rank, alpha,
                    use_rslora and projections are then its own: left out, or given the same
    statistics      features a layer (m, as 256) of the router statistics that are left beside the
                    adapter, so that it can be composed with others; 0 leaves none. They hold no
                    text, but of little data one could tell which tokens occur
    out             another folder to copy the adapter to; one that holds anything but what this run
                    made is refused
    overwrite       replaces another adapter that lies in out
    rank            r; None: 8, or that of init_from
    alpha           the scale is alpha / rank, or alpha / √rank with use_rslora; None: 16
    projections     which of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj are
                    adapted; None: all
    use_rslora      None: no
    """

    base: str = "smollm2-135m"
    data: str = place()
    heldout: str = place()
    responses_only: bool = False
    seq_len: int = 128
    name: str = "adapter"
    init_from: str = place()
    statistics: int = 0
    checkpoint_every: int = 20
    out: str = place()
    overwrite: bool = place(False)
    rank: int | None = None
    alpha: float | None = None
    projections: Sequence[str] | None = None
    use_rslora: bool | None = None

    def __post_init__(self):
        check_config(self)
        super().__post_init__()
        if not self.data:
            raise ValueError("Config.data is empty: name a file of JSON lines, as in data=my.jsonl")
        if not re.fullmatch(r"\w[\w.-]*", self.name) or self.name == "previous":
            raise ValueError(
                f"Config.name = {self.name!r}: expected the name of a folder, of letters, digits, "
                "_, - and ., and not 'previous', which is taken"
            )
        if self.statistics < 0:
            raise ValueError(
                f"Config.statistics = {self.statistics}: expected a number of features, or 0 for "
                "no statistics"
            )
        for field in ("data", "heldout"):
            path = getattr(self, field)
            if path and not pathlib.Path(path).is_file():
                raise ValueError(
                    f"Config.{field} = {path!r}: there is no such file{near_path(path)}"
                )
        self._resolve()
        try:
            object.__setattr__(self, "projections", self.training().projections)  # in order
        except ValueError as error:
            raise ValueError(str(error).replace("AdapterTrainConfig.", "Config.")) from None
        check_out(self.out, ADAPTER_FILES)
        if self.out and self.init_from and _resolved(self.out) == _resolved(self.init_from):
            raise ValueError(
                f"Config.out = {self.out!r} is what init_from reads: name another folder"
            )

    def training(self) -> AdapterTrainConfig:
        """The part that training reads: a checkpoint does not depend on where results go."""
        names = [field.name for field in dataclasses.fields(AdapterTrainConfig)]
        return AdapterTrainConfig(**{name: getattr(self, name) for name in names})

    def _resolve(self) -> None:
        """Puts the values that hold in place of None; a run's id and config.json then show them.

        Raises ValueError where a value was given that is not that of the adapter to start from.
        """
        own = self._own_settings()
        for field in dataclasses.fields(AdapterTrainConfig):
            if field.name not in OF_THE_ADAPTER:
                continue
            value, given = own.get(field.name, field.default), getattr(self, field.name)
            if given is None or (own and _same(given, value)):
                object.__setattr__(self, field.name, value)
            elif own:
                raise ValueError(
                    f"Config.{field.name} = {given!r}, but the adapter of Config.init_from has "
                    f"{value!r}: set it to that, or leave it out"
                )

    def _own_settings(self) -> dict[str, Any]:
        """Those of the adapter to start from; empty without one."""
        try:
            start = self.start()
            return start_settings(start) if start else {}
        except (ValueError, OSError) as error:
            raise ValueError(f"Config.init_from = {self.init_from!r}: {error}") from None

    def start(self) -> Adapter | None:
        """The adapter to go on from, where one is named."""
        return load_start(self.init_from) if self.init_from else None


SWEEPS = {
    "lr": lambda: [f"train_adapter.Config.lr = {lr}" for lr in (1e-4, 3e-4, 1e-3, 3e-3)],
    "rank": lambda: [f"train_adapter.Config.rank = {rank}" for rank in (4, 8, 16, 32)],
    "steps": lambda: [f"train_adapter.Config.steps = {steps}" for steps in (20, 40, 80)],
}


def _resolved(path: str) -> pathlib.Path:
    return pathlib.Path(path).expanduser().resolve()


def _same(given: Any, own: Any) -> bool:
    """Projections are a set: training has an order of its own."""
    return set(given) == set(own) if isinstance(own, tuple) else given == own


def digests(config: Config) -> dict[str, str]:
    """Of the data files, the base and the adapter to go on from."""
    files = {"data": config.data, "heldout": config.heldout}
    found = {name: file_digest(path) for name, path in files.items() if path}
    if start := config.start():
        found["start"] = start.digest
    return {**found, "base": base_digest(config.base)}


def check_place(config: Config, path: pathlib.Path) -> None:
    """Before anything is trained: nothing of anybody else's is replaced unasked."""
    check_own(path / config.name, config.out, overwrite=config.overwrite)


def main(config: Config, run) -> None:
    """Trains, saves, and measures the held-out loss with and without the adapter."""
    base = load_base(config.base)

    def windows(path):
        return read_windows(
            path, base.tokenizer, seq_len=config.seq_len, responses_only=config.responses_only
        )

    data, data_report = windows(config.data)

    start, training = config.start(), config.training()

    def make(folder):
        adapter, _ = train_adapter(
            base, data, training, name=config.name, start=start, run_dir=folder
        )
        save_adapter(adapter, folder / "adapter", overwrite=True)

    found = digests(config)
    adapter = run.artifact(
        "adapter",
        config=[training, config.name, config.seq_len, config.responses_only],
        digests={name: found[name] for name in ("data", "base", "start") if name in found},
        make=make,
        load=lambda folder: load_adapter(folder / "adapter", name=config.name)[0],
        phase="adapter",
    )
    if config.statistics:
        packed = statistics_of(
            run, base, adapter, data, features=config.statistics, seed=config.seed
        )
        adapter = adapter.with_statistics(packed)
    losses = _losses(run.path / "metrics.jsonl")
    metrics = {"first_loss": losses[0], "last_loss": losses[-1]}
    if config.heldout:
        heldout, _ = windows(config.heldout)
        bank = AdapterBank(
            base.config, num_slots=1, max_rank=adapter.rank, projections=adapter.projections
        )
        bank.load(adapter)
        for name, arm in {"heldout_base": base_arm, "heldout_adapter": single_arm(0)}.items():
            measured = evaluate(
                base.decoder,
                heldout,
                adapters=bank.stacks,
                router=arm,
                label=name.removeprefix("heldout_"),
            )
            metrics[name] = measured.nll
    made = run.path / config.name
    card = AdapterCard(
        base=config.base,
        data=pathlib.Path(config.data).name,
        command=_command(config),
        metrics=metrics,
    )
    save_adapter(adapter, made, card=card, overwrite=True)
    deliver(made, config.out, owned=ADAPTER_FILES)
    rows = "".join(f"| {name} | {value:.4f} |\n" for name, value in metrics.items())
    run.finish(
        metrics=metrics,
        report=f"# Adapter {config.name}\n\nA PEFT folder in `{made}`, base {config.base}, digest "
        f"{adapter.digest[:12]}.\n\n{data_report}.\n\n| nats a token | |\n| --- | --- |\n{rows}",
    )


def found(config: Config, path: pathlib.Path) -> None:
    """Hands out the adapter of a finished run."""
    deliver(path / config.name, config.out, owned=ADAPTER_FILES)


def _losses(path: pathlib.Path) -> list[float]:
    """Training losses in the order of their steps."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["phase"] == "adapter"]


def _command(config: Config) -> str:
    """What makes such an adapter again. Of files it has the names alone, for it travels with it."""
    words = []
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if field.name in ("out", "overwrite") or value == field.default:
            continue
        if field.name in ("base", "data", "heldout", "init_from") and pathlib.Path(value).exists():
            value = pathlib.Path(value).name
        words += settings.written(sys.modules[__name__], field.name, value)
    lines = ["molora run --experiment=train_adapter", *map(settings.quoted_for_shell, words)]
    return " \\\n  ".join(lines)
