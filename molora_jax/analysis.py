"""What a router did with a text: its choices, how sure it was, and what other choices cost.

Letters beyond the table of design.md: J adapters over all compositions that are compared, W texts.
An adapter is the same one in two compositions where its content digest is; its index here, 0..J−1,
is then the same, whatever slot it lies in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from molora_jax.adapters import Composition
from molora_jax.display.progress import Progress
from molora_jax.routing.metrics import main_adapter, top_1
from molora_jax.token_ids import check_token_ids
from molora_jax.training.data import Batch, make_batch
from molora_jax.training.evaluate import base_arm, evaluate, single_arm

if TYPE_CHECKING:
    from molora_jax.models import BaseModel

BASE_ONLY = "(base alone)"  # of a pass without any adapter; no adapter can be called so


@dataclass(frozen=True, kw_only=True)
class RouterTrace:
    """One router over one text of N tokens, all on the host.

    adapter_ids    (L, N, k) adapter of each choice, −1 for none;  gates  (L, N, k)
    probabilities  (l, N, J) softmax of the router's logits over the adapters that are loaded: a
                   layer of them where the decision is shared, None where the router has no logits;
                   NaN where they are not finite
    loss           (N,) nats: −log p(token | the tokens before it); NaN for the first
    """

    name: str
    decision: str
    top_k: int
    adapter_ids: Int[np.ndarray, "L N k"]
    gates: Float[np.ndarray, "L N k"]
    probabilities: Float[np.ndarray, "l N J"] | None
    loss: Float[np.ndarray, " N"]

    def __repr__(self) -> str:
        return (
            f"router {self.name!r}, {self.decision}, over {self.gates.shape} (layers, tokens, "
            f"adapters): {self.loss[1:].mean() if len(self.loss) > 1 else np.nan:.4f} nats a "
            "token"
        )

    @property
    def by_layer(self) -> Int[np.ndarray, "L N"]:
        """The adapter with the largest gate, by layer; −1 where a token has none there."""
        return top_1(self.adapter_ids, self.gates)[0]

    @property
    def main(self) -> Int[np.ndarray, " N"]:
        """The main adapter of each token, by `routing.metrics.main_adapter`."""
        return main_adapter(self.adapter_ids, self.gates)

    @property
    def entropy(self) -> Float[np.ndarray, "l N"] | None:
        """Of `probabilities`, in nats; None without logits."""
        if self.probabilities is None:
            return None
        p = self.probabilities
        return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)

    @property
    def agreement(self) -> Float[np.ndarray, "L L"]:
        """Share of the tokens for which two layers have the same largest gate.

        A token without an adapter in both layers counts as agreement.
        """
        ids = self.by_layer
        return (ids[:, None] == ids[None, :]).mean(axis=-1)

    def of_words(self, words: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
        """The main adapter of each word: argmax of the top-1 gates summed over its tokens and the
        later half of the layers; −1 where none of them has an adapter."""
        later = slice(len(self.gates) // 2, None)
        ids, gates = top_1(self.adapter_ids[later], self.gates[later])
        inside = (ids >= 0) & (words >= 0)
        shape = (int(words.max(initial=-1)) + 1, max(int(ids.max(initial=-1)) + 1, 1))
        scores = np.zeros(shape)
        np.add.at(scores, (np.broadcast_to(words, ids.shape)[inside], ids[inside]), gates[inside])
        return np.where(scores.any(axis=1), scores.argmax(axis=1), -1)


@dataclass(frozen=True, kw_only=True)
class TextAnalysis:
    """One text under every router.

    pieces   what each token adds to the text
    words    (N,) which word a token belongs to, −1 for white space
    forced   (J + 1, N) loss of each token, in nats, where *every* token of the text goes to one
             adapter in every layer; the last row is the base alone. None where it was not asked for
    """

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    words: Int[np.ndarray, " N"]
    word_texts: tuple[str, ...]
    routers: tuple[RouterTrace, ...]
    forced: Float[np.ndarray, "J1 N"] | None

    def __repr__(self) -> str:
        forced = "" if self.forced is None else ", forced losses"
        return f"text of {len(self.token_ids)} tokens under {list(self.routers)}{forced}"

    def forced_difference(self, router: int = 0) -> Float[np.ndarray, "J1 N"] | None:
        """`forced` less the routed loss: below 0 where the forced adapter predicts a token better.

        The tokens before it went to that adapter too, so this is no bound on what per-token choices
        could reach.
        """
        return None if self.forced is None else self.forced - self.routers[router].loss


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """Several texts under one or two routers: `adapters` are the J names, in order of index.

    >>> mj.analyse(base, ["two words"], {"router": composition}, forced=False).adapters
    ('code', 'math')
    """

    adapters: tuple[str, ...]
    texts: tuple[TextAnalysis, ...]

    def __repr__(self) -> str:
        tokens = sum(len(each.token_ids) for each in self.texts)
        routers = ", ".join(each.name for each in self.texts[0].routers) if self.texts else "none"
        return (
            f"analysis of {len(self.texts)} texts, {tokens} tokens; routers {routers}; adapters "
            f"{', '.join(self.adapters)}"
        )


def analyse(
    base: "BaseModel",
    texts: Sequence[str],
    compositions: Mapping[str, Composition],
    *,
    forced: bool = True,
) -> Analysis:
    """Reads each text once under each composition's router; with `forced`, once more for each
    adapter and for the base alone.

    compositions  by the name that its router is shown under; all for `base`

    Raises ValueError for a text without tokens, one longer than the model's context, and a
    composition for another base.

        >>> found = mj.analyse(base, ["two words"], {"router": composition}, forced=False)
        >>> found.texts[0].routers[0].gates.shape  # (L, N, k); a byte is a token of this base
        (4, 9, 1)
    """
    for name, composition in compositions.items():
        if composition.base_digest != base.digest:
            raise ValueError(
                f"composition {name!r} was loaded for the base {composition.base_name!r} "
                f"(sha256:{composition.base_digest[:12]}), not for {base.name!r} "
                f"(sha256:{base.digest[:12]}): routers are compared on one base"
            )
    encoded = [_encode(base, text, f"text {index}") for index, text in enumerate(texts)]
    if not encoded or not compositions:
        raise ValueError(f"{len(encoded)} texts and {len(compositions)} routers: give one of each")
    windows = _windows(encoded)
    index = _adapter_index(list(compositions.values()))
    passes = len(compositions) + (len(index) + 1 if forced else 0)
    with Progress("reading the texts", passes) as progress:
        traces = {}
        for name, composition in compositions.items():
            columns = {digest: j for j, digest in enumerate(index)}
            traces[name] = _traces(base, windows, composition, name, columns)
            progress.update()
        losses = None
        if forced:
            losses = _forced(base, windows, list(compositions.values()), list(index), progress)
    found = []
    for row, ids in enumerate(encoded):
        pieces = base.tokenizer.pieces(ids)
        words, word_texts = words_of(pieces)
        found.append(
            TextAnalysis(
                token_ids=tuple(ids),
                pieces=tuple(pieces),
                words=words,
                word_texts=tuple(word_texts),
                routers=tuple(each[row] for each in traces.values()),
                forced=None if losses is None else losses[:, row, : len(ids)],
            )
        )
    return Analysis(adapters=tuple(index.values()), texts=tuple(found))


def words_of(pieces: Sequence[str]) -> tuple[Int[np.ndarray, " N"], list[str]]:
    """The word of each token, −1 for white space, and the words: what white space parts.

    A token belongs to the word of its first letter that is not white space; one without text of its
    own (a part of a character) to the word of the next token that has some.
    """
    text = "".join(pieces)
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    of_character = np.full(len(text) + 1, -1)
    for number, (begin, end) in enumerate(spans):
        of_character[begin:end] = number
    words, start = [], 0
    for piece in pieces:
        inside = of_character[start : start + max(len(piece), 1)]
        words.append(int(next((each for each in inside if each >= 0), -1)))
        start += len(piece)
    return np.array(words, np.int64), [text[begin:end] for begin, end in spans]


def _encode(base: "BaseModel", text: str, what: str) -> list[int]:
    ids = base.tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{what} is {text[:40]!r}, which has no tokens: give a text to read")
    if len(ids) > base.config.max_positions:
        raise ValueError(
            f"{what} has {len(ids)} tokens; {base.name} reads at most {base.config.max_positions} "
            "at once: cut it into several texts"
        )
    check_token_ids(ids, base.config.vocab_size, name=what)
    return ids


def _windows(encoded: Sequence[Sequence[int]]) -> Batch:
    """A row a text, padded at the right, every token but the first a target."""
    shape = len(encoded), max(2, *map(len, encoded))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
    return make_batch(tokens, mask, mask)


def _adapter_index(compositions: Sequence[Composition]) -> dict[str, str]:
    """{digest: name}, an adapter once, in the order of the columns and then of the slots; a name
    that two contents share is told apart by digest."""
    found: dict[str, str] = {}
    for composition in compositions:
        columns = {digest: at for at, digest in enumerate(composition.column_digests)}
        held = composition.bank.list()
        for each in sorted(held, key=lambda each: columns.get(each.digest, len(columns))):
            if each.digest not in found:
                taken = each.name in found.values()
                found[each.digest] = f"{each.name} {each.digest[:6]}" if taken else each.name
    return found


def _traces(base, windows, composition, name, index) -> list[RouterTrace]:
    """The router's trace of every row."""
    measured = evaluate(
        base.decoder,
        windows,
        adapters=composition.bank.stacks,
        router=composition.router,
        column_to_slot=composition.column_to_slot,
        batch_size=1,
        return_routing=True,
    )
    of_slot = np.full(composition.bank.num_slots + 1, -1)  # the last for −1
    for each in composition.bank.list():
        of_slot[each.slot] = index[each.digest]
    loss, routing = _losses(measured), measured.routing
    assert routing is not None
    found = []
    for row in range(windows.num_rows):
        here = slice(0, int(windows.mask[row].sum()))
        logits = None if routing.logits is None else routing.logits[:, row, here]
        found.append(
            RouterTrace(
                name=name,
                decision=composition.router.decision,
                top_k=composition.router.top_k,
                adapter_ids=of_slot[routing.adapter_ids[:, row, here]],
                gates=np.asarray(routing.gates[:, row, here], np.float64),
                probabilities=None if logits is None else _softmax(logits, composition, index),
                loss=loss[row, here],
            )
        )
    return found


def _forced(base, windows, compositions, digests, progress) -> np.ndarray:
    """(J + 1, W, S) losses with every token at one adapter, and at none."""
    rows = []
    for digest in digests:
        bank = next(c.bank for c in compositions if c.bank.column_to_slot([digest])[0] >= 0)
        slot = int(bank.column_to_slot([digest])[0])
        rows.append((bank, single_arm(slot)))
    rows.append((compositions[0].bank, base_arm))
    found = []
    for bank, arm in rows:
        measured = evaluate(base.decoder, windows, adapters=bank.stacks, router=arm, batch_size=1)
        found.append(_losses(measured))
        progress.update()
    return np.stack(found)


def _losses(measured) -> np.ndarray:
    """(W, S) loss of predicting each token, NaN where it is none: one place later than it is
    measured, at the token before."""
    counted = np.where(measured.weights > 0, np.asarray(measured.token_nll, np.float64), np.nan)
    return np.concatenate([np.full((len(counted), 1), np.nan), counted[:, :-1]], axis=1)


def _softmax(logits, composition, index) -> np.ndarray:
    """(l, N, C) raw logits → (l, N, J) probabilities of the adapters that are loaded."""
    logits = np.asarray(logits, np.float64)
    finite = np.isfinite(logits).all(axis=-1, keepdims=True)
    resident = composition.column_to_slot >= 0
    p = np.zeros((*logits.shape[:-1], len(index)))
    if resident.any():
        kept = np.where(finite, logits, 0.0)[..., resident]
        kept = np.exp(kept - kept.max(axis=-1, keepdims=True))
        columns = [
            index[d] for d, here in zip(composition.column_digests, resident, strict=True) if here
        ]
        p[..., columns] = kept / kept.sum(axis=-1, keepdims=True)
    return np.where(finite, p, np.nan)
