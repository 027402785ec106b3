"""Token windows for training and evaluation: packing, order, and rows joined from two domains.

Letters beyond the table of design.md: W windows held on the host.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows of tokens with what the losses need. Held as numpy (all windows) or traced (one batch).

    tokens   (B, S) ids; padding carries 0
    mask     (B, S) True for real tokens
    weights  (B, S) loss weight of predicting tokens[:, i + 1] at position i; its last column is 0
    labels   (B, S) whose own data a token is: the router column of that adapter, -1 where unknown

        >>> windows.tokens.shape, windows.weights.shape
        ((4, 16), (4, 16))
        >>> windows.rows(slice(0, 2)).labelled(1).labels.max().item()
        1
    """

    tokens: Int[Any, "*accumulate B S"]
    mask: Bool[Any, "*accumulate B S"]
    weights: Float[Any, "*accumulate B S"]
    labels: Int[Any, "*accumulate B S"]

    def __repr__(self) -> str:  # JAX also makes batches of what is no array
        shape = getattr(self.tokens, "shape", self.tokens)
        return f"Batch of {shape} tokens, mask, weights and labels"

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_len(self) -> int:
        return self.tokens.shape[1]

    def rows(self, index) -> "Batch":
        """The rows that `index` (a slice, or an array of row numbers) selects."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def filled(self, count: int) -> "Batch":
        """`count` rows: these, and rows of padding behind them."""
        missing = count - self.num_rows
        if not missing:
            return self
        padding = jax.tree.map(lambda leaf: np.zeros((missing, *leaf.shape[1:]), leaf.dtype), self)
        return concatenate([self, padding.labelled(-1)])

    def labelled(self, label: int) -> "Batch":
        """The same rows, every real token marked as `label`'s own data."""
        return replace(self, labels=np.where(self.mask, np.int32(label), np.int32(-1)))


def make_batch(
    tokens: Int[np.ndarray, "W S"],
    mask: Bool[np.ndarray, "W S"],
    is_target: Bool[np.ndarray, "W S"],
    *,
    labels: Int[np.ndarray, "W S"] | None = None,
) -> Batch:
    """Builds windows from which tokens are targets; the first token of a window is context only."""
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, :-1] = is_target[:, 1:] & mask[:, 1:] & mask[:, :-1]
    return Batch(
        tokens=np.where(mask, tokens, 0).astype(np.int32),
        mask=mask.astype(bool),
        weights=weights,
        labels=np.full(tokens.shape, -1, np.int32) if labels is None else labels.astype(np.int32),
    )


def concatenate(parts: Sequence[Batch]) -> Batch:
    """All rows of `parts`, in order."""
    widths = sorted({part.seq_len for part in parts})
    if len(widths) != 1:
        raise ValueError(f"windows of one length are needed, got lengths {widths}")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def pack(documents: Sequence[Sequence[int]], *, seq_len: int, separator: int | None) -> Batch:
    """Writes documents one after another, each closed by `separator`, and cuts windows.

    No token is lost: the last window is padded. Attention crosses from one document to the next
    inside a window, which the separator marks. Every token but a window's first is a target.

        >>> mj.pack([[104, 105], [33]], seq_len=4, separator=256).tokens.tolist()
        [[104, 105, 256, 33]]
    """
    check_seq_len(seq_len)
    end = [] if separator is None else [separator]
    closed = itertools.chain.from_iterable((*document, *end) for document in documents)
    stream = np.fromiter(closed, np.int64)
    if stream.size < 2:
        raise ValueError(
            f"{len(documents)} documents hold {stream.size} tokens: nothing can be predicted from "
            "fewer than 2. Check that the documents are not empty."
        )
    padded = np.zeros(-(-stream.size // seq_len) * seq_len, np.int64)
    padded[: stream.size] = stream
    mask = (np.arange(padded.size) < stream.size).reshape(-1, seq_len)
    windows = make_batch(padded.reshape(-1, seq_len), mask, np.ones_like(mask))
    # A rest of one token is no target and no context of one.
    return windows if windows.weights[-1].any() else windows.rows(slice(0, -1))


def split_documents(
    documents: Sequence, *, held_out_share: float = 0.1, seed: int = 0
) -> tuple[list, list]:
    """Training and held-out documents. Whole documents go to one side, at least one to each."""
    if len(documents) < 2 or not 0 < held_out_share < 1:
        raise ValueError(
            f"cannot hold out a share of {held_out_share} of {len(documents)} documents: two or "
            "more documents and a share between 0 and 1 are needed"
        )
    count = min(max(1, round(held_out_share * len(documents))), len(documents) - 1)
    order = np.random.default_rng(seed).permutation(len(documents))
    held_out = set(order[:count].tolist())
    sides: tuple[list, list] = ([], [])
    for index, document in enumerate(documents):
        sides[index in held_out].append(document)
    return sides


@dataclass(frozen=True)
class BatchOrder:
    """Step number → batch: each epoch is a permutation seeded by (seed, epoch).

    The step number is the whole position in the data, so resuming needs nothing else.
    """

    windows: Batch
    batch_size: int
    seed: int = 0

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.windows.num_rows < 1:
            raise ValueError("no window to train on: the data set is empty")

    def __call__(self, step: int) -> Batch:
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        count = self.windows.num_rows
        index = [_permutation(self.seed, p // count, count)[p % count] for p in positions]
        return self.windows.rows(np.asarray(index))


@functools.lru_cache(maxsize=16)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def joined_windows(
    domains: Sequence[Batch], count: int, *, seed: int, split: Literal["half", "random"] = "half"
) -> Batch:
    """`count` rows that change domain in the middle: the start of one window, then of another.

    Row j takes the j-th ordered pair of different domains, round and round, so that all changes
    are equally frequent; windows are drawn without replacement while they last. The change lies at
    S // 2, or anywhere from S / 4 to 3S / 4 with split="random". Labels follow the segments. The
    first token after a change cannot be foreseen from what stands before it and is no target.

        >>> parts = [windows.labelled(0), windows.labelled(1)]
        >>> joined = mj.joined_windows(parts, 3, seed=0)
        >>> joined.tokens.shape, sorted(set(joined.labels[0].tolist()))
        ((3, 16), [0, 1])
    """
    if split not in ("half", "random"):
        raise ValueError(f"split must be 'half' or 'random', got {split!r}")
    if len(domains) < 2:
        raise ValueError(f"rows are joined from two domains or more, got {len(domains)}")
    full = [domain.rows(np.flatnonzero(domain.mask.all(axis=1))) for domain in domains]
    for index, domain in enumerate(full):
        if not domain.num_rows:
            raise ValueError(
                f"domain {index} has no window without padding ({domains[index].num_rows} windows "
                f"of {domains[index].seq_len} tokens), so no row can be joined from it: give it "
                "more text, shorten the windows, or train without joined rows (joined_share=0)"
            )
    seq_len = full[0].seq_len
    pairs = list(itertools.permutations(range(len(full)), 2))
    rng = np.random.default_rng(seed)
    draws = [_endless(rng.spawn(1)[0], domain.num_rows) for domain in full]
    rows = []
    for index in range(count):
        first, second = pairs[index % len(pairs)]
        cut = seq_len // 2
        if split == "random":
            cut = int(rng.integers(seq_len // 4, seq_len - seq_len // 4 + 1))
        left = full[first].rows([next(draws[first])])
        right = full[second].rows([next(draws[second])])
        rows.append(_join(left, right, cut))
    return concatenate(rows)


def _join(left: Batch, right: Batch, cut: int) -> Batch:
    rest = left.seq_len - cut
    row = jax.tree.map(lambda a, b: np.concatenate([a[:, :cut], b[:, :rest]], axis=1), left, right)
    row.weights[:, [cut - 1, -1]] = 0.0
    return row


def _endless(rng: np.random.Generator, count: int):
    while True:
        yield from rng.permutation(count).tolist()


def check_seq_len(seq_len: int) -> None:
    """Raises ValueError for windows too short to hold a target."""
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2 (a token and its target), got {seq_len}")
