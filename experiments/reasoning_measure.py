"""Exact match by greedy decoding, and the loss of the right answer, for one way to use adapters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.reasoning_data import END_ID, answer_ids, prompt_ids, question_rows
from experiments.reasoning_tasks import TASKS, Question, Split, questions

ROW_LEN = 48  # no question is longer
AT_ONCE = 200  # rows decoded or read together


@dataclasses.dataclass(frozen=True)
class Asked:
    """Questions, task after task, as prompts, right answers and labelled rows."""

    questions: list[Question]
    prompts: list[list[int]]
    answers: list[list[int]]
    rows: Any

    @classmethod
    def of(
        cls, tokenizer, tasks: Sequence[str], *, split: Split, count: int, seed: int, first: int = 0
    ) -> "Asked":
        """As `questions` draws them."""
        asked = [
            each for task in tasks for each in questions(task, split, count, seed=seed, first=first)
        ]
        return cls(
            questions=asked,
            prompts=[prompt_ids(tokenizer, each) for each in asked],
            answers=[answer_ids(tokenizer, each) for each in asked],
            rows=question_rows(tokenizer, asked, seq_len=ROW_LEN),
        )


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one arm over Q questions.

    right    (Q,) whether the decoded answer and its end are the right ones, to the token
    nats     (Q,) loss of the right answer and its end, summed over its tokens
    tasks    (Q,) index of the task;  kinds  the kind of each question
    shares   (G, G) share of each task's tokens whose main adapter is each; None without a router
    own_answers  share of the positions that predict an answer whose main adapter is their task's;
             NaN without a router
    """

    right: np.ndarray
    nats: np.ndarray
    tasks: np.ndarray
    kinds: list[str]
    shares: np.ndarray | None = None
    own_answers: float = float("nan")

    def exact_match(self, task: int) -> float:
        return float(self.right[self.tasks == task].mean())

    def answer_nats(self, task: int) -> float:
        return float(self.nats[self.tasks == task].mean())

    def of_kind(self, kind: str) -> float:
        return float(self.right[[each == kind for each in self.kinds]].mean())

    def summary(self) -> str:
        return ", ".join(f"{task} {self.exact_match(at):.1%}" for at, task in enumerate(TASKS))


def score(base, asked: Asked, bank, *, router=None, slot: np.ndarray | int = -1) -> Scores:
    """Asks every question of one arm over a bank that was filled from slot 0 on.

    router  one whose columns are the first slots; without one `slot` says which adapter all
            questions (or each, (Q,)) are given, -1 for the base

    Arms of one base and bank that are told their slot share one compiled function.
    """
    from molora_jax.generation import generate
    from molora_jax.routing import SequenceRouter
    from molora_jax.training import evaluate
    from molora_jax.training.evaluate import oracle_arm

    slots = np.broadcast_to(np.asarray(slot, np.int32), len(asked.prompts))
    routed = {"adapters": bank.stacks}
    if router is not None:
        routed["column_to_slot"] = np.arange(router.num_columns, dtype=np.int32)
    longest = max(map(len, asked.answers))
    right = []
    for start in range(0, len(asked.prompts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        given = generate(
            base.decoder,
            asked.prompts[part],
            max_new_tokens=longest,
            stop_ids=(END_ID,),
            router=SequenceRouter(slots[part]) if router is None else router,
            **routed,
        )
        wanted = asked.answers[part]
        right += [each.tokens == answer for each, answer in zip(given, wanted, strict=True)]
    told = np.where(asked.rows.mask, slots[:, None], -1)
    read = evaluate(
        base.decoder,
        asked.rows if router is not None else dataclasses.replace(asked.rows, labels=told),
        router=oracle_arm if router is None else router,
        batch_size=min(AT_ONCE, asked.rows.num_rows),
        return_routing=router is not None,
        **routed,
    )
    shares, own_answers = None, float("nan")
    if read.routing is not None:
        from molora_jax.routing import metrics

        L, W, S, k = read.routing.adapter_ids.shape
        flat = [
            leaf.reshape(L, W * S, k) for leaf in (read.routing.adapter_ids, read.routing.gates)
        ]
        main = metrics.main_adapter(*flat).reshape(W, S)
        shares = metrics.token_shares(main, asked.rows.labels, len(TASKS), len(TASKS))
        predicting = asked.rows.weights > 0
        own_answers = float((main == asked.rows.labels)[predicting].mean())
    return Scores(
        right=np.array(right),
        nats=(read.token_nll * read.weights).sum(axis=1),
        tasks=np.array([TASKS.index(each.task) for each in asked.questions]),
        kinds=[each.kind for each in asked.questions],
        shares=shares,
        own_answers=own_answers,
    )
