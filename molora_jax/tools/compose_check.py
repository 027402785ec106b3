"""What tells whether a composition will route: how large adapters are, who gets the tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from molora_jax.adapters import Adapter, Composition
from molora_jax.display import Table, show, warn
from molora_jax.models import BaseModel
from molora_jax.routing.metrics import layer_shares
from molora_jax.tools.arguments import Misuse, hint
from molora_jax.tools.report import relative_updates
from molora_jax.training import evaluate, read_windows
from molora_jax.training.data import Batch, concatenate

# Of the median module's |scale·B·A| / |W|. Random adapters of 20 % keep more than nine tenths of
# their own tokens on the 30 layers of smollm2-135m, and of 50 % no more than by chance. Trained
# ones go in one direction, and may lose theirs from 20 % on: on tiny-random a last layer had none.
LARGE = 0.2
# Own shares that are no better than chance by more than this are called that.
MARGIN = 0.1
SEQ_LEN, MOST_ROWS = 128, 32


def sizes(base: BaseModel, adapters: Sequence[Adapter]) -> dict[str, tuple[float, float]]:
    """{adapter: (median, largest)} of |scale·B·A| / |W| over its modules."""
    norms: dict[str, float] = {}
    found = {}
    for each in adapters:
        found[each.name] = _size(relative_updates(each, base.decoder, norms=norms))
    return found


def _size(relative: Mapping[str, Mapping[int, float]]) -> tuple[float, float]:
    values = [value for layers in relative.values() for value in layers.values()]
    return float(np.median(values)), max(values)


def size_warning(relative: Mapping[str, Mapping[int, float]]) -> str:
    """What `warn_of_size` would say of an adapter, in short; "" for one of the usual size."""
    median, _ = _size(relative)
    if median <= LARGE:
        return ""
    return (
        f"it changes its layers by {median:.0%} of their weights (a few percent is usual): a "
        "router from statistics may choose at chance behind them (`molora compose --check` "
        "measures it)"
    )


def warn_of_size(found: Mapping[str, tuple[float, float]]) -> None:
    """Of adapters that lead the hidden states away from those that the statistics are of."""
    for name, (median, _) in found.items():
        if median > LARGE:
            warn(
                f"adapter {name!r} changes its layers by {median:.0%} of their weights (a few "
                "percent is usual): behind them the router may choose at chance, since its "
                "statistics are of the base's hidden states. --check measures it; `molora run "
                "--experiment=train_router` trains a router on the routed states"
            )


def read_checks(items: Sequence[str], names: Sequence[str], base: BaseModel) -> dict[str, Batch]:
    """{adapter: windows} of --check NAME=FILE ...; Misuse for what is no adapter of these."""
    found = {}
    for item in items:
        name, equals, file = item.partition("=")
        if not equals or not name or not file:
            raise Misuse(f"--check {item}: expected NAME=FILE")
        if name not in names:
            raise Misuse(
                f"--check: no adapter is called {name!r}{hint(name, names)} (they are "
                f"{', '.join(names)})"
            )
        if name in found:
            raise Misuse(f"--check names {name!r} twice: give one file for each adapter")
        if not Path(file).is_file():
            raise Misuse(f"--check: no file {file}")
        length = min(SEQ_LEN, base.config.max_positions)
        windows, _ = read_windows(file, base.tokenizer, seq_len=length)
        kept = np.unique(np.linspace(0, windows.num_rows - 1, MOST_ROWS).round().astype(int))
        found[name] = windows.rows(kept)
    return found


def show_own_shares(base: BaseModel, composition: Composition, texts: Mapping[str, Batch]) -> None:
    """Prints which share of each text's tokens goes to its own adapter, and warns at chance.

    By layer it is the adapter with the largest gate, and over layers the main adapter.
    """
    names, bank = list(texts), composition.bank
    batch = concatenate([each.labelled(label) for label, each in enumerate(texts.values())])
    found = evaluate(base.decoder, batch, **composition.routed, return_routing=True)
    assert found.routing is not None
    own = [bank.slot_of(name) for name in names]
    domains, count = np.ravel(batch.labels), {"num_domains": len(names)}
    ids, gates = (
        each.reshape(len(each), -1, each.shape[-1])
        for each in (found.routing.adapter_ids, found.routing.gates)
    )
    layers = layer_shares(ids, gates, domains, **count, num_slots=bank.num_slots)
    layers = layers[:, range(len(names)), own]
    main = found.shares(batch.labels, **count, num_slots=bank.num_slots)[range(len(names)), own]
    middle, last = len(layers) // 2, len(layers) - 1
    at = {f"layer {layer}": layers[layer] for layer in dict.fromkeys((0, middle, last))}
    at |= {"all layers": layers.mean(axis=0), "main adapter": main}
    chance = 1 / len(composition.column_names)
    rows = []
    for label, name in enumerate(names):
        shares = (f"{values[label]:.0%}" for values in at.values())
        rows.append([name, int((domains == label).sum()), *shares])
    title = (
        f"Share of the tokens of each text that go to its adapter (by chance {chance:.0%}; more of "
        "texts that it was trained on)"
    )
    show(Table(["texts of", "tokens", *at], rows, right=list(at), title=title))
    for label, name in enumerate(names):
        _warn_of_chance(name, {what: float(of[label]) for what, of in at.items()}, chance)


def _warn_of_chance(name: str, shares: Mapping[str, float], chance: float) -> None:
    if shares["main adapter"] < chance - MARGIN:
        warn(
            f"adapter {name!r} has fewer of the tokens of its texts than by chance: others are "
            f"taken to be nearer. Is the file at --check {name}= of its kind, and were its "
            "statistics gathered over its own texts?"
        )
        return
    # The first layer reads bare embeddings, and all words that two kinds of text share.
    low = [at for at, share in shares.items() if at != "layer 0" and share < chance + MARGIN]
    if low:
        warn(
            f"adapter {name!r} has about as many of its own tokens as by chance, in "
            f"{', '.join(low)}: gather statistics over more of its text, leave out an adapter of "
            "the same kind of text, or train a router (`molora run --experiment=train_router`)"
        )
