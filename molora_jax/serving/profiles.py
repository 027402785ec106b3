"""Routing profiles from files: a saved composition, a table of token ranges, control tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from molora_jax.adapters import Adapter, Composition
from molora_jax.adapters.names import brief, nearest
from molora_jax.files import read_json
from molora_jax.generation import Profile
from molora_jax.models import BaseModel
from molora_jax.routing import ControlTokenRouter, VocabularyRouter


def read_composition(path: str | Path, base: BaseModel) -> tuple[Profile, dict[str, Adapter]]:
    """A saved composition as a profile that takes no other content, and its adapters by name.

    Raises as `Composition.load`.
    """
    whole = Composition.load(path, base)
    adapters = {each.name: each.adapter for each in whole.bank.list()}
    names = [name for name in whole.column_names if name is not None]
    profile = Profile(router=whole.router, adapters=names, digests=whole.column_digests)
    return profile, adapters


def read_vocabulary(path: str | Path, base: BaseModel) -> Profile:
    """Token ids to adapters: {"ranges": [{"start": 0, "stop": 256, "adapter": "text"}, …]}.

    start ≤ id < stop; ids in no range use the base. Raises ValueError naming file and entry for
    ranges that are empty, overlap or leave the vocabulary.
    """
    where, content = str(path), _object(path, ("ranges",))
    entries = content["ranges"]
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{where}: ranges is {brief(entries)}; expected a list of ranges")
    names: list[str] = []
    ranges = []
    for index, entry in enumerate(entries):
        here = f"{where}: ranges[{index}]"
        if not isinstance(entry, dict) or entry.keys() != {"start", "stop", "adapter"}:
            raise ValueError(f"{here} is {brief(entry)}; expected start, stop and adapter")
        bounds = entry["start"], entry["stop"]
        if any(type(each) is not int for each in bounds):
            raise ValueError(f"{here}: start and stop are {bounds}; expected token ids")
        ranges.append((*bounds, _column(entry["adapter"], names, f"{here}: adapter")))
    size = base.config.vocab_size
    router = _in(where, lambda: VocabularyRouter.from_ranges(ranges, vocab_size=size))
    return Profile(router=router, adapters=names)


def read_control(path: str | Path, base: BaseModel) -> Profile:
    """Tokens that switch adapters on: {"tokens": {"<|im_start|>": "chat"}, "initial": null}.

    A token is written as its text or its id; null switches to the base, which is also what serves
    before the first of them unless `initial` names an adapter. Raises ValueError naming file and
    entry for a text that is not one token.
    """
    where, content = str(path), _object(path, ("tokens",), optional=("initial",))
    tokens = content["tokens"]
    if not isinstance(tokens, dict) or not tokens:
        raise ValueError(f"{where}: tokens is {brief(tokens)}; expected adapters by token")
    names: list[str] = []
    switches = {}
    for text, adapter in tokens.items():
        token = _token(text, base, where)
        if token in switches:
            raise ValueError(f"{where}: tokens names the token {token} twice, once as {text!r}")
        switches[token] = _column(adapter, names, f"{where}: tokens[{brief(text)}]", none=True)
    initial = _column(content.get("initial"), names, f"{where}: initial", none=True)
    if not names:
        raise ValueError(f"{where}: tokens switch to no adapter, only to the base")
    size = base.config.vocab_size
    router = _in(
        where, lambda: ControlTokenRouter.from_tokens(switches, vocab_size=size, initial=initial)
    )
    return Profile(router=router, adapters=names)


def _object(
    path: str | Path, required: tuple[str, ...], *, optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    content = read_json(path, where=str(path))
    known = (*required, *optional)
    if missing := [name for name in required if name not in content]:
        raise ValueError(f"{path}: {missing[0]} is missing; expected {', '.join(known)}")
    if unknown := [name for name in content if name not in known]:
        near = nearest(unknown[0], known)
        hint = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(known)}"
        raise ValueError(f"{path}: unknown field {brief(unknown[0])}{hint}")
    return content


def _column(name: Any, names: list[str], where: str, *, none: bool = False) -> int:
    """The column of an adapter's name, a new one for a new name; −1 for null where that may be."""
    if name is None and none:
        return -1
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} is {brief(name)}; expected an adapter's name")
    if name not in names:
        names.append(name)
    return names.index(name)


def _token(text: str, base: BaseModel, where: str) -> int:
    token = base.tokenizer.backend.token_to_id(text)
    if token is None and text.isascii() and text.isdigit():
        token = int(text)
    if token is None:
        raise ValueError(
            f"{where}: {brief(text)} is no token of the base's vocabulary: write a token's whole "
            "text, or its id"
        )
    return token


def _in(where: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
