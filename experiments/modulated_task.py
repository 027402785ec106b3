"""Rows in which a mark says how all that follows is answered, until the next mark; and plain bytes.

Letters beyond the table of design.md: n questions (and as many answers), W rows.

A row is a run of stretches: a mark, and then 1 to 8 pairs of a question and its answer. Behind the
mark "old" a question has the answer that the base knows, behind "new" another. Only answers are
targets, so a model has to know the last mark, which is up to 16 tokens back.

    ids   0 … n−1 questions    n … 2n−1 answers    2n "old"    2n + 1 "new"
"""

import numpy as np
from jaxtyping import Int

from experiments import domains
from molora_jax.models.config import ModelConfig
from molora_jax.training.data import Batch, make_batch, pack
from molora_jax.training.pretrain import small_llama

LONGEST = 8  # pairs of a stretch
VOCABULARY = 256  # bytes; the marked rows use some of the ids
_DOCUMENTS = 400  # of a domain, at most


def tables(questions: int, seed: int, *, base_seed: int) -> Int[np.ndarray, "2 n"]:
    """The old answers, which are the base's own, and the new ones, all of which differ."""
    old = np.random.default_rng([base_seed, 29]).permutation(questions)
    shift = np.random.default_rng([seed, 31]).integers(1, questions, questions)
    return np.stack([old, (old + shift) % questions])


def marked_rows(
    answers: Int[np.ndarray, "2 n"], *, count: int, seq_len: int, seed: int
) -> tuple[Batch, Int[np.ndarray, "W S"]]:
    """Rows labelled 0 where "old" holds and 1 where "new" does, and how far each target is.

    The second result counts at the position of a question, which predicts its answer, the pairs
    between the last mark and it; −1 elsewhere.
    """
    rng = np.random.default_rng([seed, 37])
    n = answers.shape[1]
    tokens = np.zeros((count, seq_len), np.int64)
    labels = np.zeros((count, seq_len), np.int64)
    distance = np.full((count, seq_len), -1)
    target = np.zeros((count, seq_len), bool)
    for row in range(count):
        filled = 0
        while filled < seq_len:
            kind, pairs = int(rng.integers(2)), int(rng.integers(1, LONGEST + 1))
            asked = rng.integers(0, n, pairs)
            stretch = np.empty(1 + 2 * pairs, np.int64)
            stretch[0], stretch[1::2], stretch[2::2] = 2 * n + kind, asked, n + answers[kind][asked]
            stretch = stretch[: seq_len - filled]
            here = slice(filled, filled + len(stretch))
            tokens[row, here], labels[row, here] = stretch, kind
            target[row, here][2::2] = True
            places = np.arange(filled + 1, min(filled + 2 * pairs, seq_len), 2)
            distance[row, places] = np.arange(len(places))
            filled += len(stretch)
    real = np.ones(tokens.shape, bool)
    return make_batch(tokens, real, target, labels=labels), distance


def text_rows(domain: domains.Domain, *, seq_len: int, most: int) -> tuple[Batch, Batch]:
    """Training and held-out windows of bytes, at most `most` of each."""

    def windows(documents):
        read = [list(text.encode()) for text in documents[:_DOCUMENTS]]
        return pack(read, seq_len=seq_len, separator=0).rows(slice(0, most))

    return windows(domain.train_docs), windows(domain.heldout_docs)


def sizes(*, width: int, layers: int, seq_len: int) -> ModelConfig:
    """The base of either task: a small Llama over 256 ids, embeddings tied."""
    return small_llama(VOCABULARY, width=width, layers=layers, seq_len=seq_len)
