"""What `analyse` found, as numbers, tables, pictures and the page to read.

analysis.json  base, adapters, and for each text: token ids, pieces, the word of each token, words,
               forced losses (adapters in order, then the base alone), and for each router: ids (−1
               for none) and gates (layer, token, k), probabilities (layer, token, adapter; one
               layer where the decision is shared), entropy, agreement, main adapter of each token
               and word, loss. Nats; null where there is no number
tokens.csv     a line for each text, router, layer and token, with the gate and the probability of
               every adapter; loss, main and the words repeat in every layer
"""

import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from molora_jax.analysis import BASE_ONLY, Analysis, RouterTrace, TextAnalysis

DIGITS = 4


def metrics(found: Analysis) -> dict[str, float]:
    """Every number of result.json, over all texts; router by router, by its place: r0, r1."""
    numbers: dict[str, float] = {"tokens": sum(len(text.pieces) for text in found.texts)}
    for which in range(len(found.texts[0].routers)):
        traces, key = [text.routers[which] for text in found.texts], f"r{which}"
        numbers[f"{key}/loss"] = mean(np.concatenate([each.loss for each in traces]))
        main = np.concatenate([each.main for each in traces])
        for adapter, name in enumerate([*found.adapters, BASE_ONLY]):
            index = -1 if adapter == len(found.adapters) else adapter
            numbers[f"{key}/share/{name}"] = float((main == index).mean())
        by_layer = np.concatenate([each.by_layer for each in traces], axis=1)
        same = (by_layer[:, None] == by_layer[None, :]).mean(axis=-1)
        others = ~np.eye(len(same), dtype=bool)
        if others.any():
            numbers[f"{key}/layer_agreement"] = float(same[others].mean())
        entropy = [each.entropy for each in traces if each.entropy is not None]
        if entropy:
            numbers[f"{key}/entropy"] = mean(np.concatenate(entropy, axis=1))
    for row, name in enumerate([*found.adapters, BASE_ONLY]):
        forced = [text.forced[row] for text in found.texts if text.forced is not None]
        if forced:
            numbers[f"forced/{name}"] = mean(np.concatenate(forced))
    if len(found.texts[0].routers) == 2:
        numbers["differing"] = mean(
            np.concatenate([text.routers[0].main != text.routers[1].main for text in found.texts])
        )
    return numbers


def mean(values: np.ndarray) -> float:
    """Over the finite ones; NaN where there is none, as for the loss of a single token."""
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float("nan")


def write_tables(found: Analysis, base: str, path: pathlib.Path) -> None:
    """analysis.json and tokens.csv."""
    record = {
        "base": base,
        "adapters": list(found.adapters),
        "texts": [_text_record(text) for text in found.texts],
    }
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    (path / "analysis.json").write_text(text + "\n", encoding="utf-8")
    with (path / "tokens.csv").open("w", encoding="utf-8", newline="") as handle:
        csv.writer(handle).writerows(_lines(found))


def _text_record(text: TextAnalysis) -> dict[str, Any]:
    return {
        "token_ids": list(text.token_ids),
        "pieces": list(text.pieces),
        "word_of_token": text.words.tolist(),
        "words": list(text.word_texts),
        "forced_loss": numbers(text.forced),
        "routers": [_router_record(trace, text.words) for trace in text.routers],
    }


def _router_record(trace: RouterTrace, words: np.ndarray) -> dict[str, Any]:
    return {
        "name": trace.name,
        "decision": trace.decision,
        "top_k": trace.top_k,
        "adapter_ids": trace.adapter_ids.tolist(),
        "gates": numbers(trace.gates),
        "probabilities": numbers(trace.probabilities),
        "entropy": numbers(trace.entropy),
        "agreement": numbers(trace.agreement),
        "main": trace.main.tolist(),
        "main_of_word": trace.of_words(words).tolist(),
        "loss": numbers(trace.loss),
    }


def numbers(array: np.ndarray | None) -> Any:
    """Nested lists of rounded numbers, None where one is not finite."""
    if array is None:
        return None
    if array.ndim == 1:
        return [round(float(each), DIGITS) if np.isfinite(each) else None for each in array]
    return [numbers(row) for row in array]


def _lines(found: Analysis) -> Iterator[list[Any]]:
    names = found.adapters
    yield [
        "text", "router", "layer", "token", "id", "piece", "word", "main", "main_of_word", "loss",
        "entropy", "top", *(f"gate {name}" for name in names),
        *(f"softmax {name}" for name in names),
    ]  # fmt: skip
    for at, text in enumerate(found.texts):
        for trace in text.routers:
            main, words = trace.main, trace.of_words(text.words)
            tops, entropy, p = trace.by_layer, trace.entropy, trace.probabilities
            for layer, token in np.ndindex(tops.shape):
                gates = np.zeros(len(names))
                ids = trace.adapter_ids[layer, token]
                np.add.at(gates, ids[ids >= 0], trace.gates[layer, token][ids >= 0])
                word = text.words[token]
                dense = [""] * len(names) if p is None else _cells(p[min(layer, len(p) - 1), token])
                sure = None if entropy is None else entropy[min(layer, len(entropy) - 1), token]
                yield [
                    at, trace.name, layer, token, text.token_ids[token],
                    # In quotes as JSON has it, so that no spreadsheet takes "=1" for a formula.
                    json.dumps(text.pieces[token], ensure_ascii=False),
                    "" if word < 0 else json.dumps(text.word_texts[word], ensure_ascii=False),
                    named(main[token], names), "" if word < 0 else named(words[word], names),
                    *_cells([trace.loss[token], np.nan if sure is None else sure]),
                    named(tops[layer, token], names), *_cells(gates), *dense,
                ]  # fmt: skip


def _cells(values: Any) -> list[str]:
    return [f"{each:.{DIGITS}f}" if np.isfinite(each) else "" for each in values]


def named(adapter: Any, names: tuple[str, ...]) -> str:
    return BASE_ONLY if adapter < 0 else names[adapter]


def draw(found: Analysis, base: str, path: pathlib.Path) -> None:
    """The pictures of every text, and explorer.html."""
    from molora_jax import display
    from molora_jax.display import routing_figures

    for at, text in enumerate(found.texts):
        by_name = {trace.name: trace for trace in text.routers}
        figures = {
            "routing": routing_figures.choice_figure(
                {name: trace.by_layer for name, trace in by_name.items()},
                text.pieces,
                adapter_names=found.adapters,
            ),
            "agreement": routing_figures.agreement_figure(
                {name: trace.agreement for name, trace in by_name.items()}
            ),
        }
        entropy = {n: trace.entropy for n, trace in by_name.items() if trace.entropy is not None}
        if entropy:
            figures["entropy"] = routing_figures.entropy_figure(
                entropy, num_adapters=len(found.adapters)
            )
        difference = text.forced_difference()
        if difference is not None and len(text.pieces) > 1:
            figures["forced"] = routing_figures.forced_figure(
                difference,
                text.pieces,
                adapter_names=[*found.adapters, BASE_ONLY],
                title="Loss with every token at one adapter, less the routed loss"
                + (f" of {text.routers[0].name}" if len(text.routers) > 1 else ""),
            )
        for name, figure in figures.items():
            display.save_figure(figure, path / f"{name}{picture_suffix(found, at)}.png")
    page = display.explorer_page(found, note=f"Base {base}; adapters {', '.join(found.adapters)}")
    (path / "explorer.html").write_text(page, encoding="utf-8")


def picture_suffix(found: Analysis, text: int) -> str:
    return f"-{text}" if len(found.texts) > 1 else ""


def markdown(found: Analysis, config: Any, base: str) -> str:
    """report.md."""
    from experiments.run_folder import markdown as table
    from experiments.run_folder import show

    measured, routers = metrics(found), [trace.name for trace in found.texts[0].routers]
    kinds = [
        f"{trace.name}: {trace.decision.replace('_', ' ')}, k = {trace.top_k}"
        for trace in found.texts[0].routers
    ]
    rows = [
        [label, *(show(measured.get(f"r{which}/{key}")) for which in range(len(routers)))]
        for label, key in [
            ("loss, nats a token", "loss"),
            ("entropy of a token's softmax, nats", "entropy"),
            ("pairs of layers with the same adapter", "layer_agreement"),
            *((f"share of tokens to {name}", f"share/{name}") for name in found.adapters),
            ("share of tokens to the base alone", f"share/{BASE_ONLY}"),
        ]
    ]
    sections = [
        "# Routing, token by token",
        f"Base {base}, {measured['tokens']} tokens in {len(found.texts)} "
        f"text{'s' * (len(found.texts) > 1)}. {'; '.join(kinds)}. Open `explorer.html`: it shows "
        "the text by adapter, entropy, loss and forced loss, and the gates of every token.",
        table(["", *routers], rows),
        "A token's adapter is its main one: the argmax of its top-1 gates summed over the later "
        "half of the layers. A token's loss is that of predicting it from those before it.",
    ]
    if "differing" in measured:
        sections.append(f"{measured['differing']:.1%} of the tokens have another main adapter.")
    if config.forced:
        sections += [
            "## Forced adapters",
            "Loss where *every* token of a text goes to one adapter in every layer, and how many "
            "tokens are predicted better so than routed.",
            table(["every token at", "loss, nats", "less routed", "better"], _forced_rows(found)),
        ]
    pictures = ["routing", "agreement", *(["entropy"] if "r0/entropy" in measured else [])]
    if config.forced and len(found.texts[0].pieces) > 1:
        pictures.append("forced")
    sections.append(
        " ".join(f"![{name}]({name}{picture_suffix(found, 0)}.png)" for name in pictures)
    )
    return "\n\n".join(sections)


def _forced_rows(found: Analysis) -> list[list[str]]:
    rows = []
    forced = np.concatenate([np.asarray(text.forced) for text in found.texts], axis=1)
    differences = [np.asarray(text.forced_difference()) for text in found.texts]
    for row, name in enumerate([*found.adapters, BASE_ONLY]):
        losses, less = forced[row], np.concatenate([each[row] for each in differences])
        known = less[np.isfinite(less)]
        cells = [f"{mean(losses):.3f}", f"{known.mean():+.3f}", f"{(known < 0).mean():.0%}"]
        rows.append([name, *(cells if known.size else ["–"] * 3)])
    return rows
