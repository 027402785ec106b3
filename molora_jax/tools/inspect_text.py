"""What `inspect` found, as tables of facts."""

from collections.abc import Mapping
from typing import Any

from molora_jax.adapters.names import shortened
from molora_jax.display import Table
from molora_jax.tools.report import percent


def adapter_tables(found: Mapping[str, Any]) -> list[Table]:
    """Of `inspect_adapter`."""
    kind = f"{found['type']}{', rsLoRA' if found['use_rslora'] else ''}"
    kind += "".join(f", {name}={value!r}" for name, value in found["variants"].items())
    dtypes = ", ".join(f"{dtype} ({count})" for dtype, count in found["dtypes"].items())
    facts: list[tuple[str, Any]] = [
        ("type", kind),
        ("base", found["base"] or "not stated"),
        ("r, alpha", f"{found['r']}, {found['alpha']}"),
        *((key, _pattern(found[key])) for key in ("rank_pattern", "alpha_pattern") if found[key]),
        ("targets", _targets(found["target_modules"])),
        ("tensors", f"{found['tensors']}, {found['parameters']:,} numbers, {found['bytes']:,} "
                    f"bytes, {dtypes}"),
        ("non-finite", str(sum(found["nonfinite"].values()) or "none")),
        ("digest", f"sha256:{found['digest']}" if found["digest"] else "none (it does not load)"),
        ("file", f"sha256:{found['file_sha256']}"),
    ]  # fmt: skip
    if statistics := found["statistics"]:
        other = " (ANOTHER BASE)" if statistics["of_this_base"] is False else ""
        facts.append(
            (
                "statistics",
                f"{statistics['tokens']} tokens, {statistics['features']} features, base "
                f"sha256:{statistics['base'][:12]}{other}",
            )
        )
    if found["nonfinite"]:
        facts.append(("", shortened(f"{k} ({n})" for k, n in found["nonfinite"].items())))
    if against := found.get("against"):
        facts.append(("matched", f"{against['matched']} of {against['of']} with {against['base']}"))
        if against["unmatched"]:
            facts.append(("unmatched", shortened(against["unmatched"])))
    if found["other_tensors"]:
        facts.append(("not LoRA", shortened(f"{k} {v}" for k, v in found["other_tensors"].items())))
    facts += [("note", text) for text in found["notes"]]
    facts += [("WARNING", text) for text in found["warnings"]]
    parts = []
    if found["projections"]:
        numbers = ["in", "out", "rank", "scale", "|A|", "|B|", "|BA|"]
        if against and against["relative_updates"]:
            numbers.append("|BA| / |W|")
        rows = []
        for name, p in found["projections"].items():
            spans = (_numbers(p[key]) for key in ("in", "out", "ranks", "scales"))
            norms = (f"{p[key]:.4g}" for key in ("norm_a", "norm_b", "norm_update"))
            span = [_percents(*p["relative"])] if "relative" in p else []
            rows.append([name, p["modules"], *spans, *norms, *span])
        title = "norms over all layers, BA with its scale" + (
            "; beside the weight W of each layer" if "|BA| / |W|" in numbers else ""
        )
        parts = [Table(["projection", "modules", *numbers], rows, right=numbers, title=title)]
    parts.append(Table(["", ""], [["loads", _verdict(found["loads"], found["refusal"])]]))
    return [Table(["", ""], facts, title=f"adapter {found['name']!r}"), *parts]


def composition_tables(found: Mapping[str, Any]) -> list[Table]:
    """Of `inspect_composition`."""
    base, bank, router = found["base"], found["bank"], found["router"]
    rows = []
    for each in found["adapters"]:
        ranks = sorted({rank for p in each["projections"].values() for rank in p["ranks"]})
        rows.append([each["name"], each["slot"], _numbers(ranks), len(each["projections"]),
                     each["base"] or "-", str(each["digest"])[:12]])  # fmt: skip
    arrays = ", ".join(f"{k} {v['shape']}" for k, v in found["router_arrays"].items())
    facts = [
        ["base", f"{base['name'] or 'a path, not saved'} (sha256:{base['sha256'][:12]})"],
        ["bank", _settings(bank)],
        ["router", _settings(router)],
        ["arrays", arrays or "none"],
        ["columns", ", ".join(str(name) for name in found["columns"])],
        *(["metric", f"{key} {value}"] for key, value in found["metrics"].items()),
    ]
    ends = [["PROBLEM", text] for text in found["problems"]]
    head = ["adapter", "slot", "rank", "projections", "base", "digest"]
    return [
        Table(["", ""], facts, title="composition"),
        Table(head, rows, right=("rank",)),
        Table(["", ""], [*ends, ["loads", _verdict(found["loads"])]]),
    ]


def checkpoint_tables(found: Mapping[str, Any]) -> list[Table]:
    """Of `describe_checkpoint`."""
    facts = [[key, str(value)] for key, value in (found.get("about") or {}).items()]
    # What it was trained on, by digest; the first 12 digits tell files apart.
    facts += [[f"of {key}", str(v)[:12]] for key, v in (found.get("identity") or {}).items()]
    rows = [[key, dtype, str(tuple(shape))] for key, (shape, dtype) in found["arrays"].items()]
    return [
        Table(["", ""], facts, title=f"training checkpoint of step {found['step']}"),
        Table(["array", "dtype", "shape"], rows),
    ]


def _verdict(loads: bool, refusal: str | None = None) -> str:
    return "yes" if loads else f"NO: {refusal}" if refusal else "NO"


def _settings(values: Mapping[str, Any]) -> str:
    """What is set, in words; a list by its members."""
    return ", ".join(
        f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in values.items()
        if value is not None
    )


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, dict):
        return repr(pattern)
    return shortened((f"{key}: {value}" for key, value in pattern.items()), limit=4)


def _targets(targets: Any) -> str:
    return shortened(targets, limit=8) if isinstance(targets, list) else repr(targets)


def _numbers(values: list) -> str:
    ends = dict.fromkeys((values[0], values[-1])) if values else {}
    return "..".join(f"{value:.6g}" for value in ends)


def _percents(least: float, most: float) -> str:
    return f"{percent(least).removesuffix('%')} to {percent(most)}"
