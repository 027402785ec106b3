"""Four small reasoning tasks in a closed vocabulary, and the general text that bases are made from.

Every question comes in wordings of three kinds, which share no template: those that pretraining
shows, those that adapters are trained on, and held-out ones. Held out as well are a fifth of the
sums (no text ever says them, tables included); and, in questions, of the sets of facts in their
order and of the lists, which general text may copy. `[a|b]` in a template stands for one of a and
b, and `{name}` for what was drawn.
"""

import dataclasses
import functools
import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from experiments.reasoning_text import GENERAL, GLOSSARY, WEIGHTS, WORDINGS, WORDS

Split = Literal["pretrain", "train", "heldout"]
# (rng, whether to draw what is held out) -> what a template is filled with, and the answer.
Draw = Callable[[random.Random, bool], dict[str, str]]
TASKS = ("words", "algebra", "logic", "lists")
END, UNKNOWN = "<end>", "<unk>"


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt that ends where the answer begins, and the answer; words apart by blanks."""

    task: str
    kind: str
    prompt: str
    answer: str

    @property
    def text(self) -> str:
        return f"{self.prompt} {self.answer}"


def question(task: str, split: Split, rng: random.Random, *, kind: str = "") -> Question:
    """One question of a task, of a kind drawn unless given, in a wording of a split."""
    kind = kind or rng.choice(KINDS[task])
    drawn = DRAWS[kind](rng, split == "heldout")
    wording = rng.choice(WORDINGS[kind][split])
    prompt = f"question : {filled(wording, drawn, rng)} answer :"
    return Question(task, kind, prompt, drawn["answer"])


def questions(task: str, split: Split, count: int, *, seed: int) -> list[Question]:
    """`count` different questions, the kinds in turn; a seed decides them.

    Raises ValueError where there are hardly so many.
    """
    rng = random.Random(f"{task}/{split}/{seed}")
    found: dict[str, Question] = {}
    drawn = 0
    while len(found) < count:
        drawn += 1
        if drawn > 1000 + 20 * count:
            raise ValueError(
                f"only {len(found)} different questions of {task} ({split}) in {drawn - 1} draws, "
                f"{count} wanted: ask for fewer"
            )
        kind = KINDS[task][len(found) % len(KINDS[task])]
        each = question(task, split, rng, kind=kind)
        found.setdefault(each.prompt, each)
    return list(found.values())


def pretraining_text(*, task_share: float, seed: int) -> Iterator[str]:
    """Endless documents: `task_share` of them questions of the four tasks, the others general."""
    rng = random.Random(f"text/{seed}")
    while True:
        if rng.random() < task_share:
            yield question(rng.choice(TASKS), "pretrain", rng).text
        else:
            yield general(rng)


def general(rng: random.Random) -> str:
    """A statement, a count, a line of a table, an order, a copy or a dictionary entry."""
    kind = rng.choices(list(GENERAL), [WEIGHTS.get(each, 1) for each in GENERAL])[0]
    if kind == "glossary":
        return "{} means {} .".format(*rng.sample(rng.choice(GLOSSARY).split(), 2))
    drawn = DRAWS[kind](rng, False) if kind in DRAWS else {}
    return filled(rng.choice(GENERAL[kind]), drawn, rng)


def filled(template: str, drawn: Mapping[str, str], rng: random.Random) -> str:
    """A template with one of every `[a|b]`, the drawn values, and words of a class for others."""
    text = re.sub(r"\[(.*?)\]", lambda found: rng.choice(found[1].split("|")), template)
    values = dict(drawn)
    for name in re.findall(r"{(\w+)}", text):
        if name not in values:
            known = WORDS[name.rstrip("0123456789")].split()
            values[name] = rng.choice([word for word in known if word not in values.values()])
    return text.format(**values)


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b, and with it a + b - b, is one of the sums that no training text says.

    Every pair of last digits is held out with at most one of the tens, so it can be learned.
    """
    return (a // 10 + a % 10 + 2 * b) % 5 == 0


# What is drawn for each kind; `held` asks for what training never shows.


def _sum(rng: random.Random, held: bool) -> dict[str, str]:
    while True:
        a, b = rng.randint(10, 49), rng.randint(1, 6)
        if is_held_out(a, b) == held:
            return {"a": str(a), "b": str(b), "c": str(a + b)}


def _asks(key: str) -> Draw:
    """Draws a sum and asks for one of its parts."""

    def draw(rng: random.Random, held: bool) -> dict[str, str]:
        drawn = _sum(rng, held)
        return drawn | {"answer": drawn[key]}

    return draw


def _held_by(key: str) -> Callable[[Draw], Draw]:
    """Holds out a fifth of what is drawn, by a checksum of the value `key`."""

    def of(draw: Draw) -> Draw:
        def drawn_again(rng: random.Random, held: bool) -> dict[str, str]:
            while True:
                drawn = draw(rng, held)
                if (zlib.crc32(drawn[key].encode()) % 5 == 0) == held:
                    return drawn

        return drawn_again

    return of


@_held_by("facts")
def _order(rng: random.Random, held: bool) -> dict[str, str]:
    """Two facts about pairs of people, and which of one pair is more, or less, so."""
    people = rng.sample(WORDS["name"].split(), 4)
    more, less = rng.choice((("taller", "shorter"), ("older", "younger"), ("faster", "slower")))
    high, low = pair = people[:2]
    facts = [f"{high} is {more} than {low} .", f"{people[2]} is {more} than {people[3]} ."]
    rng.shuffle(facts)
    rng.shuffle(pair)
    asks_more = rng.random() < 0.5
    return {
        "facts": " ".join(facts),
        "pair": " or ".join(pair),
        "more": more if asks_more else less,
        "answer": high if asks_more else low,
    }


@_held_by("facts")
def _rule(rng: random.Random, held: bool) -> dict[str, str]:
    """Two or three implications about different things, and what follows from one."""
    things = rng.sample(WORDS["thing"].split(), 2 * rng.choice((2, 3)))
    start, answer = things[:2]
    facts = [f"if {x} then {y} ." for x, y in zip(things[::2], things[1::2], strict=True)]
    rng.shuffle(facts)
    return {"facts": " ".join(facts), "start": start, "answer": answer}


@_held_by("facts")
def _chain(rng: random.Random, held: bool) -> dict[str, str]:
    """Two implications that make a chain, in any order, and what follows last."""
    things = rng.sample(WORDS["thing"].split(), 3)
    facts = [f"if {x} then {y} ." for x, y in itertools.pairwise(things)]
    rng.shuffle(facts)
    return {"facts": " ".join(facts), "start": things[0], "answer": things[-1]}


def _list(change: Callable[[list[str]], str], *, digits: bool | None = None) -> Draw:
    """Draws different letters or digits, and asks for what `change` makes of them."""

    @_held_by("list")
    def draw(rng: random.Random, held: bool) -> dict[str, str]:
        as_digits = rng.random() < 0.5 if digits is None else digits
        known = list("0123456789") if as_digits else WORDS["letter"].split()
        items = rng.sample(known, rng.choice((3, 4)))
        return {"list": " ".join(items), "answer": change(items)}

    return draw


@_held_by("list")
def _occurrences(rng: random.Random, held: bool) -> dict[str, str]:
    length = rng.choice((3, 4))
    item, *others = rng.sample(WORDS["letter"].split(), 4)
    times = rng.randint(1, 3)
    items = [item] * times + others[: length - times]
    rng.shuffle(items)
    return {"list": " ".join(items), "item": item, "answer": str(times)}


def _count(rng: random.Random, held: bool) -> dict[str, str]:
    start, step = rng.randint(10, 50), rng.choice((1, 1, -1))
    return {"count": " ".join(str(start + step * at) for at in range(5))}


def _copy(rng: random.Random, held: bool) -> dict[str, str]:
    known = rng.choice((list("0123456789"), WORDS["letter"].split()))
    return {"list": " ".join(rng.sample(known, rng.choice((3, 4))))}


def _smaller(rng: random.Random, held: bool) -> dict[str, str]:
    low, high = sorted(rng.sample(range(10), 2))
    return {"low": str(low), "high": str(high)}


KINDS: Mapping[str, tuple[str, ...]] = {
    "words": ("gain", "loss"),
    "algebra": ("plus_unknown", "minus_unknown", "evaluate"),
    "logic": ("order", "rule", "chain"),
    "lists": ("reverse", "sort", "last", "occurrences"),
}
DRAWS: Mapping[str, Draw] = {
    "gain": _asks("c"),
    "loss": _asks("a"),
    "plus_unknown": _asks("a"),
    "minus_unknown": _asks("c"),
    "evaluate": _asks("c"),
    "order": _order,
    "rule": _rule,
    "chain": _chain,
    "reverse": _list(lambda items: " ".join(reversed(items))),
    "sort": _list(lambda items: " ".join(sorted(items)), digits=True),
    "last": _list(lambda items: items[-1]),
    "occurrences": _occurrences,
    "table": _sum,
    "count": _count,
    "copy": _copy,
    "smaller": _smaller,
    "statement": _sum,
    "letters": _sum,
    "rules": _rule,
    "orders": _order,
    "chains": _chain,
}


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Every word that can occur, in a fixed order; the end of a document is the first."""
    templates = [text for kind in WORDINGS.values() for texts in kind.values() for text in texts]
    templates += [text for texts in GENERAL.values() for text in texts]
    # The words of comparisons and implications stand in this file alone.
    said = "question answer : . means is than if then taller shorter older younger"
    said += " faster slower or"
    texts = [*templates, *GLOSSARY, *WORDS.values(), said]
    words = {word for text in texts for word in re.sub(r"{\w+}|[\[\]|]", " ", text).split()}
    assert not any(re.search(r"\d", word) for word in words), "templates hold no digits"
    return (END, UNKNOWN, *"0123456789", *sorted(words))


def word_tokenizer():
    """A Tokenizer over the closed vocabulary: a word a token, numbers digit by digit."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    from molora_jax.models.tokenizer import Tokenizer as Ours

    backend = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(vocabulary())}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return Ours(backend, eos_ids=(0,), bos_id=0)
