"""What a Config's field holds, in words and as text: its kind, an example, a value written down."""

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from experiments.registry import one_line


def unquoted(text: str) -> str:
    """A text less one pair of quotes around the whole; `'a' or 'b'` has no such pair."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        inner, quote = text[1:-1], text[0]
        # The second: so that every text, whatever quotes it has, can be written.
        if quote not in inner or (len(inner) > 1 and inner[0] == inner[-1] == quote):
            return inner
    return text


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def options(hint: Any) -> list[Any]:
    return [each for each in typing.get_args(hint) if each is not type(None)]


def is_several(hint: Any) -> bool:
    found = options(hint) if is_union(hint) else [hint]
    return any(typing.get_origin(o) in (tuple, collections.abc.Sequence) for o in found)


_KINDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
}


def kind(hint: Any, field: dataclasses.Field) -> str:
    """What a field holds, in a few words."""
    if field.metadata.get("texts"):
        return "a text, or several, each as a setting of its own"
    if field.metadata.get("place") and hint is not bool:
        return "paths" if is_several(hint) else "a path"
    if is_union(hint):
        return f"{kind(options(hint)[0], field)} or None"
    return _plural(hint) if is_several(hint) else _singular(hint)


def _singular(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        *some, last = map(str, typing.get_args(hint))
        return f"{', '.join(some)} or {last}" if some else last
    if is_several(hint):
        return _plural(hint)
    return _KINDS[hint][0]


def _plural(hint: Any) -> str:
    """ "whole numbers", "2 numbers", "3 tuples of 4 whole numbers"."""
    args = [each for each in typing.get_args(hint) if each is not Ellipsis]
    first = args[0]
    if typing.get_origin(first) is typing.Literal:
        return f"some of {', '.join(map(str, typing.get_args(first)))}"
    each = f"tuples of {_plural(first)}" if is_several(first) else _KINDS[first][1]
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint)
    return f"{len(args)} {each}" if fixed else each


def example(hint: Any, field: dataclasses.Field) -> str:
    """A setting that would be taken: the field's default where that says something."""
    default = field.default
    if default in (None, "", (), dataclasses.MISSING):
        option = options(hint)[0] if is_union(hint) else hint
        word = "PATH" if field.metadata.get("place") else "WORD"
        samples = {int: "8", float: "0.5", bool: "true", str: word}
        return f"{field.name}={samples.get(option, f'{word},{word}')}"
    return next(iter(forms(field.name, default, field)), f"{field.name}={default}")


def forms(name: str, value: Any, field: dataclasses.Field) -> Iterator[str]:
    """Ways to write a value, the shortest first; not every one need be read as it again."""
    if isinstance(value, tuple | list):
        if value and not isinstance(value[0], tuple | list):
            yield f"{name}={','.join(map(_plain, value))}"
        yield f"{name}={tuple(value)!r}"
    else:
        yield f"{name}={_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return quoted(value) if isinstance(value, str) else repr(value)


def quoted(text: str, *reserved: str) -> str:
    if text in reserved:
        return f"'{text}'"
    return f"{text[0]}{text}{text[0]}" if unquoted(text) != text else text


def shown(value: Any) -> str:
    """A value as a table has it: as it would be written behind `field=`, on one line."""
    if isinstance(value, tuple | list) and value and not isinstance(value[0], tuple | list):
        return one_line(", ".join(map(_plain, value)))
    return one_line(_plain(value))
