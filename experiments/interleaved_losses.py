"""Held-out loss of every way to use the adapters of three modalities."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.interleaved_data import MODALITIES, Writer
from experiments.interleaved_sources import Data
from experiments.interleaved_training import windows_of
from experiments.run_folder import Claim, markdown
from molora_jax.adapters import AdapterBank
from molora_jax.models import BaseModel
from molora_jax.routing import VocabularyRouter
from molora_jax.training import base_arm, evaluate, oracle_arm, single_arm
from molora_jax.training.data import concatenate, pack

KINDS = ("pictures", "puzzles", "mixed")  # of held-out documents
SINGLES = tuple(f"{name} only" for name in MODALITIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """Held-out evaluations by arm over the same windows.

    windows     documents of each of KINDS, one below the other, labelled by modality
    num_rows    of each kind
    arms        {"base", "<modality> only", "vocabulary", "oracle": Evaluation}
    plain       loss on plain text, "before" any row was added and "after"
    """

    windows: Any
    num_rows: tuple[int, ...]
    arms: Mapping[str, Any]
    plain: Mapping[str, float]

    def of_modality(self, arm: str, column: int) -> float:
        """Mean over what follows a token of this modality, in all documents."""
        return self.arms[arm].mean(self.windows.labels == column)

    def of_kind(self, arm: str, kind: str) -> float:
        return self.arms[arm].mean(self._rows(kind))

    def best_per_sequence(self, kind: str) -> float:
        """With the one adapter, or none, that is best for each row in hindsight."""
        return self._best(kind, lambda sums: sums.sum(axis=2).min(axis=0).sum())

    def best_per_token(self, kind: str) -> float:
        """Over base and single adapters, the least loss of each token: nobody could know which."""
        return self._best(kind, lambda sums: sums.min(axis=0).sum())

    def _best(self, kind: str, least) -> float:
        weights = self.windows.weights * self._rows(kind)
        sums = np.stack([self.arms[arm].token_nll * weights for arm in ("base", *SINGLES)])
        return float(least(sums.astype(np.float64)) / weights.sum(dtype=np.float64))

    def _rows(self, kind: str) -> np.ndarray:
        ends = np.cumsum(self.num_rows)
        at = KINDS.index(kind)
        rows = np.zeros(self.windows.tokens.shape, bool)
        rows[ends[at] - self.num_rows[at] : ends[at]] = True
        return rows

    def table(self) -> str:
        header = ["arm", *(f"behind {name}" for name in MODALITIES), *(f"all, {k}" for k in KINDS)]
        rows = [
            [arm]
            + [f"{self.of_modality(arm, column):.3f}" for column in range(len(MODALITIES))]
            + [f"{self.of_kind(arm, kind):.3f}" for kind in KINDS]
            for arm in self.arms
        ]
        blank = ["–"] * len(MODALITIES)
        for name, best in (("sequence", self.best_per_sequence), ("token", self.best_per_token)):
            rows.append([f"best of each {name}", *blank, *(f"{best(kind):.3f}" for kind in KINDS)])
        return markdown(header, rows)

    def markdown(self) -> str:
        cost = self.plain["after"] - self.plain["before"]
        alone = ", ".join(f"{self.over_alone(at):+.3f} ({n})" for at, n in enumerate(MODALITIES))
        return (
            "## Held-out loss, nats a token\n\n"
            + self.table()
            + "\nPictures, puzzles and mixed are kinds of documents; all three modalities stand in "
            "the mixed ones, of which no adapter has seen any. The oracle gives each token the "
            "adapter of its label and must equal the vocabulary's. Best of each sequence and "
            "token: in hindsight, of the base and the adapters alone; a token's least loss is "
            "nobody's to choose. A single adapter acts on all tokens here, and was trained to act "
            "on its own. Routed, an adapter reads keys and values that the others wrote, which its "
            "training never showed it: behind its own tokens the routed loss is that of the "
            f"adapter on every token {alone}.\n\nOn plain text the added rows cost {cost:.5f} nats "
            f"a token ({self.plain['before']:.4f} before): what they take of the softmax.\n\n"
            "![losses](losses.png) ![training](loss.png)\n\n"
        )

    def over_alone(self, column: int) -> float:
        """Routed less the modality's adapter on every token, behind the tokens of the modality."""
        return self.of_modality("vocabulary", column) - self.of_modality(SINGLES[column], column)

    def metrics(self) -> dict[str, float]:
        found = {f"over_alone.{n}": self.over_alone(at) for at, n in enumerate(MODALITIES)}
        for arm in self.arms:
            key = arm.replace(" ", "_")
            found |= {
                f"loss.{key}.{name}": self.of_modality(arm, at)
                for at, name in enumerate(MODALITIES)
            }
            found |= {f"loss.{key}.all_{kind}": self.of_kind(arm, kind) for kind in KINDS}
        for kind in KINDS:
            found[f"loss.best_per_sequence.all_{kind}"] = self.best_per_sequence(kind)
            found[f"loss.best_per_token.all_{kind}"] = self.best_per_token(kind)
        found["plain_text.before"] = self.plain["before"]
        found["plain_text.added_by_rows"] = self.plain["after"] - self.plain["before"]
        return found

    def claims(self) -> list[Claim]:
        best = min(SINGLES, key=lambda arm: self.of_kind(arm, "mixed"))
        routed = self.of_kind("vocabulary", "mixed")
        over_single = routed - self.of_kind(best, "mixed")
        over_sequence = routed - self.best_per_sequence("mixed")
        note = "held-out documents of three modalities; no adapter was trained on such"
        return [
            Claim(
                id="interleaved.over_best_single", kind="order", ours=over_single, unit="nats",
                direction="lower", holds=over_single < 0, note=f"against {best}; {note}",
            ),
            Claim(
                id="interleaved.over_per_sequence", kind="order", ours=over_sequence, unit="nats",
                direction="lower", holds=over_sequence < 0,
                note=f"against the best adapter of each sequence in hindsight; {note}",
            ),
        ]  # fmt: skip


def validate(
    data: Data, writer: Writer, plain: BaseModel, base: BaseModel, bank: AdapterBank, *, rows: int,
    plain_rows: int, seed: int,
) -> Losses:  # fmt: skip
    """Evaluates every arm on `rows` held-out documents of each kind, and the cost to plain text.

    plain, base  the model before any row was added to it, and after
    bank         the adapters of MODALITIES, in order
    """
    layout = writer.layout
    documents = (
        writer.picture_documents(data.heldout_pictures, seed),
        writer.grid_documents(data.heldout_tasks, seed),
        writer.mixed_documents(data.heldout_pictures, data.heldout_tasks, seed),
    )
    kinds = [windows_of(each, rows=rows, seq_len=writer.seq_len) for each in documents]
    windows = concatenate(kinds)
    labels = np.where(windows.mask, layout.modality(windows.tokens), -1).astype(np.int32)
    windows = dataclasses.replace(windows, labels=labels)
    router = VocabularyRouter.from_ranges(layout.ranges(), vocab_size=layout.vocab_size)
    arms = {"base": base_arm, **{name: single_arm(at) for at, name in enumerate(SINGLES)}}
    arms |= {"vocabulary": router, "oracle": oracle_arm}
    measured = {}
    for name, arm in arms.items():
        measured[name] = evaluate(
            base.decoder, windows, adapters=bank.stacks, router=arm, batch_size=4, label=name
        )
        by = [f"{m} {measured[name].mean(labels == at):.3f}" for at, m in enumerate(MODALITIES)]
        print(f"held-out loss, {name}: {', '.join(by)}", flush=True)
    ids = plain.tokenizer.encode(data.plain_text)
    text = pack([ids], seq_len=writer.seq_len, separator=None)
    text = text.rows(slice(0, plain_rows))
    cost = {
        "before": evaluate(plain.decoder, text, batch_size=4).nll,
        "after": evaluate(
            base.decoder, text, adapters=bank.stacks, router=base_arm, batch_size=4
        ).nll,
    }
    return Losses(
        windows=windows,
        num_rows=tuple(each.num_rows for each in kinds),
        arms=measured,
        plain=cost,
    )
