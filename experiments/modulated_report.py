"""What the modulated scale came to: losses, claims, and pictures of the scale along a row."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.modulated import TASKS
from experiments.modulated_task import LONGEST
from experiments.modulated_training import ARMS
from experiments.run_folder import Claim, markdown
from experiments.seeds import SPREAD, counted, over_seeds, shown
from molora_jax import display
from molora_jax.display.text import adapter_color

Found = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def write(config, run, found: Found, rates: Mapping[tuple[str, str], float]) -> None:
    """Metrics, claims, report and pictures of every task."""
    numbers = ("val_loss", "train_loss", "parameters", "tokens")
    by_seed: list[dict[str, float]] = []
    for seed in range(config.num_seeds):
        each = {
            f"modulated/{task}/{arm}/{name}": seeds[seed][name]
            for (task, arm), seeds in found.items()
            for name in numbers
        }
        for task in config.tasks:
            for arm in ("stateless", "recurrent"):
                each[f"modulated/{task}/{arm}_gain_over_lora"] = (
                    each[f"modulated/{task}/lora/val_loss"]
                    - each[f"modulated/{task}/{arm}/val_loss"]
                )
            each[f"modulated/{task}/memory_gain"] = (
                each[f"modulated/{task}/stateless/val_loss"]
                - each[f"modulated/{task}/recurrent/val_loss"]
            )
        by_seed.append(each)
    metrics = over_seeds(by_seed)
    claims = [
        Claim(
            id=f"modulated.{task}.{name}", kind="order",
            ours=metrics[f"modulated/{task}/{metric}"], unit="nats", direction="higher",
            # More than the seeds differ by, and not only more than nothing.
            holds=metrics[f"modulated/{task}/{metric}"]
            > metrics.get(f"modulated/{task}/{metric}/{SPREAD}", 0.0),
            note=f"validation loss, {against} less scale with memory; equal parameters and steps; "
            "holds where the mean is above the spread; seeds "
            + ", ".join(f"{each[f'modulated/{task}/{metric}']:+.4f}" for each in by_seed),
        )
        for task in config.tasks
        for name, metric, against in (
            ("over_lora", "recurrent_gain_over_lora", "plain LoRA"),
            ("memory", "memory_gain", "scale without memory"),
        )
    ]  # fmt: skip
    pictures = _pictures(config, run, found)
    run.finish(
        metrics=metrics, claims=claims, report=_report(config, found, metrics, rates, pictures)
    )


def _report(config, found: Found, metrics, rates, pictures: Sequence[str]) -> str:
    rows = [
        [
            TASKS[task],
            ARMS[arm],
            shown(metrics, f"modulated/{task}/{arm}/val_loss", digits=4),
            shown(metrics, f"modulated/{task}/{arm}/train_loss", digits=4),
            f"{metrics[f'modulated/{task}/{arm}/parameters']:,.0f}",
            f"{metrics[f'modulated/{task}/{arm}/tokens']:,.0f}",
            f"{rates[task, arm]:g}",
        ]
        for task, arm in found
    ]
    return "\n\n".join(
        [
            "# A scale with a memory, beside plain LoRA",
            f"Marked rows: stretches of 1 to {LONGEST} questions, each with its answer behind it. "
            "A mark before each stretch says whether the answers are those the base knows or new "
            f"ones. To the base ({config.layers} layers of width {config.width}, trained by us "
            "on old answers, frozen) marks mean nothing, so the adapter has to find what the last "
            "one was. Only answers count. With all projections adapted it can do so by attention; "
            "with the MLP's alone it cannot, but for what the base's attention brings along. Text: "
            "bytes, base and adapter on domains of their own (the third and the fourth of the "
            f"data). {config.steps} steps of {config.batch_rows} rows of {config.seq_len} tokens "
            f"in every arm, rank {config.rank}, for plain LoRA more, so that it has no fewer "
            "parameters than the adapter and its modulator together. Nats a target, mean ± "
            f"standard deviation of {counted(config.num_seeds)}; validation is held-out rows. The "
            "learning rate is "
            + (
                "the best of each arm on a seed of its own."
                if len(config.lrs) > 1
                else "the same in every arm, and tuned for none."
            ),
            markdown(
                ["task", "arm", "validation", "train", "parameters", "target tokens",
                 "learning rate"],
                rows,
            ),
            "Our reading of MaLoRA, of which we know the abstract alone: a LoRA whose scaling "
            "factor is an input-dependent function with a recurrent state across tokens. The "
            "abstract leaves open, and we chose: a diagonal, selective recurrence h = a·h + "
            f"(1 − a)·u with {config.state_size} numbers in every layer; one scale for all "
            "projections of a layer; as input the layer's normalised hidden state; the scale "
            "2·σ(h·w), so within 0 to 2 and exactly 1 at the start; the state begins at 0 with "
            "every row. Without memory: the same parameters, h = (1 − a)·u.",
            " ".join(f"![{name}]({name}.png)" for name in pictures),
        ]
    )  # fmt: skip


def _pictures(config, run, found: Found) -> list[str]:
    names = []

    def save(figure, name: str) -> None:
        display.save_figure(figure, run.path / f"{name}.png")
        names.append(name)

    for task in config.tasks:
        curves = {
            ARMS[arm]: (
                found[task, arm][0]["steps"],
                np.mean([seed["curve"] for seed in found[task, arm]], axis=0),
            )
            for arm in ARMS
        }
        title = f"Validation: {TASKS[task]}"
        save(display.curve_figure(curves, title=title), f"curve_{task}")
        if task != "text":
            save(_distance(found, task), f"distance_{task}")
            save(_scale(config, found, task), f"scale_{task}")
    return names


def _distance(found: Found, task: str):
    """Loss of an answer by how many pairs stand between the last mark and its question."""
    curves = {
        ARMS[arm]: (
            range(len(found[task, arm][0]["by_distance"])),
            np.mean(
                [[np.nan if x is None else x for x in seed["by_distance"]]
                 for seed in found[task, arm]],
                axis=0,
            ),
        )
        for arm in ARMS
    }  # fmt: skip
    figure = display.curve_figure(
        curves, title=f"By distance: {TASKS[task]}", ylabel="loss (nats per answer)"
    )
    figure.axes[0].set_xlabel("pairs since the mark")
    return figure


def _scale(config, found: Found, task: str):
    """The scale of every layer along a held-out row of the first seed, marks by their colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, arm in zip(panels, ("stateless", "recurrent"), strict=True):
        sample = found[task, arm][0]["sample"]
        tokens, gates = np.asarray(sample["tokens"]), np.asarray(sample["gates"])
        for layer, gate in enumerate(gates):
            axes.plot(gate, color=adapter_color(layer), marker=".", label=f"layer {layer}")
        for kind, name in enumerate(("old", "new")):
            for index, place in enumerate(np.flatnonzero(tokens == 2 * config.questions + kind)):
                axes.axvline(
                    place, color=("gray", "black")[kind], linewidth=1.2,
                    linestyle=(":", "-")[kind], label=None if index else f"mark “{name}”",
                )  # fmt: skip
        axes.set_ylim(-0.05, 2.05)
        axes.set_ylabel("scale")
        axes.set_title(ARMS[arm], loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("token")
    panels[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f"The scale along a held-out row: {TASKS[task]}")
    return figure
