"""The fields of an experiment's Config for people: type, value, and what its docstring says."""

import dataclasses
import fnmatch
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import field_types
from molora_jax import display

LONGEST_VALUE = 48  # letters of a value that are shown


def described(config_type: type) -> dict[str, str]:
    """What each field is, by the docstrings of the Config and of what it inherits from.

    An entry is a line `name  what it is`, with the lines that are indented below it. It may have
    several names, `a, b`, or a pattern, `adapter_*`, and be followed by `;  name  what it is`.
    """
    names = [field.name for field in dataclasses.fields(config_type)]
    found = {"seed": "of data, initialisation and training"}
    for each in reversed(config_type.__mro__):
        if dataclasses.is_dataclass(each) and each.__doc__:
            found |= _entries(inspect.cleandoc(each.__doc__), names)
    return found


def _entries(doc: str, names: Sequence[str]) -> dict[str, str]:
    by_pattern: dict[str, str] = {}
    by_name: dict[str, str] = {}
    heads: list[tuple[list[str], list[str]]] = []
    for line in doc.splitlines():
        head = re.fullmatch(r"([a-z]\w*\*?(?:, [a-z]\w*\*?)*)(?:  +(\S.*))?", line)
        if head and all(fnmatch.filter(names, name) for name in head[1].split(", ")):
            heads.append((head[1].split(", "), [head[2] or ""]))
        elif heads and line.startswith(" "):
            heads[-1][1].append(line.strip())
        else:
            heads.append(([], []))  # a sentence of the docstring
    for patterns, lines in heads:
        first, *more = re.split(r";  +(\w+)  +", " ".join(line for line in lines if line))
        for pattern in patterns:
            for name in fnmatch.filter(names, pattern):
                (by_name if name == pattern else by_pattern)[name] = first
        by_name |= dict(zip(more[::2], more[1::2], strict=True))
    return by_pattern | by_name


def table(config_type: type, values: Mapping[str, Any], *, title: str) -> display.Table:
    """A row a field, those of the experiment's own first: name, type, value and what it is."""
    hints, texts = typing.get_type_hints(config_type), described(config_type)
    by_name = {field.name: field for field in dataclasses.fields(config_type)}
    own = {name: by_name[name] for name in inspect.get_annotations(config_type)}
    rows = []
    for field in (own | by_name).values():
        value = field_types.shown(values[field.name])
        if len(value) > LONGEST_VALUE:
            value = f"{value[: LONGEST_VALUE - 1]}…"
        kind = field_types.kind(hints[field.name], field).removeprefix("a ")
        rows.append([field.name, kind, value, texts.get(field.name, "")])
    return display.Table(["field", "type", "value", "what it is"], rows, title=title)
