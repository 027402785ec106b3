"""Tables, claims and pictures of add_adapter."""

import pathlib
import statistics
from typing import TYPE_CHECKING

from experiments.run_folder import Claim
from experiments.seeds import counted, over_seeds, shown

if TYPE_CHECKING:
    from experiments.add_adapter import Config, Measured

_FIXED = ("base", "oracle", "uniform")
BEST = "trained on all"
READS = {
    "trained": "the first three's data; knows nothing of the others",
    "Arrow": "adapter weights",
    "PHATGOOSE": "a gate trained with each adapter alone",
    "grown": "statistics, and a few tokens of every domain",
    BEST: "everybody's data, trained anew",
    "base": "no adapter",
    "oracle": "labels",
    "uniform": "nothing: all adapters alike",
}


def metrics(seeds: "list[Measured]") -> dict[str, float]:
    """Mean and spread over seeds of every arm's losses and of what follows from them."""
    return over_seeds([_of_seed(each) for each in seeds])


def _of_seed(one: "Measured") -> dict[str, float]:
    from experiments.add_adapter import KNOWN

    old, new = one.names[:KNOWN], one.names[KNOWN:]
    base, oracle = one.after["base"], one.after["oracle"]
    found: dict[str, float] = {}
    for arm, losses in one.after.items():
        key = _key(arm)
        found |= {f"{key}/{name}": loss for name, loss in losses.items()}
        found[f"{key}/over_oracle"] = statistics.fmean(
            losses[name] - oracle[name] for name in one.names
        )
        found[f"{key}/joined_over_oracle"] = losses["joined"] - oracle["joined"]
        found[f"{key}/new_gain_share"] = sum(base[name] - losses[name] for name in new) / sum(
            base[name] - oracle[name] for name in new
        )
        was = one.before.get("trained" if arm == "grown" else arm)
        if was is not None:
            lost = [losses[name] - was[name] for name in old]
            found[f"{key}/old_lose"] = statistics.fmean(lost)
            found[f"{key}/old_lose_most"] = max(lost)
    return found | {
        "compilations": one.compilations,
        "in_any_order": int(one.in_any_order),
        "unloads_exactly": int(one.unloads_exactly),
        "file_bytes": one.file_bytes,
    }


def claims(numbers: dict[str, float]) -> list[Claim]:
    """Of the best router from statistics that a file of two megabytes carries, and of its rules."""
    arm = next(
        name.split("/")[0] for name in numbers if name.startswith("statistics_m_") and "/" in name
    )
    gain, lost = numbers[f"{arm}/new_gain_share"], numbers[f"{arm}/old_lose_most"]
    pure = numbers[f"{arm}/over_oracle"] - numbers[f"{_key(BEST)}/over_oracle"]
    joined = numbers[f"{arm}/joined"] - numbers[f"{_key(BEST)}/joined"]
    nothing = "nothing trained after the load"
    return [
        Claim(id="add_adapter.new_gain_share", kind="share", ours=gain, direction="higher",
              holds=gain >= 0.9, note=f"of the oracle's gain on new domains, {nothing}; 0.9 asked"),
        Claim(id="add_adapter.old_lose_most", kind="order", ours=lost, unit="nats",
              direction="lower", holds=lost <= 0.02, note="the old domain that loses most; 0.02"),
        Claim(id="add_adapter.behind_trained_pure", kind="order", ours=pure, unit="nats",
              direction="lower", holds=pure <= 0.01, note="of a router trained on all data; 0.01"),
        Claim(id="add_adapter.behind_trained_joined", kind="order", ours=joined, unit="nats",
              direction="lower", holds=joined <= 0.01, note="on rows that change domain; 0.01"),
        Claim(id="add_adapter.compilations", kind="order", ours=numbers["compilations"],
              direction="lower", holds=numbers["compilations"] == 0,
              note="of the step, when adapters arrived"),
        Claim(id="add_adapter.in_any_order", kind="order", ours=numbers["in_any_order"],
              direction="higher", holds=numbers["in_any_order"] == 1,
              note="adapters in reverse give the same router, bit for bit"),
        Claim(id="add_adapter.unloads_exactly", kind="order", ours=numbers["unloads_exactly"],
              direction="higher", holds=numbers["unloads_exactly"] == 1,
              note="without the new adapters it is the router there was, bit for bit"),
    ]  # fmt: skip


def markdown(numbers: dict[str, float], seeds: "list[Measured]", config: "Config", types) -> str:
    from experiments.add_adapter import KNOWN

    names = seeds[0].names
    columns = [*names, "joined"]
    lines = [
        "# Adapters that arrive later",
        "",
        f"{config.base}, rank {config.rank}, k = {config.top_k}, {counted(len(seeds))}. First "
        f"{', '.join(names[:KNOWN])}; then {' and '.join(names[KNOWN:])}, loaded into free slots.",
        "Held-out loss in nats a token with all adapters loaded, mean ± standard deviation over "
        "seeds. Every router but Arrow's reads whose own data a token came from; what it reads "
        "stands beside it.",
        "",
        f"| router | reads | {' | '.join(columns)} |",
        f"| --- | --- |{' ---: |' * len(columns)}",
    ]
    for arm in seeds[0].after:
        cells = " | ".join(shown(numbers, f"{_key(arm)}/{name}") for name in columns)
        lines.append(f"| {arm} | {_reads(arm)} | {cells} |")
    lines += [
        "",
        "Over the oracle (mean of domains, and joined), the share of the oracle's gain on the new "
        "domains, and what the old domains lose when the new adapters come.",
        "",
        "| router | over the oracle | joined | new domains' gain | old domains lose | most |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in seeds[0].after:
        key = _key(arm)
        lost = (
            [shown(numbers, f"{key}/{each}") for each in ("old_lose", "old_lose_most")]
            if f"{key}/old_lose" in numbers
            else ["–", "–"]
        )
        reached = [
            shown(numbers, f"{key}/{each}")
            for each in ("over_oracle", "joined_over_oracle", "new_gain_share")
        ]
        lines.append(f"| {arm} | {' | '.join([*reached, *lost])} |")
    lines += [
        "",
        f"The statistics of one adapter are a file of {numbers['file_bytes'] / 1e6:.2f} MB, of "
        f"{config.statistics_rows} windows of its data, each behind text that the base wrote. "
        f"Data: {'; '.join(f'{each.name}: {each.source} ({each.licence})' for each in types)}.",
        "",
        "![Loss over the oracle](over_oracle.png)",
    ]
    return "\n".join(lines)


def draw(seeds: "list[Measured]", path: pathlib.Path) -> None:
    """Bars: each router's loss over the oracle, old domains, new domains and joined text."""
    from matplotlib.figure import Figure

    from experiments.add_adapter import KNOWN
    from molora_jax.display import adapter_color, save_figure

    names = seeds[0].names
    groups = {"old domains": names[:KNOWN], "new domains": names[KNOWN:], "joined": ["joined"]}
    arms = [arm for arm in seeds[0].after if arm not in ("base", "oracle")]
    figure = Figure(figsize=(7.2, 0.5 * len(arms) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    for at, (label, members) in enumerate(groups.items()):
        values = []
        for arm in arms:
            of_seed = [
                statistics.fmean(s.after[arm][m] - s.after["oracle"][m] for m in members)
                for s in seeds
            ]
            values.append(statistics.fmean(of_seed))
        places = [row + 0.26 * (at - 1) for row in range(len(arms))]
        axes.barh(places, values, height=0.24, color=adapter_color(at), label=label)
    axes.set_yticks(range(len(arms)), arms)
    axes.invert_yaxis()
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_xlabel("nats a token over the oracle (less is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    save_figure(figure, path / "over_oracle.png")


def _key(arm: str) -> str:
    """A metric's name: "statistics, m = 256" is statistics_m_256."""
    kept = "".join(letter if letter.isalnum() else " " for letter in arm)
    return "_".join(kept.split())


def _reads(arm: str) -> str:
    return READS.get(arm, "statistics of each adapter's own data")
