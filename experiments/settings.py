"""Settings of a command line: `field=value` is read, and written, by the field's annotation."""

import ast
import collections.abc
import dataclasses
import difflib
import math
import os
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import registry
from experiments.field_types import (
    example,
    forms,
    is_several,
    is_union,
    kind,
    options,
    quoted,
    unquoted,
)
from experiments.registry import Misuse, one_line

# What fields of ours are called in PEFT, transformers and TRL; for hints alone.
USUAL_NAMES = {
    "base_model": "base",
    "base_model_name_or_path": "base",
    "cutoff_len": "seq_len",
    "dataset": "data",
    "eval_dataset": "heldout",
    "eval_file": "heldout",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_r": "rank",
    "lora_rank": "rank",
    "max_grad_norm": "clip",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "max_steps": "steps",
    "model_name_or_path": "base",
    "num_steps": "steps",
    "output_dir": "out",
    "per_device_train_batch_size": "batch_size",
    "r": "rank",
    "save_steps": "checkpoint_every",
    "seq_length": "seq_len",
    "target_modules": "projections",
    "train_batch_size": "batch_size",
    "train_dataset": "data",
    "train_file": "data",
    "warmup": "warmup_steps",
}


def read(module: Any, words: Sequence[str]) -> dict[str, Any]:
    """What words `field=value` set: {field: value}.

    Several of a field that holds several values add up; of any other they are refused.

    Raises:
      Misuse: a field is not known or is set twice, or a value does not fit it.
    """
    hints = typing.get_type_hints(module.Config)
    fields = {field.name: field for field in dataclasses.fields(module.Config)}
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in fields:
            raise Misuse(_unknown(name, word, module, fields))
        value = _read(text, hints[name], fields[name])
        if name in values:
            if not isinstance(value, tuple) or not isinstance(values[name], tuple):
                raise Misuse(f"{one_line(word)}: {name} is set twice, and holds one value")
            value = values[name] + value
        values[name] = value
    return values


def _unknown(name: str, word: str, module: Any, fields: Mapping[str, Any]) -> str:
    """What to say of a word that sets nothing."""
    if not name:
        return f"{one_line(word)!r}: expected field=value, as in seed=3"
    last = re.split(r"[./]", name)[-1]
    if last != name and last in fields:
        alone = one_line(word[len(name) - len(last) :])
        return f"{one_line(word)}: a field stands by its name alone; write {alone}"
    near = nearest_fields(name, module)
    return f"{one_line(word)}: there is no such field{near} (--fields describes them)"


def nearest_fields(binding: str, module: Any, *, prefix: str = "") -> str:
    """A hint for a misspelt field or binding: its field's name counts, not what stands before."""
    names = [field.name for field in dataclasses.fields(module.Config)]
    elsewhere = {other: name for other, name in USUAL_NAMES.items() if name in names}
    wanted = re.split(r"[./]", binding)[-1]
    usual = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.8)
    close = [elsewhere[name] for name in usual] or registry.nearest(wanted, names)
    listed = [prefix + name for name in close or names]
    return f"; did you mean {' or '.join(listed)}?" if close else f"; known are {', '.join(listed)}"


def _read(text: str, hint: Any, field: dataclasses.Field) -> Any:
    """The value that a text stands for; Misuse with its type and an example where it is none."""
    if field.metadata.get("texts"):  # free text: every word is one of them, commas and all
        return () if text == "()" else (unquoted(text),)
    several_paths = field.metadata.get("place") and is_several(hint)
    if several_paths and "," in text and os.path.exists(os.path.expanduser(text)):
        literal = quoted_for_shell(f"{field.name}={[text]!r}")
        raise Misuse(
            f"{field.name}={one_line(text)}: a file has that name, and commas part paths; "
            f"write {literal}"
        )
    try:
        return _value(text, hint)
    except (ValueError, TypeError) as error:
        said = "" if isinstance(error, TypeError) else str(error)  # what fit() says is said below
        start = f"{one_line(f'{field.name}={text}')}{' is empty' if not text.strip() else ''}"
        wanted = f"expected {kind(hint, field)}, as in {example(hint, field)}"
        raise Misuse(f"{start}: {said}{wanted}") from None


def _value(text: str, hint: Any) -> Any:
    """`text` as `hint` has it; ValueError where it is none, with the reason if there is one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_union(hint):
        if text == "None" and type(None) in args:
            return None
        (first, *_) = options(hint)
        return _value(text, first)
    if origin is typing.Literal:
        named = {str(each): each for each in args}
        if unquoted(text) not in named:
            close = registry.nearest(text, named, count=1)
            raise ValueError(f"did you mean {close[0]}? " if close else "")
        return named[unquoted(text)]
    if hint is bool:
        if text not in ("true", "True", "false", "False"):
            raise ValueError
        return text in ("true", "True")
    if hint in (int, float):
        try:
            number = hint(text) if text.isascii() else math.nan
        except ValueError:  # its own words say less
            raise ValueError from None
        if not math.isfinite(number):
            raise ValueError
        return number
    if origin in (tuple, collections.abc.Sequence):
        return _several(text.strip(), hint, args)
    return unquoted(text)


def _several(text: str, hint: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values with commas between them, or a Python list or tuple in brackets."""
    if re.fullmatch(r"\(.*\)|\[.*\]", text, re.DOTALL):  # also (1, 2), (3, 4)
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            said = "in brackets it is Python, where texts have quotes; without, they need none: "
            raise ValueError(said) from None
        if not isinstance(value, tuple | list):
            raise ValueError("a single value in brackets has a comma behind it: ")
        sizes = args if Ellipsis not in args and len(args) == len(value) else None
        each = sizes or (args[0],) * len(value)
        return tuple(registry.fit(item, one) for item, one in zip(value, each, strict=True))
    if is_several(args[0]):
        raise ValueError
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError("a value is empty, and for none there is (): " if text else "")
    for item in items:
        if unquoted(item) == item and (item[0] in "'\"" or item[-1] in "'\""):
            raise ValueError("values with quotes or commas in them need a Python list: ")
    return tuple(_value(item, args[0]) for item in items)


def written(module: Any, name: str, value: Any) -> list[str]:
    """The words that set a field to a value: `field=value`, or a binding of gin where only that can
    hold it on one line (a text with line breaks)."""
    (field,) = [each for each in dataclasses.fields(module.Config) if each.name == name]
    for words in _forms_of_words(name, value, field):
        try:
            if "".join(words).isprintable() and read(module, words)[name] == value:
                return words
        except Misuse:
            continue
    short = module.__name__.rpartition(".")[2]
    return [f"--gin_bindings={short}.Config.{name} = {value!r}"]


def _forms_of_words(name: str, value: Any, field: dataclasses.Field) -> Iterator[list[str]]:
    if field.metadata.get("texts"):
        given = (value,) if isinstance(value, str) else value
        yield [f"{name}={quoted(each, '()')}" for each in given] or [f"{name}=()"]
    else:
        yield from ([form] for form in forms(name, value, field))


def command(
    experiment: str, config: Any, own: Mapping[str, Any], *, module: Any, scale: str
) -> str:
    """The line for a shell that makes a run again.

    Args:
      own: the experiment's own values at that scale; what is as there is left out.
    """
    hints = typing.get_type_hints(type(config))
    set_to = {name: getattr(config, name) for name in own}
    for name, value in own.items():
        if registry.fit(value, hints[name]) == set_to[name]:
            del set_to[name]
    # A field that is None until the config itself puts something in its place.
    for name in [name for name in set_to if own[name] is None]:
        less = {other: value for other, value in set_to.items() if other != name}
        try:
            if type(config)(**{**own, **less}) == config:
                set_to = less
        except ValueError:
            continue
    words = [f"--experiment={experiment}", *([f"--scale={scale}"] if scale != "cpu" else [])]
    for name, value in set_to.items():
        words += written(module, name, value)
    return f"{registry.program()} {' '.join(map(quoted_for_shell, words))}"


def quoted_for_shell(word: str) -> str:
    """shlex.quote, but in double quotes where they do: `"data=['a,b']"`."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)
