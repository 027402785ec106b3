"""What `content_types` measured, as numbers, claims, tables and pictures.

Letters beyond the table of design.md: G content types, W rows.
"""

import functools
import itertools
import pathlib
from typing import Any

import numpy as np

from experiments.compose_report import table
from experiments.content_types import Config, Measured
from experiments.results import Claim
from experiments.seeds import counted, over_seeds, shown

WITHIN = (4, 8, 16)
LAST = 5  # steps whose mean is a curve's end
PAPER_SHARES = {"code": 0.986, "math": 0.966, "creative": 0.988, "technical": 0.992}


class Routes:
    """The adapter of each token, document and span of one evaluation; k = top_k.

    tokens (W, S) main adapter;  votes  of each document, by most of its tokens;  spans  (adapter,
    type) of each span of the mixed rows, likewise.
    """

    def __init__(self, evaluation: Any, labels: np.ndarray, documents: int, num_types: int):
        from molora_jax.routing.metrics import main_adapter

        routing, self.labels, self.documents = evaluation.routing, labels, documents
        L, W, S, k = routing.adapter_ids.shape
        N = W * S
        self.flat = routing.adapter_ids.reshape(L, N, k), routing.gates.reshape(L, N, k)
        self.logits = routing.logits
        self.tokens = main_adapter(*self.flat).reshape(W, S)
        known = labels >= 0
        vote = functools.partial(majority, num_types=num_types)
        self.types = labels[:documents].max(axis=1)
        self.votes = np.array(
            [vote(self.tokens[row, known[row]]) for row in range(documents)], np.int64
        )
        spans = []
        for row in range(documents, W):
            here = labels[row, known[row]]
            starts = [0, *(1 + np.flatnonzero(np.diff(here))), len(here)]
            for start, end in itertools.pairwise(starts):
                spans.append((vote(self.tokens[row, start:end]), here[start]))
        self.spans = np.array(spans, np.int64).reshape(-1, 2)

    @property
    def of_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(adapters, types) of the tokens of documents, padding as type −1."""
        return self.tokens[: self.documents], self.labels[: self.documents]

    @property
    def of_mixed(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[self.documents :], self.labels[self.documents :]


def majority(adapters: np.ndarray, *, num_types: int) -> int:
    """The adapter with most tokens, the lowest in a tie; −1 where none went to any."""
    counts = np.bincount(adapters[adapters >= 0], minlength=num_types)
    return int(counts.argmax()) if counts.any() else -1


def routes_of(measured: Measured, *, free: bool = False) -> Routes:
    G = len(measured.names)
    if not free:
        return Routes(measured.routed, measured.labels, measured.documents, G)
    documents = int((measured.compared < measured.documents).sum())
    return Routes(measured.free, measured.labels[measured.compared], documents, G)


def of_seed(measured: Measured) -> dict[str, float]:
    """Every number of one seed but the lags, which are pooled."""
    from molora_jax.routing import metrics as routing

    G, names = len(measured.names), measured.names
    routes = routes_of(measured)
    found = {}
    shares = routing.token_shares(*routes.of_documents, G, G)
    votes = routing.token_shares(routes.votes, routes.types, G, G)
    for kind, matrix in (("tokens", shares), ("documents", votes)):
        for g, own in enumerate(names):
            found |= {f"{kind}/{own}/to_{to}": matrix[g, k] for k, to in enumerate(names)}
        found[f"{kind}/own"] = float(np.diag(matrix).mean())
    found |= {f"tokens/{k}": v for k, v in routing.agreement(*routes.of_documents).items()}
    found |= {f"documents/{k}": v for k, v in routing.agreement(routes.votes, routes.types).items()}
    adapters, labels = routes.of_mixed
    known = labels >= 0
    found["mixed/tokens/own"] = float((adapters == labels)[known].mean())
    found["mixed/spans/own"] = float((routes.spans[:, 0] == routes.spans[:, 1]).mean())
    found |= {f"mixed/tokens/{k}": v for k, v in routing.agreement(adapters, labels).items()}
    entropy = routing.entropies(
        routes.logits[:, : measured.documents].reshape(len(routes.logits), -1, G),
        measured.labels[: measured.documents] >= 0,
    )
    found |= {f"entropy/{kind}": float(values.mean()) for kind, values in entropy.items()}
    if measured.free is not None:
        untold = routes_of(measured, free=True)
        found |= {f"no_label/tokens/{k}": v
                  for k, v in routing.agreement(*untold.of_documents).items()}  # fmt: skip
        found["no_label/documents/ari"] = routing.agreement(untold.votes, untold.types)["ari"]
        most = routing.usage(*untold.flat, untold.labels >= 0, num_slots=G).max(axis=1)
        found["no_label/largest_share"] = float(most.mean())
    return found | losses(measured)


def losses(measured: Measured) -> dict[str, float]:
    """Held-out loss of every arm by type on the same rows, and where training ended."""
    labels = measured.labels[measured.compared]
    of_mixed = measured.compared >= measured.documents
    arms = {label: (each.token_nll, each.weights) for label, each in measured.arms.items()}
    routed = measured.routed
    arms["routed"] = (routed.token_nll[measured.compared], routed.weights[measured.compared])
    if measured.free is not None:
        arms["routed_no_label"] = (measured.free.token_nll, measured.free.weights)
    found = {}
    for arm, (nll, weights) in arms.items():
        key = f"val_loss/{arm.replace(' ', '_')}"
        by_type = []
        for g, name in enumerate(measured.names):
            chosen = weights * ((labels == g) & ~of_mixed[:, None])
            by_type.append(float((nll * chosen).sum() / chosen.sum()))
            found[f"{key}/{name}"] = by_type[-1]
        found[f"{key}/mean"] = float(np.mean(by_type))
        chosen = weights * of_mixed[:, None]
        found[f"{key}/mixed"] = float((nll * chosen).sum() / chosen.sum())
    for name, records in measured.curves.items():
        key = "language_loss" if name.startswith("router") else "loss"
        if records:
            ends = [record[key] for record in records[-LAST:]]
            found[f"train_loss/{name.replace(' ', '_')}"] = float(np.mean(ends))
    return found


def metrics(seeds: list[Measured], experiment: str) -> dict[str, float]:
    """Mean and spread over seeds; lags over the changes of all seeds together."""
    from molora_jax.routing.metrics import follow_lag

    found = over_seeds([of_seed(each) for each in seeds])
    singles = [f"val_loss/{name}_only" for name in seeds[0].names]
    best = min(singles, key=lambda key: found[f"{key}/mean"])
    for group in ("mean", "mixed"):
        found[f"val_loss/best_single/{group}"] = found[f"{best}/{group}"]
    mixed = [routes_of(each).of_mixed for each in seeds]
    lag = follow_lag(*(np.concatenate(parts) for parts in zip(*mixed, strict=True)), within=WITHIN)
    found |= {"mixed/lag/median": lag["median"], "mixed/lag/changes": lag["changes"]}
    found |= {f"mixed/lag/within_{w}": share for w, share in lag["within"].items()}
    return {f"{experiment}/{name}": value for name, value in found.items()}


def claims(numbers: dict[str, float], experiment: str) -> list[Claim]:
    """The paper's numbers beside ours, on held-out text."""
    label = "the router's training read which adapter's own data a token came from"
    if experiment == "table15":
        return [
            Claim(
                id=f"table15.ari_{kind}", kind="share", paper=1.0,
                ours=numbers[f"table15/{kind}/ari"], direction="higher",
                holds=numbers[f"table15/{kind}/ari"] >= 1.0, note=f"by {kind}; {label}",
            )
            for kind in ("tokens", "documents")
        ]  # fmt: skip
    found = []
    for kind in ("tokens", "documents"):
        for name, paper in PAPER_SHARES.items():
            ours = numbers[f"table17/{kind}/{name}/to_{name}"]
            found.append(
                Claim(
                    id=f"table17.{name}_{kind}", kind="share", paper=paper, ours=ours,
                    direction="higher", holds=ours >= paper,
                    note=f"by {kind}; another base and other texts than the paper's; {label}",
                )
            )  # fmt: skip
    return found


def markdown(
    seeds: list[Measured], numbers: dict[str, float], config: Config, types: Any, experiment: str
) -> str:
    """report.md, less the claims."""
    names = seeds[0].names

    def say(name: str, digits: int = 3) -> str:
        return shown(numbers, f"{experiment}/{name}", digits=digits)

    def matrix(kind: str) -> str:
        rows = [[own, *(say(f"{kind}/{own}/to_{to}") for to in names)] for own in names]
        return table([f"{kind} of", *(f"to {name}" for name in names)], rows)

    arms = ["base", *(f"{name}_only" for name in names), "uniform", "oracle", "routed"]
    arms += ["routed_no_label"] if seeds[0].free is not None else []
    groups = [*names, "mean", "mixed"]
    loss = [[arm.replace("_", " "), *(say(f"val_loss/{arm}/{g}") for g in groups)] for arm in arms]
    ends = [key for key in numbers if "/train_loss/" in key and not key.endswith("/spread")]
    trained = ", ".join(f"{key.rpartition('/')[2]} {shown(numbers, key)}" for key in ends)
    within = ", ".join(f"{numbers[f'{experiment}/mixed/lag/within_{w}']:.0%} within {w}"
                       for w in WITHIN)  # fmt: skip
    lag = numbers[f"{experiment}/mixed/lag/median"]
    sections = [
        f"# {len(names)} content types, {len(names)} adapters trained apart, one router",
        f"Base {config.base}, frozen; rank {config.rank}, {config.adapter_steps} steps for each "
        f"adapter on its own type alone. {seeds[0].label_use}. Mean ± standard deviation of "
        f"{counted(len(seeds))} (data split, adapters, router, mixed rows). All numbers are of "
        "held-out documents unless they say train.",
        "## Who gets a token, and a document",
        "A token's adapter is the argmax of its top-1 gates summed over the later half of the "
        f"layers; a document's is that of most of its tokens (at most {config.eval_len}).",
        matrix("tokens"),
        matrix("documents"),
        f"By token: own {say('tokens/own')}, ARI {say('tokens/ari')}, NMI {say('tokens/nmi')}. By "
        f"document: own {say('documents/own')}, ARI {say('documents/ari')}, NMI "
        f"{say('documents/nmi')}. Entropy of a token's softmax {say('entropy/token')} nats, of the "
        f"average use {say('entropy/usage')} (ln {len(names)} = {np.log(len(names)):.3f}).",
        "Confusions: " + confusions(numbers, names, experiment),
        "## Rows that mix types",
        f"Rows of {config.mixed_spans} spans of {config.eval_len // config.mixed_spans} tokens: "
        f"{say('mixed/tokens/own')} of the tokens and {say('mixed/spans/own')} of the spans, by "
        f"majority, at their own type's adapter; ARI by token {say('mixed/tokens/ari')}. Tokens "
        f"after a change until the routing follows: {tokens_said(lag)} (median of "
        f"{numbers[f'{experiment}/mixed/lag/changes']:g} changes; {within}).",
        "## Held-out loss, nats a token",
        f"On at most {config.loss_docs} documents a type and mixed rows, the same for every arm.",
        table(["arm", *groups], loss),
        f"Train loss at the end (mean of the last {LAST} steps, on training text): {trained}.",
        "![shares](shares.png) ![layers](layers.png) ![entropy](entropy.png) ![loss](loss.png)",
        "`sample.html` colours each token of a mixed row by its adapter.",
        "## Data",
        "\n".join(
            f"- {d.name}: {d.source}; {d.licence}; {len(d.train_docs)} documents to train on, "
            f"{len(d.heldout_docs)} held out"
            for d in types
        ),
    ]
    if seeds[0].free is not None:
        sections.insert(
            -4,
            f"A router that was never told a label (random start, {config.free_steps} steps of "
            f"language-model loss), on those few rows: ARI by token {say('no_label/tokens/ari')}, "
            f"by document {say('no_label/documents/ari')}; the largest adapter of a layer takes "
            f"{say('no_label/largest_share')} of its tokens.",
        )
    return "\n\n".join(sections)


def tokens_said(lag: float) -> str:
    return f"{lag:g}" if np.isfinite(lag) else "never" if lag == np.inf else "not judged"


def confusions(numbers: dict[str, float], names: list[str], experiment: str) -> str:
    """Which type's tokens go where, the largest first; of those above half a percent."""
    found = {
        f"{own} to {to}": numbers[f"{experiment}/tokens/{own}/to_{to}"]
        for own in names
        for to in names
        if own != to
    }
    ordered = sorted(found.items(), key=lambda item: -item[1])
    said = [f"{name} {share:.1%}" for name, share in ordered if share > 0.005]
    return (", ".join(said) or "none above 0.5 %") + " of the type's tokens."


def draw(seeds: list[Measured], base: Any, path: pathlib.Path) -> None:
    """Shares over all seeds; layers, entropy, curves and a mixed sample of the first."""
    from molora_jax import display
    from molora_jax.display.routing_figures import entropy_figure
    from molora_jax.routing import metrics as routing

    first, names = seeds[0], seeds[0].names
    G, routes = len(names), [routes_of(each) for each in seeds]
    pooled = [each.of_documents for each in routes]
    to = np.concatenate([adapters.ravel() for adapters, _ in pooled])
    own = np.concatenate([types.ravel() for _, types in pooled])
    L, S = len(first.routed.routing.adapter_ids), first.labels.shape[1]
    flat, end = routes[0].flat, first.documents * S
    by_layer = routing.layer_shares(
        flat[0][:, :end], flat[1][:, :end], first.labels.ravel()[:end],
        num_domains=G, num_slots=G,
    )  # fmt: skip
    assert by_layer.shape == (L, G, G)
    entropy = {"trained with labels": token_entropy(routes[0])}
    if first.free is not None:
        entropy["without labels"] = token_entropy(routes_of(first, free=True))
    row = first.documents  # the first mixed one
    known = first.labels[row] >= 0
    ids = first.tokens[row][known].tolist()
    pieces = base.tokenizer.pieces(ids)
    here = slice(row * S, row * S + len(ids))
    gates = routing.mean_gates(flat[0][:, here], flat[1][:, here], num_slots=G)
    pictures = {
        "shares": display.share_figure(
            routing.token_shares(to, own, G, G), domain_names=names, adapter_names=names,
            title="Share of each type's tokens by adapter",
        ),
        "layers": display.layer_share_figure(
            by_layer, domain_names=names, adapter_names=names,
            title="Share of each type's tokens by adapter and layer",
        ),
        "entropy": entropy_figure(entropy, num_adapters=G),
        "loss": display.curve_figure(
            {
                name: (
                    [record["step"] for record in curve],
                    [record.get("language_loss", record["loss"]) for record in curve],
                )
                for name, curve in first.curves.items()
                if curve
            },
            title="Training loss, first seed",
            smooth=5,
        ),
    }  # fmt: skip
    beside_the_lines(pictures["loss"].axes[0])
    roomy(pictures["entropy"].axes[0])
    for name, figure in pictures.items():
        display.save_figure(figure, path / f"{name}.png")
    page = display.html_page(
        pieces, routes[0].tokens[row][known], adapter_names=names, gates=gates, token_ids=ids,
        title="A held-out row that changes type",
    )  # fmt: skip
    (path / "sample.html").write_text(page, encoding="utf-8")


def beside_the_lines(axes: Any) -> None:
    """Moves the legend of up to six curves out of their way."""
    axes.figure.set_size_inches(8.6, 3.8)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def roomy(axes: Any) -> None:
    """Puts the name of the dotted line above it, and the legend below the axes."""
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
    for text in axes.texts:
        text.set(va="bottom")
        text.xyann = (0, 2)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.18))


def token_entropy(routes: Routes) -> np.ndarray:
    """(L, N) nats of the softmax of each real token."""
    logits = np.asarray(routes.logits, np.float64)[:, routes.labels >= 0]
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)
