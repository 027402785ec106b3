"""Settings of a command line: `field=value` is read, and written, by the field's annotation."""

import ast
import collections.abc
import dataclasses
import difflib
import math
import os
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import registry
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
    try:
        if field.metadata.get("texts"):  # free text: every word is one of them, commas and all
            return () if text == "()" else (_unquoted(text),)
        comma = "," in text and _is_several(hint)
        if comma and field.metadata.get("place") and os.path.exists(os.path.expanduser(text)):
            raise ValueError("a file has that name, and commas part paths: ")
        return _value(text, hint)
    except (ValueError, TypeError) as error:
        said = "" if isinstance(error, TypeError) else str(error)  # what fit() says is said below
        start = f"{one_line(f'{field.name}={text}')}{' is empty' if not text.strip() else ''}"
        wanted = f"expected {kind(hint, field)}, as in {_example(hint, field)}"
        raise Misuse(f"{start}: {said}{wanted}") from None


def _value(text: str, hint: Any) -> Any:
    """`text` as `hint` has it; ValueError where it is none, with the reason if there is one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        if text == "None" and type(None) in args:
            return None
        (first, *_) = _options(hint)
        return _value(text, first)
    if origin is typing.Literal:
        named = {str(each): each for each in args}
        if _unquoted(text) not in named:
            close = registry.nearest(text, named, count=1)
            raise ValueError(f"did you mean {close[0]}? " if close else "")
        return named[_unquoted(text)]
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
    return _unquoted(text)


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
    if _is_several(args[0]):
        raise ValueError
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ValueError("a value is empty, and for none there is (): " if text else "")
    for item in items:
        if _unquoted(item) == item and (item[0] in "'\"" or item[-1] in "'\""):
            raise ValueError("values with quotes or commas in them need a Python list: ")
    return tuple(_value(item, args[0]) for item in items)


def _unquoted(text: str) -> str:
    """A text less one pair of quotes around the whole; `'a' or 'b'` has no such pair."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        inner, quote = text[1:-1], text[0]
        # The second: so that every text, whatever quotes it has, can be written.
        if quote not in inner or (len(inner) > 1 and inner[0] == inner[-1] == quote):
            return inner
    return text


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _options(hint: Any) -> list[Any]:
    return [each for each in typing.get_args(hint) if each is not type(None)]


def _is_several(hint: Any) -> bool:
    options = _options(hint) if _is_union(hint) else [hint]
    return any(typing.get_origin(o) in (tuple, collections.abc.Sequence) for o in options)


# --- in words -------------------------------------------------------------------------------------

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
    if field.metadata.get("place"):
        return "paths" if _is_several(hint) else "a path"
    if _is_union(hint):
        return f"{kind(_options(hint)[0], field)} or None"
    return _plural(hint) if _is_several(hint) else _singular(hint)


def _singular(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        *some, last = map(str, typing.get_args(hint))
        return f"{', '.join(some)} or {last}" if some else last
    if _is_several(hint):
        return _plural(hint)
    return _KINDS[hint][0]


def _plural(hint: Any) -> str:
    """ "whole numbers", "2 numbers", "3 tuples of 4 whole numbers"."""
    args = [each for each in typing.get_args(hint) if each is not Ellipsis]
    first = args[0]
    if typing.get_origin(first) is typing.Literal:
        return f"some of {', '.join(map(str, typing.get_args(first)))}"
    each = f"tuples of {_plural(first)}" if _is_several(first) else _KINDS[first][1]
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in typing.get_args(hint)
    return f"{len(args)} {each}" if fixed else each


def _example(hint: Any, field: dataclasses.Field) -> str:
    """A setting that would be taken: the field's default where that says something."""
    default = field.default
    if default in (None, "", (), dataclasses.MISSING):
        option = _options(hint)[0] if _is_union(hint) else hint
        word = "FOLDER" if field.metadata.get("place") else "WORD"
        samples = {int: "8", float: "0.5", bool: "true", str: word}
        return f"{field.name}={samples.get(option, f'{word},{word}')}"
    return next(iter(_forms(field.name, default, field)), f"{field.name}={default}")


# --- and written again ----------------------------------------------------------------------------


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
        yield [f"{name}={_quoted(each, '()')}" for each in given] or [f"{name}=()"]
    else:
        yield from ([form] for form in _forms(name, value, field))


def _forms(name: str, value: Any, field: dataclasses.Field) -> Iterator[str]:
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
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str, *reserved: str) -> str:
    if text in reserved:
        return f"'{text}'"
    return f"{text[0]}{text}{text[0]}" if _unquoted(text) != text else text


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
    return f"{registry.program()} {shlex.join(words)}"


def shown(value: Any) -> str:
    """A value as a table has it: as it would be written behind `field=`, on one line."""
    if isinstance(value, tuple | list) and value and not isinstance(value[0], tuple | list):
        return one_line(", ".join(map(_plain, value)))
    return one_line(_plain(value))
