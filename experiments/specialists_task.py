"""Questions whose right answer differs between domains, or does not: a knob says for how many.

Letters beyond the table of design.md: n questions (and as many answers), K domains, W rows.

A row is a mark and then pairs of a question and its answer. The mark, its first token, is that of
the domain, or, where domains are not to be recognised, the same in all. Questions are drawn evenly
and only answers are targets. Of the n questions a share `conflict` has another answer in every
domain, the rest has one answer everywhere.

    ids   0 … n−1 questions    n … 2n−1 answers    2n … marks
"""

import numpy as np
from jaxtyping import Int

from molora_jax.models.config import ModelConfig
from molora_jax.training.data import Batch, make_batch
from molora_jax.training.pretrain import small_llama


def answers(questions: int, domains: int, *, conflict: float, seed: int) -> Int[np.ndarray, "K n"]:
    """The answer (0 … n−1) of every domain to every question.

    The questions in conflict at one share are among those at a larger one, and there every two
    domains differ.
    """
    rng = np.random.default_rng([seed, 17])
    shared = rng.permutation(questions)
    order = rng.permutation(questions)
    shifts = np.stack([rng.permutation(questions)[:domains] for _ in range(questions)], axis=1)
    differs = np.zeros(questions, bool)
    differs[order[: round(conflict * questions)]] = True
    return np.where(differs, (shared + shifts) % questions, shared)


def make_rows(
    table: Int[np.ndarray, " n"], mark: int, *, count: int, pairs: int, rng: np.random.Generator
) -> Int[np.ndarray, "W S"]:
    """`count` rows of one domain, S = 1 + 2·pairs; `mark` counts from 0."""
    n = len(table)
    asked = rng.integers(0, n, (count, pairs))
    rows = np.empty((count, 1 + 2 * pairs), np.int32)
    rows[:, 0] = 2 * n + mark
    rows[:, 1::2] = asked
    rows[:, 2::2] = n + table[asked]
    return rows


def as_batch(rows: Int[np.ndarray, "W S"]) -> Batch:
    """Rows with their answers as targets."""
    real = np.ones(rows.shape, bool)
    target = np.zeros(rows.shape, bool)
    target[:, 2::2] = True
    return make_batch(rows, real, target)


def base_rows(*, questions: int, marks: int, pairs: int, count: int, seed: int) -> Batch:
    """The base's own rows: as many domains as marks, in conflict about every question."""
    rng = np.random.default_rng([seed, 19])
    tables = answers(questions, marks, conflict=1.0, seed=seed)
    each = -(-count // marks)
    rows = [
        make_rows(table, mark, count=each, pairs=pairs, rng=rng)
        for mark, table in enumerate(tables)
    ]
    return as_batch(rng.permutation(np.concatenate(rows))[:count])


def sizes(*, questions: int, marks: int, width: int, layers: int, pairs: int) -> ModelConfig:
    """The base: a small Llama, embeddings tied."""
    return small_llama(2 * questions + marks, width=width, layers=layers, seq_len=1 + 2 * pairs)
