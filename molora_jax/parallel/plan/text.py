"""Plans as text and as plain numbers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from molora_jax.display import Table
from molora_jax.parallel.plan.choose import Choice, Plan, shown
from molora_jax.parallel.plan.traffic import Exchange, by_kind

GIB = 2**30


def summary(named: Iterable[tuple[str, Choice]]) -> Table:
    """A row for each choice: the mesh, its memory, its time, what it waits for."""
    head = ["model", "step", "devices", "mesh", "GiB", "K fits", "ms", "tokens/s", "GB sent"]
    rows: list[list[str]] = []
    for name, choice in named:
        best = choice.best
        rows.append(
            [
                name,
                best.work.kind,
                f"{best.devices:,}",
                shown(best.sizes),
                f"{best.memory.peak / GIB:.1f}",
                f"{best.slots_that_fit:,}",
                f"{1e3 * best.seconds:.2f}" if best.fits else "-",
                f"{best.tokens_per_s:,.0f}" if best.fits else "-",
                f"{sum(each.wire for each in best.exchanges) / 1e9:.3g}",
                limit(choice),
            ]
        )
    return Table([*head, "limit"], rows, right={*head} - {"model", "step", "mesh"})


def limit(choice: Choice) -> str:
    """What takes most of the step, with its share of it; HBM capacity where nothing fits."""
    best = choice.best
    if not best.fits:
        return f"HBM capacity: {best.memory.peak / best.cluster.budget_bytes:.2f} times the budget"
    name, seconds = next(iter(best.limits.items()))
    text = f"{name} {seconds / best.seconds:.0%}"
    return f"{text}, then HBM capacity" if choice.faster_without_limit else text


def details(name: str, choice: Choice, *, runners_up: int = 4) -> list[str | Table]:
    """All of the chosen plan, and the meshes that come after it: texts and tables, in order."""
    best = choice.best
    work, cluster = best.work, best.cluster
    parts: list[str | Table] = [
        f"{name}, {work.kind} on {best.devices} × {cluster.device.name}: batch {work.batch}, "
        f"length {work.length}, K {work.num_adapters}, R {work.rank}, top-k {work.top_k}",
        f"mesh {shown(best.sizes)}: {1e3 * best.seconds:.3f} ms a step, "
        f"{best.tokens_per_s:,.0f} tokens/s; {1e3 * best.overlapped_seconds:.3f} ms if gathers and "
        "gradients were sent behind the products",
        f"limit: {limit(choice)}",
        "",
        _memory(best),
        "* within a step; layers and logits are not there together",
        "",
        _parts(best),
    ]
    if best.exchanges:
        parts += ["", _exchanges(best.exchanges)]
    parts += ["", "waits for " + ", ".join(f"{k} {1e3 * v:.3f} ms" for k, v in best.limits.items())]
    others = choice.plans[1 : 1 + runners_up]
    if (faster := choice.faster_without_limit) is not None and faster not in others:
        others = [*others, faster]
    if others:
        rows = [
            [shown(e.sizes), f"{1e3 * e.seconds:.3f}", f"{e.memory.peak / GIB:.1f}", _yes(e.fits)]
            for e in others
        ]
        parts += ["", Table(["runners-up", "ms", "GiB", "fits"], rows, right=("ms", "GiB"))]
    return parts


def _memory(best: Plan) -> Table:
    budget = best.cluster.budget_bytes
    rows = [[name, f"{size / GIB:.3f}"] for name, size in best.memory.held.items()]
    rows += [[f"{name} *", f"{size / GIB:.3f}"] for name, size in best.memory.passing.items()]
    rows += [
        ["most at once", f"{best.memory.peak / GIB:.3f}"],
        ["there is", f"{budget / GIB:.3f}"],
        ["adapters that fit", f"{best.slots_that_fit:,}"],
    ]
    return Table(["memory of a device", "GiB"], rows, right=("GiB",))


def _parts(best: Plan) -> Table:
    numbers = ["TFLOP", "GB", "launches", "ms"]
    rows = [
        [
            each.name,
            f"{each.products / 1e12:.3f}",
            f"{each.bytes / 1e9:.3f}",
            f"{each.launches:,.0f}",
            f"{1e3 * each.seconds:.3f}",
            each.limit,
        ]
        for each in best.parts
    ]
    return Table(["computed by a device", *numbers, "waits for"], rows, right=numbers)


def _exchanges(found: list[Exchange]) -> Table:
    numbers = ["times", "MB each", "GB sent", "ms"]
    rows: list[list[str]] = []
    for (kind, axes), group in by_kind(found).items():
        seconds = sum(each.seconds for each in group)
        times = sum(each.times for each in group)
        each_mb = sum(each.size * each.times for each in group) / times / 1e6
        sent = sum(each.wire for each in group) / 1e9
        rows.append(
            [kind, " × ".join(axes), f"{times:,}", f"{each_mb:.3f}", f"{sent:.3f}",
             f"{1e3 * seconds:.3f}", max(group, key=lambda each: each.seconds).limit]
        )  # fmt: skip
        rows += [
            [f"  {e.what}", "", f"{e.times:,}", f"{e.size / 1e6:.3f}", f"{e.wire / 1e9:.3f}",
             f"{1e3 * e.seconds:.3f}", e.limit]
            for e in group
        ]  # fmt: skip
    return Table(["exchanged", "over", *numbers, "waits for"], rows, right=numbers)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def as_json(name: str, choice: Choice) -> dict[str, Any]:
    """Plain numbers; bytes, seconds."""
    return {
        "model": name,
        "devices": choice.best.devices,
        "work": dataclasses.asdict(choice.best.work),
        "limit": limit(choice),
        "best": _plan(choice.best),
        "others": [_short(each) for each in choice.plans[1:]],
    }


def _short(each: Plan) -> dict[str, Any]:
    return {
        "mesh": each.sizes,
        "seconds": each.seconds,
        "peak_bytes": each.memory.peak,
        "fits": each.fits,
    }


def _plan(each: Plan) -> dict[str, Any]:
    exchanged = [
        {name: value for name, value in vars(exchange).items() if name != "network"}
        | {"limit": exchange.limit}
        for exchange in each.exchanges
    ]
    return _short(each) | {
        "overlapped_seconds": each.overlapped_seconds,
        "tokens_per_s": each.tokens_per_s,
        "held_bytes": each.memory.held,
        "passing_bytes": each.memory.passing,
        "budget_bytes": each.cluster.budget_bytes,
        "adapters_that_fit": each.slots_that_fit,
        "parts": [dataclasses.asdict(part) for part in each.parts],
        "exchanges": exchanged,
        "limits": each.limits,
    }
