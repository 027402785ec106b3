"""What `compose` measured, as numbers, claims, tables and pictures.

Letters beyond the table of design.md: G domains, W windows.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from experiments.results import Claim

FOLLOW_WITHIN = (8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Held-out evaluations of every arm over the same windows.

    names        G domains; adapter g was trained on domain g alone
    heldout      windows of each domain, then the joined ones (labelled)
    arms         {label: Evaluation}; those that begin with "MoLoRA" hold routing and router logits
    router_reads where the router's training used the own-data label, in words
    """

    names: list[str]
    heldout: list[Any]
    arms: dict[str, Any]
    top_k: int
    router_reads: str

    @functools.cached_property
    def groups(self) -> list[slice]:
        """Rows of each domain, then of the joined windows."""
        ends = np.cumsum([windows.num_rows for windows in self.heldout])
        return [slice(end - w.num_rows, end) for end, w in zip(ends, self.heldout, strict=True)]

    @property
    def routed(self) -> Any:
        return self.arms[f"MoLoRA k={self.top_k}"]

    def loss(self, arm: str, group: int) -> float:
        """Mean loss of an arm on domain `group`, or on the joined windows with group G."""
        evaluation, rows = self.arms[arm], self.groups[group]
        chosen = np.zeros(evaluation.weights.shape, bool)
        chosen[rows] = True
        return evaluation.mean(chosen)

    def mean_loss(self, arm: str) -> float:
        """Mean over domains, each domain counting the same."""
        return float(np.mean([self.loss(arm, g) for g in range(len(self.names))]))

    def joined_loss(self, arm: str) -> float:
        return self.loss(arm, len(self.names))

    def best_per_sequence(self) -> float:
        """Joined windows, with the one adapter (or none) that is best for each row in hindsight."""
        rows = self.groups[-1]
        arms = ["base", *(f"{name} only" for name in self.names)]
        weights = self.arms["base"].weights[rows]
        sums = [(self.arms[arm].token_nll[rows] * weights).sum(axis=1) for arm in arms]
        return float(np.min(sums, axis=0).sum() / weights.sum())

    @functools.cached_property
    def routing(self) -> "RoutingNumbers":
        return RoutingNumbers.of(self)


@dataclasses.dataclass(frozen=True)
class RoutingNumbers:
    """Where the tokens went at k = top_k; a token's adapter is its main adapter.

    shares        (G, G) share of each domain's tokens to each adapter, on its own windows
    layer_shares  (L, G, G) the same by layer, of the top-1 adapter there
    joined_own    share of the tokens of joined windows that went to their own domain's adapter
    entropy       token: mean entropy of a token's softmax, usage: of the average; nats, by layer
    agreement     {"ari", "nmi"} of main adapters and domains
    lag           of `follow_lag` on the joined windows
    """

    shares: np.ndarray
    layer_shares: np.ndarray
    joined_own: float
    entropy: dict[str, np.ndarray]
    agreement: dict[str, float]
    lag: dict[str, Any]

    @classmethod
    def of(cls, measured: Measured) -> "RoutingNumbers":
        from molora_jax.routing import metrics

        routed, joined = measured.routed, measured.groups[-1]
        G = len(measured.names)
        own = slice(0, joined.start)
        labels = np.concatenate([windows.labels for windows in measured.heldout])
        L, W, S, k = routed.routing.adapter_ids.shape
        leaves = (routed.routing.adapter_ids, routed.routing.gates)
        flat = [leaf.reshape(L, W * S, k) for leaf in leaves]
        adapters = metrics.main_adapter(*flat).reshape(W, S)
        of_own = [leaf[:, own].reshape(L, -1, k) for leaf in leaves]
        logits = routed.routing.logits[:, own].reshape(len(routed.routing.logits), -1, G)
        return cls(
            shares=metrics.token_shares(adapters[own], labels[own], G, G),
            layer_shares=metrics.layer_shares(
                of_own[0], of_own[1], labels[own].ravel(), num_domains=G, num_slots=G
            ),
            joined_own=float((adapters[joined] == labels[joined]).mean()),
            entropy=metrics.entropies(logits, labels[own] >= 0),
            agreement=metrics.agreement(adapters[own], labels[own]),
            lag=metrics.follow_lag(adapters[joined], labels[joined], within=FOLLOW_WITHIN),
        )

    @property
    def own_share(self) -> float:
        """Share of a domain's tokens to its own adapter, averaged over domains."""
        return float(np.diag(self.shares).mean())


def metrics(measured: Measured) -> dict[str, float]:
    """Every number of result.json."""
    numbers = {}
    for arm in measured.arms:
        key = arm.replace(" ", "_").replace("=", "").replace(",", "")
        numbers |= {
            f"loss.{key}.{name}": measured.loss(arm, at) for at, name in enumerate(measured.names)
        }
        numbers[f"loss.{key}.mean"] = measured.mean_loss(arm)
        numbers[f"loss.{key}.joined"] = measured.joined_loss(arm)
    routed, routing = f"MoLoRA k={measured.top_k}", measured.routing
    numbers |= {
        "loss.best_per_sequence.joined": measured.best_per_sequence(),
        "gap.oracle.mean": measured.mean_loss(routed) - measured.mean_loss("oracle"),
        "gap.uniform.mean": measured.mean_loss(routed) - measured.mean_loss("uniform"),
        "gap.oracle.joined": measured.joined_loss(routed) - measured.joined_loss("oracle"),
        "gap.best_per_sequence.joined": measured.joined_loss(routed) - measured.best_per_sequence(),
        "share.own": routing.own_share,
        "share.own.joined": routing.joined_own,
        "entropy.token": float(routing.entropy["token"].mean()),
        "entropy.usage": float(routing.entropy["usage"].mean()),
        "follow.median_tokens": routing.lag["median"],
        "tokens.domain": int((measured.routed.weights[: measured.groups[-1].start] > 0).sum()),
        "tokens.joined": int((measured.routed.weights[measured.groups[-1]] > 0).sum()),
        **routing.agreement,
    }
    numbers |= {f"share.own.{n}": routing.shares[g, g] for g, n in enumerate(measured.names)}
    numbers |= {f"follow.within_{w}": share for w, share in routing.lag["within"].items()}
    return numbers


def claims(measured: Measured) -> list[Claim]:
    """The paper's claims that this run can judge, on held-out text throughout."""
    routed, routing = f"MoLoRA k={measured.top_k}", measured.routing
    singles = [f"{name} only" for name in measured.names]
    best = min(singles, key=measured.mean_loss)
    over_single = measured.mean_loss(routed) - measured.mean_loss(best)
    over_sequence = measured.joined_loss(routed) - measured.best_per_sequence()
    possible = measured.mean_loss(best) - measured.mean_loss("oracle")
    of_gain = -over_single / possible if possible > 0 else None
    note = f"other domains and base than the paper's; {measured.router_reads}"
    return [
        Claim(
            id="table17.own_share", kind="share", paper=0.983, ours=routing.own_share,
            direction="higher", holds=routing.own_share >= 0.983, note=note,
        ),
        Claim(
            id="table15.ari", kind="share", paper=1.0, ours=routing.agreement["ari"],
            direction="higher", holds=routing.agreement["ari"] >= 1.0, note=note,
        ),
        Claim(
            id="table13.oracle_gain", kind="share", paper=0.35, ours=of_gain,
            direction="higher", holds=None if of_gain is None else of_gain >= 0.35,
            note="share of the oracle's gain over the best single adapter; paper: on train loss"
            + ("" if of_gain is not None else "; here the oracle gains nothing"),
        ),
        Claim(
            id="compose.over_best_single", kind="order", ours=over_single, unit="nats",
            direction="lower", holds=over_single < 0,
            note=f"{routed} against {best}, mean of domains",
        ),
        Claim(
            id="compose.over_per_sequence", kind="order", ours=over_sequence, unit="nats",
            direction="lower", holds=over_sequence < 0,
            note="joined text, against the best adapter of each sequence in hindsight",
        ),
    ]  # fmt: skip


def markdown(measured: Measured, config: Any, domains: list[Any], answer: Any) -> str:
    """report.md, less the claims."""
    from molora_jax.display import printable_pieces

    names, routing = measured.names, measured.routing
    rows = [
        [arm]
        + [f"{measured.loss(arm, g):.3f}" for g in range(len(names))]
        + [f"{measured.mean_loss(arm):.3f}", f"{measured.joined_loss(arm):.3f}"]
        for arm in measured.arms
    ]
    blank = ["–"] * (len(names) + 1)
    rows.append(["best adapter of each sequence", *blank, f"{measured.best_per_sequence():.3f}"])
    numbers = metrics(measured)
    within = ", ".join(f"{share:.0%} within {w}" for w, share in routing.lag["within"].items())
    sections = [
        "# Four adapters trained apart, one router, one pass",
        f"Base {config.base}, frozen; rank {config.rank}, {config.adapter_steps} steps of "
        f"{config.adapter_rows} × {config.adapter_len} tokens for each adapter, which saw its own "
        f"domain and nothing else. Router: {config.router}; {measured.router_reads}. One seed "
        f"({config.seed}).",
        "## Held-out loss, nats a token",
        f"{numbers['tokens.domain']} tokens of single-domain text and {numbers['tokens.joined']} "
        "of joined text, whose domain changes in the middle of the row. Mean: over domains.",
        table(["arm", *names, "mean", "joined"], rows),
        f"MoLoRA k={measured.top_k} is {numbers['gap.oracle.mean']:+.3f} from the oracle and "
        f"{numbers['gap.uniform.mean']:+.3f} from the uniform mix; on joined text "
        f"{numbers['gap.oracle.joined']:+.3f} from the token oracle and "
        f"{numbers['gap.best_per_sequence.joined']:+.3f} from the best adapter of each sequence.",
        "## Who gets a token",
        table(
            ["domain", *(f"to {name}" for name in names)],
            [
                [name, *(f"{routing.shares[g, k]:.1%}" for k in range(len(names)))]
                for g, name in enumerate(names)
            ],
        ),
        f"{routing.own_share:.1%} of a domain's tokens go to its own adapter (mean of domains; a "
        "token's adapter is the argmax of its top-1 gates summed over the later half of the "
        f"layers), {routing.joined_own:.1%} on joined text. ARI {routing.agreement['ari']:.3f}, "
        f"NMI {routing.agreement['nmi']:.3f}. Entropy of a token's softmax "
        f"{numbers['entropy.token']:.3f} nats, of the average use "
        f"{numbers['entropy.usage']:.3f} (ln {len(names)} = {np.log(len(names)):.3f}). After a "
        f"change of domain the routing follows after {routing.lag['median']:g} tokens (median of "
        f"{routing.lag['changes']} changes; "
        f"{within}).",
        "![shares](shares.png) ![layers](layers.png) ![loss](loss.png) ![answer](answer.png)",
        "## A routed answer",
        f"`answer.html` colours each token of prompt and answer by its adapter.\n\n```text\n"
        f"{''.join(printable_pieces(answer.pieces)).strip()}\n```",
        "## Data",
        "\n".join(
            f"- {d.name}: {d.source}; {d.licence}; {len(d.train_docs)} documents to train on, "
            f"{len(d.heldout_docs)} held out"
            for d in domains
        ),
    ]
    return "\n\n".join(sections)


def draw(
    measured: Measured, curves: dict[str, list[dict]], answer: Any, path: pathlib.Path
) -> None:
    """The pictures and answer.html, into the run's folder; the answer also in the terminal."""
    from molora_jax import display

    names, routing = measured.names, measured.routing
    pictures = {
        "shares": display.share_figure(routing.shares, domain_names=names, adapter_names=names),
        "layers": display.layer_share_figure(
            routing.layer_shares, domain_names=names, adapter_names=names
        ),
        "loss": display.curve_figure(
            {
                name: ([record["step"] for record in curve], [record["loss"] for record in curve])
                for name, curve in curves.items()
                if curve
            },
            title="Training loss",
            smooth=5,
        ),
        "answer": display.token_figure(answer.gates, answer.pieces, adapter_names=names),
    }
    for name, figure in pictures.items():
        display.save_figure(figure, path / f"{name}.png")
    page = display.html_page(
        answer.pieces,
        answer.adapters,
        adapter_names=names,
        gates=answer.gates,
        token_ids=answer.ids,
        num_prompt_tokens=answer.prompt_tokens,
        title="A routed answer",
    )
    (path / "answer.html").write_text(page, encoding="utf-8")
    print(display.terminal_text(answer.pieces, answer.adapters, adapter_names=names))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
