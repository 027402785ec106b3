"""Table 8: text, pictures and grids in one vocabulary, an adapter each, generated in one pass."""

import dataclasses
from typing import Literal

from experiments.registry import check_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """From data to pictures and times.

    base             base model with a tied embedding: a name, a folder or a .gguf file
    data             "molora_data": the real sets of the folder MOLORA_DATA; "generated": stand-ins;
                     "auto": the former where MOLORA_DATA is set
    rank             of every adapter, on all seven projections
    alpha            the adapters' scale is alpha / rank
    row_steps        steps of the added vocabulary rows, trained once, before any adapter
    row_lr           their peak learning rate
    text_steps, picture_steps, grid_steps
                     steps of that modality's adapter
    adapter_lr       peak learning rate of each
    batch_rows       rows of one training step
    seq_len          tokens of such a row; also the longest prompt that is generated from
    train_rows       documents of each kind that are trained on
    eval_rows        held-out documents of each of three kinds: pictures, puzzles, mixed
    plain_rows       rows of plain text on which the cost of the added rows is measured
    samples          answers for each alphabet and look
    max_new_tokens   longest of these answers
    temperature      of these answers; puzzles are answered greedily
    sample_top_k     likeliest tokens that these answers are drawn from
    puzzles          held-out puzzles that are answered
    engine_rows      requests decoded together;  buckets  lengths to which prompts are padded
    quality          False: only times, of a random decoder
    width            of a random decoder to time; None: the base with its adapters is timed
    layers           of the random decoder
    dtype            of the random decoder
    time_rows        B of what is timed;  time_len  S of what is timed
    repeats          turns, in each of which every arm runs once
    """

    base: str = "smollm2-135m"
    data: Literal["auto", "generated", "molora_data"] = "auto"
    rank: int = 16
    alpha: float = 32.0
    row_steps: int = 24
    row_lr: float = 1e-2
    text_steps: int = 16
    picture_steps: int = 72
    grid_steps: int = 28
    adapter_lr: float = 2e-3
    batch_rows: int = 2
    seq_len: int = 272
    train_rows: int = 240
    eval_rows: int = 8
    plain_rows: int = 8
    samples: int = 2
    max_new_tokens: int = 130
    temperature: float = 0.8
    sample_top_k: int = 8
    puzzles: int = 4
    engine_rows: int = 8
    buckets: tuple[int, ...] = (16, 272)
    quality: bool = True
    width: int | None = None
    layers: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    time_rows: int = 8
    time_len: int = 128
    repeats: int = 15
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        least = {"seq_len": 128, "time_len": 2, "seed": 0, "sample_top_k": 0}
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), least.get(field.name, 1)
            if type(value) is int and value < low:
                raise ValueError(f"Config.{field.name} = {value}: expected at least {low}")
        if self.width is not None and self.width % 64:
            raise ValueError(f"Config.width = {self.width}: expected a multiple of 64, the heads'")
        if not self.quality and self.width is None:
            raise ValueError(
                "Config.quality = False leaves no adapters to time: give Config.width, that of a "
                "random decoder"
            )
        if max(self.buckets, default=0) != self.seq_len:
            raise ValueError(
                f"Config.buckets = {self.buckets}: the longest must be seq_len, {self.seq_len}"
            )
        if not self.temperature >= 0:
            raise ValueError(f"Config.temperature = {self.temperature}: expected 0 or more")
        self.row_training(), self.adapter_training("text")  # refuse what training would

    def row_training(self):
        from molora_jax.training.config import TrainConfig

        # Rows begin far from where they belong: a clip of 1 would hold them back for long.
        return TrainConfig(
            steps=self.row_steps,
            lr=self.row_lr,
            clip=10.0,
            batch_size=self.batch_rows,
            seed=self.seed,
            checkpoint_every=20,
        )

    def adapter_training(self, modality: str):
        from molora_jax.training.config import AdapterTrainConfig

        return AdapterTrainConfig(
            rank=self.rank,
            alpha=self.alpha,
            steps=getattr(self, f"{modality}_steps"),
            lr=self.adapter_lr,
            batch_size=self.batch_rows,
            seed=self.seed,
            checkpoint_every=20,
        )


def digests(config: Config) -> dict[str, str]:
    if not config.quality:
        return {}
    from experiments.interleaved_sources import load_data
    from molora_jax.models import base_digest

    return {
        "base": base_digest(config.base),
        "data": load_data(source=config.data, seed=config.seed).digest,
    }


def main(config: Config, run) -> None:
    from experiments import interleaved_report as report
    from experiments.interleaved_timing import random_problem, time_steps

    text, metrics, claims = "# Interleaved decoding in one pass\n", {}, []
    where = f"{config.base}, r = {config.rank}, K = 2"
    if config.quality:
        text, metrics, claims, problem = with_quality(config, run)
    if config.width is not None:
        problem = random_problem(
            width=config.width,
            layers=config.layers,
            rank=config.rank,
            rows=config.time_rows,
            seq_len=config.time_len,
            dtype=config.dtype,
            seed=config.seed,
        )
        where = (
            f"random decoder, D = {config.width}, L = {config.layers}, r = {config.rank}, K = 2, "
            f"{config.dtype}"
        )
    where += f", {config.time_rows} rows that have read {config.time_len} tokens"
    times = time_steps(problem, repeats=config.repeats)
    values = {f"{name}_s": seconds.tolist() for name, seconds in times.seconds.items()}
    run.log_metrics(values, step=0, phase="times")
    text += "\n\n" + report.timing_markdown(times, where=where, repeats=config.repeats)
    run.finish(
        metrics={**metrics, **report.timing_metrics(times)},
        claims=[*report.timing_claims(times, where=where), *claims],
        report=text,
    )


def with_quality(config: Config, run):
    """Trains, validates and generates: (report, metrics, claims, what is to be timed)."""
    import jax

    from experiments import interleaved_figures as figures
    from experiments import interleaved_report as report
    from experiments.compose import digest_of_windows
    from experiments.interleaved_data import MODALITIES, Layout, Writer
    from experiments.interleaved_generation import generate
    from experiments.interleaved_losses import validate
    from experiments.interleaved_sources import load_data
    from experiments.interleaved_timing import Problem
    from experiments.interleaved_training import (
        extended_base,
        modality_adapter,
        own_windows,
        windows_of,
    )
    from molora_jax.adapters import AdapterBank
    from molora_jax.display import curve_figure, save_figure
    from molora_jax.models import load_base
    from molora_jax.training.data import concatenate

    data = load_data(source=config.data, seed=config.seed)
    plain = load_base(config.base)
    layout = Layout(plain.config.vocab_size)
    writer = Writer(layout, plain.tokenizer.encode, config.seq_len)
    shape = {"seq_len": config.seq_len, "rows": config.train_rows}
    of_pictures = windows_of(writer.picture_documents(data.train_pictures, config.seed), **shape)
    of_grids = windows_of(writer.grid_documents(data.train_tasks, config.seed), **shape)
    both = concatenate([of_pictures, of_grids])

    curves = {}
    base, curves["rows"] = extended_base(
        run, plain, both, config.row_training(), digest=digest_of_windows(both)
    )
    folders = {}
    for column, (name, windows) in enumerate(
        zip(MODALITIES, (both, of_pictures, of_grids), strict=True)
    ):
        own = own_windows(windows, layout, column)
        folders[name], curves[name] = modality_adapter(
            run, base, name, own, config.adapter_training(name), digest=digest_of_windows(own)
        )
    bank = AdapterBank(base.config, num_slots=len(folders), max_rank=config.rank)
    for name, folder in folders.items():
        print(bank.load(folder, name=name), flush=True)

    losses = validate(
        data, writer, plain, base, bank, rows=config.eval_rows, plain_rows=config.plain_rows,
        seed=config.seed,
    )  # fmt: skip
    generated = generate(base, folders, writer, data, config)
    seen = report.Seen.of(generated, data, layout)

    figures.draw(generated, data, layout, base.tokenizer.pieces, run.path)
    by_arm = {
        arm: {name: losses.of_modality(arm, at) for at, name in enumerate(MODALITIES)}
        for arm in losses.arms
        if arm != "oracle"
    }
    save_figure(figures.losses_figure(by_arm), run.path / "losses.png")
    lines = {n: ([r["step"] for r in c], [r["loss"] for r in c]) for n, c in curves.items() if c}
    save_figure(curve_figure(lines, title="Training loss", smooth=5), run.path / "loss.png")

    problem = Problem(
        decoder=base.decoder,
        stacks=jax.tree.map(lambda leaf: leaf[:, :2], bank.stacks),
        layout=layout,
        rows=config.time_rows,
        seq_len=config.time_len,
    )
    text = (
        report.introduction(config, data)
        + losses.markdown()
        + seen.markdown()
        + report.example(generated)
    )
    return text, {**losses.metrics(), **seen.metrics()}, losses.claims(), problem
