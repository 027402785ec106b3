"""The part of adapter_config.json that decides the result: ranks, scales and targets per module."""

import functools
import math
import re
import warnings as python_warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from molora_jax.adapters.lora_fields import check_fields
from molora_jax.adapters.names import brief
from molora_jax.adapters.regex_cost import may_take_forever


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What of an adapter_config.json decides the result, read as PEFT reads it.

    Its methods take a module's whole name in the base that the file was made for, as in
    `model.layers.0.mlp.up_proj`: PEFT matches patterns and targets against that.
    """

    r: int
    alpha: int | float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, int | float]
    target_modules: list[str] | str | None
    exclude_modules: list[str] | str | None
    layers_to_transform: list[int]
    layers_pattern: list[str]
    base_name: str | None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def rank(self, path: str) -> int:
        return _by_pattern(self.rank_pattern, path, self.r)

    def scale(self, path: str) -> float:
        """alpha/r, or alpha/√r for rsLoRA (arXiv 2312.03732), with the module's own alpha and r."""
        alpha = _by_pattern(self.alpha_pattern, path, self.alpha)
        return lora_scale(alpha, self.rank(path), use_rslora=self.use_rslora)

    def targets(self, path: str) -> bool:
        """Whether PEFT would adapt this module: its rules for lists, a regex and "all-linear"."""
        if self.exclude_modules and _listed(self.exclude_modules, path):
            return False
        if self.target_modules is None or is_all_linear(self.target_modules):
            return True
        if isinstance(self.target_modules, str) or path in self.target_modules:
            return _listed(self.target_modules, path)
        return _listed(self.target_modules, path) and self._in_layers(path)

    def _in_layers(self, path: str) -> bool:
        if not self.layers_to_transform:
            return True
        # Without layers_pattern PEFT wants something before the list of layers, too.
        forms = [rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in self.layers_pattern] or [
            r".*?\.[^.]*\.(?P<idx>\d+)\."
        ]
        found = (_compiled(form).match(path) for form in forms)
        layer = next((int(match["idx"]) for match in found if match and match["idx"]), None)
        return layer in self.layers_to_transform

    def unused_keys(self, paths: Iterable[str]) -> list[str]:
        """Keys of the two patterns that match none of the modules, as `rank_pattern['...']`."""
        paths = list(paths)
        return [
            f"{name}[{brief(key)}]"
            for name in ("rank_pattern", "alpha_pattern")
            for key in getattr(self, name)
            if not any(_matches(key, path) for path in paths)
        ]


def lora_scale(alpha: int | float, rank: int, *, use_rslora: bool = False) -> float:
    """The factor on B·A: alpha/r, or alpha/√r for rsLoRA."""
    return float(alpha) / (math.sqrt(rank) if use_rslora else rank)


def is_all_linear(targets: list[str] | str | None) -> bool:
    """PEFT's word for every projection but the output layer's."""
    return isinstance(targets, str) and targets.lower() == "all-linear"


def read_config(config: Mapping[str, Any], *, where: str) -> LoraSettings:
    """Reads an adapter_config.json; ValueError for whatever would change the result unseen."""
    reader = _Reader(config, where)
    notes, warnings = check_fields(config, where=where)
    numbers = {name: config.get(name) for name in ("r", "lora_alpha")}
    for name, value in numbers.items():
        if value is None:
            warnings.append(f"{name} is missing; PEFT's default 8 is used")
            numbers[name] = 8
    targets = reader.names("target_modules")
    if targets is None:
        warnings.append("target_modules is missing; the tensors in the file decide")
    alpha = reader.number("lora_alpha", numbers["lora_alpha"])
    if alpha == 0:
        warnings.append("lora_alpha is 0: the adapter changes nothing")
    layers = reader.list_of("layers_to_transform", int)
    if isinstance(targets, str) and layers:
        raise ValueError(
            f"{where}: layers_to_transform is {brief(layers)} beside target_modules "
            f"{brief(targets)}; PEFT takes it only with a list of names. Give the list, or put the "
            "layers into the regex"
        )
    return LoraSettings(
        r=reader.rank("r", numbers["r"]),
        alpha=alpha,
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=reader.pattern("rank_pattern", reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", reader.number),
        target_modules=targets,
        exclude_modules=reader.names("exclude_modules"),
        layers_to_transform=layers,
        layers_pattern=reader.list_of("layers_pattern", str),
        base_name=reader.text("base_model_name_or_path"),
        notes=notes,
        warnings=warnings,
    )


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    with python_warnings.catch_warnings():
        # Python's words on a doubtful set, '[[a]', would reach the user without the file's name.
        python_warnings.simplefilter("ignore")
        return re.compile(pattern)


def _whole_or_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _matches(pattern: str, path: str) -> bool:
    """PEFT's rule: a regex for the whole name or, after a dot, its end; `^` means whole only."""
    return _compiled(_whole_or_end(pattern)).match(path) is not None


def _by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """The value of the first key that matches, as in PEFT."""
    return next((value for key, value in patterns.items() if _matches(key, path)), default)


def _listed(names: list[str] | str, path: str) -> bool:
    if isinstance(names, str):
        return _compiled(names).fullmatch(path) is not None
    return path in names or any(path.endswith(f".{each}") for each in names)


@dataclass(frozen=True)
class _Reader:
    """Reads typed fields, and says which one is wrong."""

    config: Mapping[str, Any]
    where: str

    def _wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {brief(value)}; expected {expected}")

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, value: Any) -> int | float:
        try:
            finite = type(value) in (int, float) and math.isfinite(value)
        except OverflowError:  # an integer beyond every float
            finite = False
        if not finite:
            raise self._wrong(name, value, "a finite number")
        return value

    def text(self, name: str) -> str | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def list_of(self, name: str, kind: type) -> list:
        """A list, which PEFT also takes as its one element; null is empty."""
        value = self.config.get(name)
        values = value if isinstance(value, list) else [] if value in (None, "") else [value]
        if not all(type(each) is kind for each in values):
            raise self._wrong(name, value, f"a list of {kind.__name__}")
        if kind is str:
            for each in values:
                self._check_regex(name, each, rf"(?:^|.*?\.){each}\.(?P<idx>\d+)\.")
        return values

    def names(self, name: str) -> list[str] | str | None:
        """A list of names, or one regex, whose syntax is checked here."""
        value = self.config.get(name)
        if value is None or value == []:
            return None
        if isinstance(value, str):
            if not is_all_linear(value):
                self._check_regex(name, value, value)
            return value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, value, "a list of names, one regex, or 'all-linear'")
        return value

    def pattern(self, name: str, read) -> dict[str, Any]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object from module names to numbers")
        for key in value:
            self._check_regex(name, key, _whole_or_end(key))
        return {key: read(f"{name}[{brief(key)}]", each) for key, each in value.items()}

    def _check_regex(self, name: str, value: str, whole: str) -> None:
        """Compiles the form in which it will be used: a flag in mid-pattern shows only there."""
        try:
            _compiled(whole)
            slow = may_take_forever(whole)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._wrong(name, value, f"a regular expression ({error})") from error
        if slow:
            expected = "a regular expression without nested repetitions, which may take for ever"
            raise self._wrong(name, value, expected)
