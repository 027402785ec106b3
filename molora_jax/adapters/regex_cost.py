"""Regular expressions that a file brings: those that could take for ever are told beforehand."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

MANY = 10  # repetitions that count as any number
MAX_REPEATS = 6  # each may multiply the time by the length of a name, some 40 characters

_parser: Any = re._parser  # type: ignore[attr-defined]  # what re.compile itself parses with


def may_take_forever(pattern: str) -> bool:
    """Whether matching a module's name could take time exponential in its length.

    Python tries one way after another and has no clock: `([a-z.]+)+X` takes years for 40 letters.
    So an open repetition may hold no other and no alternatives, and there are MAX_REPEATS at most.
    Raises re.error (OverflowError, RecursionError) for what is no regular expression.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a doubtful set, '[[a]': PEFT takes it, too
        tree = _parser.parse(pattern)
    return _open_repeats(tree, repeated=False) > MAX_REPEATS


def _open_repeats(tree: Any, *, repeated: bool) -> int:
    """How many open repetitions one way through holds; too many where they may lie in another."""
    total = 0
    for operation, argument in tree:
        name = str(operation)
        many = name.endswith("REPEAT") and argument[1] >= MANY
        if repeated and (many or name == "BRANCH"):
            return MAX_REPEATS + 1
        parts = [_open_repeats(part, repeated=repeated or many) for part in _parts(argument)]
        # Alternatives are tried one after the other, so their times add up and do not multiply.
        total += many + (max(parts, default=0) if name == "BRANCH" else sum(parts))
    return total


def _parts(argument: Any) -> Iterator[Any]:
    """The smaller expressions in what the parser says of an operation."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for each in argument:
            yield from _parts(each)
