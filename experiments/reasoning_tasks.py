"""Four small reasoning tasks in a closed vocabulary, and the general text that bases are made from.

Every question comes in wordings of four kinds, which share no template: those that pretraining
shows, those that adapters are trained on, those of validation, by which settings may be chosen, and
held-out ones. Contents are divided as well: a fifth of the sums, of the lists and of the sets of
facts, each in whatever order, is held out, and a tenth is kept for validation. No training text
says them, general text included. `[a|b]` in a template stands for one of a and b, and `{name}` for
what was drawn.
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

Split = Literal["pretrain", "train", "validation", "heldout"]
Part = Literal["shown", "validation", "heldout"]
# (rng, which contents to draw from) -> what a template is filled with, and the answer.
Draw = Callable[[random.Random, Part], dict[str, str]]
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
    drawn = DRAWS[kind](rng, split if split in ("validation", "heldout") else "shown")
    wording = rng.choice(WORDINGS[kind][split])
    prompt = f"question : {filled(wording, drawn, rng)} answer :"
    return Question(task, kind, prompt, drawn["answer"])


def questions(task: str, split: Split, count: int, *, seed: int, first: int = 0) -> list[Question]:
    """`count` different questions, the kinds in turn, behind the `first` ones that a seed draws.

    Raises ValueError where there are hardly so many.
    """
    count += first
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
    return list(found.values())[first:]


def pretraining_text(*, task_share: float, seed: int) -> Iterator[str]:
    """Endless documents: `task_share` of them questions of the four tasks, the others general."""
    rng = random.Random(f"text/{seed}")
    while True:
        if rng.random() < task_share:
            yield question(rng.choice(TASKS), "pretrain", rng).text
        else:
            yield general(rng)


def general(rng: random.Random) -> str:
    """A statement, a count, a line of a table, an order, a copy, an entry, or a text said twice."""
    kind = rng.choices(list(GENERAL), [WEIGHTS.get(each, 1) for each in GENERAL])[0]
    if kind == "echo":
        said = general(rng)
        return f"{said} again : {said}"
    if kind == "glossary":
        return "{} means {} .".format(*rng.sample(rng.choice(GLOSSARY).split(), 2))
    drawn = DRAWS[kind](rng, "shown") if kind in DRAWS else {}
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


def part_of_sum(a: int, b: int) -> Part:
    """Who may say a + b, and with it a + b - b: a fifth is held out, a tenth for validation.

    Every pair of last digits is shown with at least two of the four tens, so it can be learned.
    """
    of_five = (a // 10 + a % 10 + 2 * b) % 5
    if of_five == 0:
        return "heldout"
    return "validation" if of_five == 1 and (a // 10 + b) % 2 else "shown"


def part_of(content: str) -> Part:
    """Who may say these words, in whatever order they come: by their checksum."""
    of_ten = zlib.crc32(" ".join(sorted(content.split())).encode()) % 10
    return "heldout" if of_ten < 2 else "validation" if of_ten == 2 else "shown"


# What is drawn for each kind, from one part of the contents.


def _sum(rng: random.Random, part: Part) -> dict[str, str]:
    while True:
        a, b = rng.randint(10, 49), rng.randint(1, 6)
        if part_of_sum(a, b) == part:
            return {"a": str(a), "b": str(b), "c": str(a + b)}


def _asks(key: str) -> Draw:
    """Draws a sum and asks for one of its parts."""

    def draw(rng: random.Random, part: Part) -> dict[str, str]:
        drawn = _sum(rng, part)
        return drawn | {"answer": drawn[key]}

    return draw


def _divided_by(key: str) -> Callable[[Callable[[random.Random], dict[str, str]]], Draw]:
    """Draws again until the value `key` is of the part that is asked for."""

    def of(draw: Callable[[random.Random], dict[str, str]]) -> Draw:
        def drawn_again(rng: random.Random, part: Part) -> dict[str, str]:
            while True:
                drawn = draw(rng)
                if part_of(drawn[key]) == part:
                    return drawn

        return drawn_again

    return of


@_divided_by("facts")
def _order(rng: random.Random) -> dict[str, str]:
    """Two facts about pairs of people, and the one that says who of one pair is more so."""
    people = rng.sample(WORDS["name"].split(), 4)
    more = rng.choice(("taller", "shorter", "older", "younger", "faster", "slower"))
    high, low = pair = people[:2]
    answer = f"{high} is {more} than {low}"
    facts = [f"{answer} .", f"{people[2]} is {more} than {people[3]} ."]
    rng.shuffle(facts)
    rng.shuffle(pair)
    return {
        "facts": " ".join(facts),
        "pair": " or ".join(pair),
        "more": more,
        "answer": answer,
    }


@_divided_by("facts")
def _rule(rng: random.Random) -> dict[str, str]:
    """Two or three implications about different things, and what follows from one."""
    things = rng.sample(WORDS["thing"].split(), 2 * rng.choice((2, 3)))
    start, answer = things[0], " then ".join(things[:2])
    facts = [f"if {x} then {y} ." for x, y in zip(things[::2], things[1::2], strict=True)]
    rng.shuffle(facts)
    return {"facts": " ".join(facts), "start": start, "answer": answer}


@_divided_by("facts")
def _chain(rng: random.Random) -> dict[str, str]:
    """Two implications that make a chain, in any order, and what follows, step by step."""
    things = rng.sample(WORDS["thing"].split(), 3)
    facts = [f"if {x} then {y} ." for x, y in itertools.pairwise(things)]
    rng.shuffle(facts)
    return {"facts": " ".join(facts), "start": things[0], "answer": " then ".join(things)}


def _list(change: Callable[[list[str]], str], *, digits: bool | None = None) -> Draw:
    """Draws different letters or digits, and asks for what `change` makes of them."""

    @_divided_by("list")
    def draw(rng: random.Random) -> dict[str, str]:
        as_digits = rng.random() < 0.5 if digits is None else digits
        known = list("0123456789") if as_digits else WORDS["letter"].split()
        items = rng.sample(known, rng.choice((3, 4)))
        return {"list": " ".join(items), "answer": change(items)}

    return draw


@_divided_by("list")
def _occurrences(rng: random.Random) -> dict[str, str]:
    length = rng.choice((3, 4))
    item, *others = rng.sample(WORDS["letter"].split(), 4)
    times = rng.randint(1, 3)
    items = [item] * times + others[: length - times]
    rng.shuffle(items)
    return {"list": " ".join(items), "item": item, "answer": str(times)}


def _count(rng: random.Random, part: Part) -> dict[str, str]:
    start, step = rng.randint(10, 50), rng.choice((1, 1, -1))
    return {"count": " ".join(str(start + step * at) for at in range(5))}


@_divided_by("list")
def _copy(rng: random.Random) -> dict[str, str]:
    known = rng.choice((list("0123456789"), WORDS["letter"].split()))
    return {"list": " ".join(rng.sample(known, rng.choice((3, 4))))}


def _smaller(rng: random.Random, part: Part) -> dict[str, str]:
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
