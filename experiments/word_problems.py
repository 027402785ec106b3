"""A generator of worked word problems: school mathematics with every step and its equation.

The kinds of problem stand in word_problems.txt, which says how to read it. Held-out kinds never
occur in training text, so a held-out loss is about the manner of working and not about a template.
"""

import dataclasses
import functools
import pathlib
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

SHE = (
    "Maya Priya Elena Aisha Sofia Hannah Mei Rosa Ingrid Lucia Naomi Fatima Clara Yuki Amara Leila"
)
HE = "Omar Tomas Kenji Daniel Ravi Mateo Samuel Jonas Ivan Kwame Felix Hugo Andre Malik Peter Luca"
GOODS = "pencils marbles stickers apples seashells postcards buttons stamps beads coins walnuts"
WARES = "notebook mug basket lamp poster sandwich paintbrush kite candle novel teapot umbrella"
SHOPS = "bakery, bookshop, hardware store, garden centre, museum shop, corner market, flea market"
VEHICLES = "train, bus, cyclist, delivery van, ferry, freight truck, tram, coach, river boat"
CROPS = "tomatoes carrots potatoes pumpkins strawberries beans cabbages onions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of problem: what is drawn, then texts with expressions in braces."""

    name: str
    held_out: bool
    drawn: tuple[str, ...]
    questions: tuple[str, ...]
    steps: tuple[str, ...]
    answer: str


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """Every kind in word_problems.txt."""
    text = pathlib.Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    found = []
    for block in text.split("\n== ")[1:]:
        title, drawn, *lines = block.strip().split("\n")
        found.append(
            Kind(
                name=title.removesuffix(" (held out)"),
                held_out=title.endswith("(held out)"),
                drawn=tuple(drawn.split(" | ")),
                questions=tuple(line[3:] for line in lines if line.startswith("Q: ")),
                steps=tuple(line[3:] for line in lines if line.startswith("A: ")),
                answer=lines[-1].removeprefix("= "),
            )
        )
    return tuple(found)


def problems(r: random.Random, *, held_out: bool) -> Iterator[str]:
    """Endless worked problems, of the held-out kinds or of all the others."""
    chosen = [kind for kind in kinds() if kind.held_out == held_out]
    while True:
        yield written(r, r.choice(chosen))


def written(r: random.Random, kind: Kind) -> str:
    """One problem of this kind, in one of the manners of school books."""
    values = {**_words(r), **_numbers(r, kind)}
    question = _filled(r.choice(kind.questions), values)
    steps = [_filled(step, values) for step in kind.steps]
    answer = _filled(kind.answer, values)
    manner = r.randrange(4)
    if manner == 0:
        body = "\n".join(steps)
        return f"Question: {question}\nAnswer: {body}\nThe answer is {answer}.\n"
    if manner == 1:
        body = "\n".join(f"Step {i}. {step}" for i, step in enumerate(steps, 1))
        return f"Question: {question}\nAnswer: Let us go step by step.\n{body}\n#### {answer}\n"
    if manner == 2:
        return f"Problem. {question}\nSolution. {' '.join(steps)} Hence the answer is {answer}.\n"
    body = "\n".join(f"{i}) {step}" for i, step in enumerate(steps, 1))
    return f"Q: {question}\nA:\n{body}\nResult: {answer}\n"


def _words(r: random.Random) -> dict[str, str]:
    person, friend = r.sample([*SHE.split(), *HE.split()], 2)
    she, her = ("she", "her") if person in SHE.split() else ("he", "his")
    ware, ware2 = r.sample(WARES.split(), 2)
    plural = {"sandwich": "sandwiches", "paintbrush": "paintbrushes"}
    return {
        "name": person,
        "friend": friend,
        "she": she,
        "She": she.capitalize(),
        "her": her,
        "Her": her.capitalize(),
        "ware": ware,
        "wares": plural.get(ware, ware + "s"),
        "ware2": ware2,
        "wares2": plural.get(ware2, ware2 + "s"),
        "goods": r.choice(GOODS.split()),
        "crop": r.choice(CROPS.split()),
        "shop": r.choice(SHOPS.split(", ")),
        "vehicle": r.choice(VEHICLES.split(", ")),
    }


def _numbers(r: random.Random, kind: Kind) -> dict[str, Any]:
    """Draws until every `if` of the kind holds."""
    while True:
        values: dict[str, Any] = {}
        if all(_draw(r, spec, values) for spec in kind.drawn):
            return values


def _draw(r: random.Random, spec: str, values: dict[str, Any]) -> bool:
    """Adds what one entry draws to `values`; False if it is an `if` that fails."""
    name, rest = spec.split(" ", 1)
    if name == "if":
        return bool(_value(rest, values))
    if rest.startswith("= "):
        values[name] = _value(rest[2:], values)
    elif rest.startswith("in "):
        values[name] = int(r.choice(rest[3:].split()))
    else:
        low, high, step = [*map(int, rest.split("..")), 1][:3]
        values[name] = r.randrange(low, high + 1, step)
    return True


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """`text` with each {expression} or {expression:format} in it worked out."""

    def work_out(match: re.Match) -> str:
        expression, _, form = match[1].partition(":")
        return format(_value(expression, values), form)

    return re.sub(r"\{([^}]*)\}", work_out, text)


def _value(expression: str, values: Mapping[str, Any]) -> Any:
    return eval(_compiled(expression), {"__builtins__": {}}, values)


@functools.cache
def _compiled(expression: str):
    # The expressions come from the file beside this one, so eval sees nothing foreign.
    return compile(expression, "word_problems.txt", "eval")
