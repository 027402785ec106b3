"""Token windows of `reasoning_tasks` for training, and prompts and rows for measuring."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.reasoning_tasks import TASKS, Question, pretraining_text, question

END_ID = 0  # closes every document and stands before the first


def pretraining_windows(tokenizer, *, rows: int, seq_len: int, task_share: float, seed: int):
    """`rows` windows of the pretraining mixture, every token a target, no window twice."""
    texts = pretraining_text(task_share=task_share, seed=seed)
    documents = ([(token, True) for token in [*tokenizer.encode(text), END_ID]] for text in texts)
    return cut(documents, rows=rows, seq_len=seq_len)


def task_windows(tokenizer, tasks: Sequence[str], *, rows: int, seq_len: int, seed: int):
    """`rows` windows of questions in training wordings, their answers (and ends) the targets.

    Of several tasks every question is of one drawn at random.
    """
    rng = random.Random(f"{'/'.join(tasks)}/train/{seed}")

    def documents():
        while True:
            asked = question(rng.choice(tasks), "train", rng)
            yield [*((token, False) for token in tokenizer.encode(asked.prompt))] + [
                (token, True) for token in [*tokenizer.encode(asked.answer), END_ID]
            ]

    return cut(documents(), rows=rows, seq_len=seq_len)


def cut(documents: Iterable[list[tuple[int, bool]]], *, rows: int, seq_len: int):
    """Windows without padding over endless documents of (token, whether it is a target)."""
    from molora_jax.training.data import make_batch

    stream = itertools.chain([(END_ID, False)], itertools.chain.from_iterable(documents))
    flat = np.array(list(itertools.islice(stream, rows * seq_len)), np.int32)
    tokens, is_target = flat.reshape(rows, seq_len, 2).transpose(2, 0, 1)
    return make_batch(tokens, np.ones((rows, seq_len), bool), is_target.astype(bool))


def prompt_ids(tokenizer, asked: Question) -> list[int]:
    return [END_ID, *tokenizer.encode(asked.prompt)]


def answer_ids(tokenizer, asked: Question) -> list[int]:
    """The right answer and the end behind it: what greedy decoding must give, to the token."""
    return [*tokenizer.encode(asked.answer), END_ID]


def question_rows(tokenizer, asked: Sequence[Question], *, seq_len: int) -> Any:
    """One question a row, labelled with the column of its task; its answer and end are targets."""
    from molora_jax.training.data import make_batch

    tokens = np.zeros((len(asked), seq_len), np.int32)
    mask, is_target = np.zeros((2, len(asked), seq_len), bool)
    labels = np.full((len(asked), seq_len), -1, np.int32)
    for row, each in enumerate(asked):
        prompt, answer = prompt_ids(tokenizer, each), answer_ids(tokenizer, each)
        length = len(prompt) + len(answer)
        if length > seq_len:
            raise ValueError(
                f"seq_len {seq_len} is shorter than a question of {length} tokens: lengthen it"
            )
        tokens[row, :length] = prompt + answer
        mask[row, :length] = True
        is_target[row, len(prompt) : length] = True
        labels[row, :length] = TASKS.index(each.task)
    return make_batch(tokens, mask, is_target, labels=labels)
