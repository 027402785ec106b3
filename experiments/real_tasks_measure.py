"""One pass over prompt and gold answer tells exact match, the answer's loss and the best option.

Letters beyond the table of design.md: Q questions, T answer tokens and one more, O options.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.real_tasks_data import Question, answer_ids
from molora_jax.adapters import AdapterBank
from molora_jax.models import BaseModel
from molora_jax.models.decoder import Decoder
from molora_jax.routing import FixedRouter, metrics

MAX_ANSWER = 12  # tokens of an answer
MAX_OPTIONS = 18  # of a question; the same for all sets, so that they share compiled functions
TOKENS_AT_ONCE = 768


@dataclasses.dataclass(frozen=True)
class Asked:
    """Questions of one set, as they are read: prompt and gold answer in a row.

    prompts, answers  token ids;  candidates  of each option the token by which it differs from
    the others, behind `common` tokens that all have; none where the question is open
    """

    questions: list[Question]
    prompts: list[list[int]]
    answers: list[list[int]]
    candidates: list[list[int]]
    common: list[int]

    @classmethod
    def of(
        cls, tokenizer, questions: Sequence[Question], *, count: int, max_len: int, before: str = ""
    ) -> "Asked":
        """The first `count` that fit, with `before` in front of each prompt.

        Whether a question fits (max_len tokens, MAX_ANSWER of them the answer, options that part
        at some token) does not depend on `before`, so that all arms are asked the same.
        """
        found = cls([], [], [], [], [])
        shots = tokenizer.encode(before) if before else []
        for each in questions:
            if len(found.questions) == count:
                break
            prompt, answer = tokenizer.encode(each.prompt), answer_ids(tokenizer, each)
            options = [tokenizer.encode(f" {option}") for option in each.options]
            parted = parting(options)
            fits = len(answer) <= MAX_ANSWER and len(prompt) + len(answer) <= max_len
            if not fits or parted is None or len(options) > MAX_OPTIONS:
                continue
            found.questions.append(each)
            found.prompts.append(shots + prompt)
            found.answers.append(answer)
            found.common.append(parted)
            found.candidates.append([option[parted] for option in options])
        if not found.questions:
            raise ValueError(
                f"none of {len(questions)} questions has at most {max_len} tokens: raise "
                "Config.eval_len"
            )
        return found


def parting(options: Sequence[Sequence[int]]) -> int | None:
    """How many tokens all options begin with; 0 of no option; None where two do not part there."""
    if not options:
        return 0
    shortest = min(map(len, options))
    common = 0
    while common < shortest and len({option[common] for option in options}) == 1:
        common += 1
    if common == shortest or len({option[common] for option in options}) < len(options):
        return None
    return common


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one arm over Q `questions`.

    right   (Q,) whether greedy decoding writes the answer and then does not go on with it
    logp    (Q,) log-likelihood of the answer, summed over its `tokens` (Q,)
    chosen  (Q,) index of the likeliest option, −1 where the question is open
    gold    (Q,) index of the right option, −1 where the question is open
    options (Q,) how many there are
    shares  (K,) share of the tokens of prompts and answers whose main adapter is each
    """

    questions: list[Question]
    right: np.ndarray
    logp: np.ndarray
    tokens: np.ndarray
    chosen: np.ndarray
    gold: np.ndarray
    options: np.ndarray
    shares: np.ndarray

    @property
    def exact_match(self) -> float:
        return float(self.right.mean())

    @property
    def logp_by_question(self) -> np.ndarray:
        """(Q,) log-likelihoods of answers over their mean length: the mean is that of a token."""
        return self.logp / self.tokens.mean()

    @property
    def logp_token(self) -> float:
        """Mean log-likelihood of a token of a gold answer."""
        return float(self.logp_by_question.mean())

    @property
    def chosen_right(self) -> np.ndarray:
        """(choices,) whether the likeliest option is the right one."""
        return (self.chosen == self.gold)[self.options > 0]

    @property
    def random_choice(self) -> float:
        """Accuracy of a choice at random; NaN without choices."""
        options = self.options[self.options > 0]
        return float((1 / options).mean()) if len(options) else float("nan")


def score(
    base: BaseModel, asked: Asked, bank: AdapterBank, arm: Any, *, ends: np.ndarray, bucket: int
) -> Scores:
    """Reads every question once.

    arm     a router whose columns are the first slots of the bank; or a tuple of slots, which
            every token gets in equal parts, (−1,) for the base
    ends    (V,) from `may_follow`
    bucket  rows are padded to a multiple of it, a compiled function each
    """
    Q, T = len(asked.questions), MAX_ANSWER + 1
    lengths = np.array([len(p) + len(a) for p, a in zip(asked.prompts, asked.answers, strict=True)])
    starts = np.array([len(prompt) for prompt in asked.prompts])
    targets, candidates = np.zeros((Q, T), np.int32), np.zeros((Q, MAX_OPTIONS), np.int32)
    for row in range(Q):
        targets[row, : len(asked.answers[row])] = asked.answers[row]
        candidates[row, : len(asked.candidates[row])] = asked.candidates[row]
    logp, best, option = np.zeros((Q, T)), np.zeros((Q, T), np.int64), np.zeros((Q, MAX_OPTIONS))
    num_slots = len(bank.list())
    counts = np.zeros(num_slots)
    columns = np.arange(num_slots, dtype=np.int32)
    widths = -(-lengths // bucket) * bucket
    for width in np.unique(widths):
        at_once = max(1, TOKENS_AT_ONCE // width)
        of_width = np.flatnonzero(widths == width)
        for first in range(0, len(of_width), at_once):
            rows = of_width[first : first + at_once]
            tokens, mask = np.zeros((at_once, width), np.int32), np.zeros((at_once, width), bool)
            for at, row in enumerate(rows):
                tokens[at, : lengths[row]] = asked.prompts[row] + asked.answers[row]
                mask[at, : lengths[row]] = True
            filled = np.pad(rows, (0, at_once - len(rows)), mode="edge")
            router = arm
            if isinstance(arm, tuple):
                # As many columns whatever the arm: one compiled function for all of these.
                told = np.pad(arm, (0, num_slots - len(arm)), constant_values=-1)
                router = FixedRouter(np.tile(told, (*mask.shape, 1)))
            out = _read(
                base.decoder, tokens, mask, starts[filled], targets[filled], candidates[filled],
                np.array(asked.common)[filled], bank.stacks, router, columns,
            )  # fmt: skip
            *read, ids, gates = (np.asarray(each) for each in out)
            for kept, found in zip((logp, best, option), read, strict=True):
                kept[rows] = found[: len(rows)]
            main = metrics.main_adapter(ids, gates)[mask.reshape(-1)]
            counts += np.bincount(main[main >= 0], minlength=num_slots)
    return _scored(asked, targets, logp, best, option, ends, counts / lengths.sum())


def _scored(asked: Asked, targets, logp, best, option, ends, shares) -> Scores:
    size = np.array([len(answer) for answer in asked.answers])
    inside = np.arange(targets.shape[1])[None] < size[:, None]
    next_token = np.take_along_axis(best, size[:, None], axis=1)[:, 0]
    options = np.array([len(each) for each in asked.candidates])
    there = np.arange(option.shape[1])[None] < options[:, None]
    gold = [q.options.index(q.answer) if q.options else -1 for q in asked.questions]
    return Scores(
        questions=asked.questions,
        right=((best == targets) | ~inside).all(axis=1) & ends[next_token],
        logp=np.where(inside, logp, 0.0).sum(axis=1),
        tokens=size,
        chosen=np.where(options > 0, np.where(there, option, -np.inf).argmax(axis=1), -1),
        gold=np.array(gold),
        options=options,
        shares=shares,
    )


def may_follow(base: BaseModel) -> np.ndarray:
    """(V,) tokens that do not go on with a number, word or closed parenthesis before them."""
    pieces = base.tokenizer.pieces(range(base.tokenizer.vocab_size))
    found = np.zeros(base.config.vocab_size, bool)
    found[: len(pieces)] = [re.match(r"[\w.,/:%]", piece) is None for piece in pieces]
    return found


@jax.jit
def _read(
    decoder: Decoder,
    tokens: Int[Array, "B S"],
    mask: Any,
    starts: Int[Array, " B"],
    targets: Int[Array, "B T"],
    candidates: Int[Array, "B O"],
    common: Int[Array, " B"],
    adapters: Any,
    router: Any,
    column_to_slot: Any,
):
    """(log p of each target, likeliest token at its place, log p of each candidate, routing)."""
    out = decoder(tokens, mask, adapters=adapters, router=router, column_to_slot=column_to_slot)
    # Position i speaks of token i + 1. Past the end of a row nothing is read.
    at = jnp.minimum(starts[:, None] - 1 + jnp.arange(targets.shape[1]), tokens.shape[1] - 1)
    hidden = jnp.take_along_axis(out.hidden, at[..., None], axis=1)
    logp = jax.nn.log_softmax(decoder.logits(hidden))
    of_target = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    here = jnp.take_along_axis(logp, common[:, None, None], axis=1)[:, 0]
    of_option = jnp.take_along_axis(here, candidates, axis=-1)
    routing = out.routing
    assert routing is not None
    return of_target, logp.argmax(-1), of_option, routing.adapter_ids, routing.gates
