"""adapter_config.json as PEFT writes it: what is read, what is ignored, what is refused by name."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from molora_jax.adapters.names import (
    BASE_PREFIX,
    PROJECTIONS,
    module_name,
    nearest,
    shortened,
)

CONFIG_FILE = "adapter_config.json"

# Each changes what the adapter computes: the values under which it does not, and the way out.
_MERGE = "merge it into its base with PEFT (merge_and_unload) and load the result as a base"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), f"DoRA rescales every output row; {_MERGE}, or train plain LoRA"),
    "bias": (("none",), f"trained biases are not supported; {_MERGE}, or train with bias='none'"),
    "lora_bias": ((False,), f"a bias on lora_B is not supported; {_MERGE}"),
    "modules_to_save": (([],), f"fully trained modules are not supported; {_MERGE}"),
    "trainable_token_indices": (([], {}), f"trained token embeddings are not supported; {_MERGE}"),
    "target_parameters": (([],), f"LoRA on bare parameters is not supported; {_MERGE}"),
    "fan_in_fan_out": ((False,), "Llama and Qwen bases store weights (out, in): set it to false"),
    "layer_replication": (([],), f"replicated layers are not supported; {_MERGE}"),
    "alora_invocation_tokens": (([],), "activated LoRA starts in mid-sequence; retrain without it"),
    "use_qalora": ((False,), f"QALoRA pools the input; {_MERGE}"),
    "use_bdlora": ((False,), f"block-diagonal LoRA is not supported; {_MERGE}"),
    "arrow_config": ((False,), "Arrow mixes other adapters; load those and put a router over them"),
    "monteclora_config": ((False,), f"MonteCLoRA samples its weights; {_MERGE}"),
    "kasa_config": ((False,), f"KaSA adds a diagonal between B and A; {_MERGE}"),
}
_READ = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "init_lora_weights"),
    # Of no effect, and in every file: not worth a note.
    *("task_type", "inference_mode", "peft_version"),
}
# They concern training, or another setting that is refused; noted where set.
_NO_EFFECT = {
    *("auto_mapping", "revision", "lora_dropout", "megatron_config", "megatron_core"),
    *("loftq_config", "runtime_config", "eva_config", "corda_config", "lora_ga_config"),
    *("velora_config", "qalora_group_size", "ensure_weight_tying"),
}
_BASE_KEEPING_INITS = (None, True, False, "gaussian", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """What of an adapter_config.json decides the result; modules are as `layers.0.mlp.up_proj`."""

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

    def rank(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """alpha/r, or alpha/√r for rsLoRA (arXiv 2312.03732), with the module's own alpha and r."""
        alpha = _by_pattern(self.alpha_pattern, module, self.alpha)
        return lora_scale(alpha, self.rank(module), use_rslora=self.use_rslora)

    def targets(self, module: str) -> bool:
        """Whether PEFT would adapt this module: its rules for lists, a regex and "all-linear"."""
        name = BASE_PREFIX + module
        if self.exclude_modules and _listed(self.exclude_modules, name):
            return False
        if self.target_modules is None or is_all_linear(self.target_modules):
            return True
        if isinstance(self.target_modules, str) or name in self.target_modules:
            return _listed(self.target_modules, name)
        return _listed(self.target_modules, name) and self._in_layers(name)

    def _in_layers(self, name: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = self.layers_pattern or [r"[^.]*"]
        found = (re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", name) for p in patterns)
        layer = next((int(match[1]) for match in found if match), None)
        return layer in self.layers_to_transform

    def unused_keys(self, modules: Iterable[str]) -> list[str]:
        """Keys of the two patterns that match none of the modules, as `rank_pattern['...']`."""
        modules = list(modules)
        return [
            f"{name}[{key!r}]"
            for name in ("rank_pattern", "alpha_pattern")
            for key in getattr(self, name)
            if not any(_matches(key, module) for module in modules)
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
    notes: list[str] = []
    warnings: list[str] = []
    kind = config.get("peft_type")
    if kind is None:
        warnings.append("peft_type is missing; read as LORA")
    elif kind != "LORA":
        raise ValueError(f"{where}: peft_type is {kind!r}; only 'LORA' is supported")
    for name, (neutral, way_out) in _REFUSED.items():
        value = config.get(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            raise ValueError(f"{where}: {name} is {value!r}; {way_out}")
    if ignored := sorted(name for name in _NO_EFFECT if config.get(name)):
        notes.append("without effect on the result: " + ", ".join(ignored))
    _check_unknown(config, where, notes)
    init = config.get("init_lora_weights")
    if not any(init is value or init == value for value in _BASE_KEEPING_INITS):
        warnings.append(
            f"init_lora_weights is {init!r}: such training may change the base too, and then the "
            "adapter is right only if it was converted to plain LoRA when it was saved"
        )
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
    return LoraSettings(
        r=reader.rank("r", numbers["r"]),
        alpha=alpha,
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=reader.pattern("rank_pattern", reader.rank),
        alpha_pattern=reader.pattern("alpha_pattern", reader.number),
        target_modules=targets,
        exclude_modules=reader.names("exclude_modules"),
        layers_to_transform=reader.list_of("layers_to_transform", int),
        layers_pattern=reader.list_of("layers_pattern", str),
        base_name=config.get("base_model_name_or_path"),
        notes=notes,
        warnings=warnings,
    )


def new_config(
    ranks: Mapping[str, int],
    *,
    alpha: int | float,
    use_rslora: bool,
    base_name: str | None,
    num_layers: int | None,
) -> dict[str, Any]:
    """A complete adapter_config.json for modules of the given ranks.

    The commonest rank is `r`; the others go to rank_pattern under their whole names, which every
    version of PEFT matches. Where not all layers carry the same projections, target_modules lists
    whole names, so that PEFT adapts no module that has no tensors.
    """
    r = statistics.mode(ranks.values()) if ranks else 1
    projections = [p for p in PROJECTIONS if any(name.endswith(f".{p}") for name in ranks)]
    everywhere = {module_name(*each) for each in product(range(num_layers or 0), projections)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "auto_mapping": None,
        "inference_mode": True,
        "r": r,
        # Some readers take whole numbers only.
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "use_rslora": use_rslora,
        "rank_pattern": {BASE_PREFIX + name: rank for name, rank in ranks.items() if rank != r},
        "alpha_pattern": {},
        "target_modules": projections
        if everywhere == set(ranks)
        else [BASE_PREFIX + name for name in ranks],
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
        "bias": "none",
        "lora_bias": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "layer_replication": None,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
    }


def _matches(pattern: str, module: str) -> bool:
    """PEFT's rule: a regex for the whole name or, after a dot, its end; `^` means whole only."""
    return re.match(rf"(.*\.)?({pattern})$", BASE_PREFIX + module) is not None


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first key that matches, as in PEFT."""
    return next((value for key, value in patterns.items() if _matches(key, module)), default)


def _listed(names: list[str] | str, name: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return name in names or any(name.endswith(f".{each}") for each in names)


def _check_unknown(config: Mapping[str, Any], where: str, notes: list[str]) -> None:
    known = _READ | _NO_EFFECT | set(_REFUSED)
    unknown = {name: value for name, value in config.items() if name not in known}
    unset: tuple[Any, ...] = (None, [], {}, "")
    neutral = [name for name, value in unknown.items() if value in unset or value is False]
    if refused := [name for name in unknown if name not in neutral]:
        name = refused[0]
        near = nearest(name, known)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{where}: unknown field {name!r} is {unknown[name]!r}{hint}. It may change what the "
            "adapter computes, so it is refused; remove it, or set it to null, if it does not"
        )
    if neutral:
        notes.append("unknown fields, unset: " + shortened(sorted(neutral), limit=20))


@dataclass(frozen=True)
class _Reader:
    """Reads typed fields, and says which one is wrong."""

    config: Mapping[str, Any]
    where: str

    def _wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {value!r}; expected {expected}")

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, value: Any) -> int | float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(name, value, "a finite number")
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
        return [self._regex(name, each) for each in values] if kind is str else values

    def names(self, name: str) -> list[str] | str | None:
        """A list of names, or one regex, whose syntax is checked here."""
        value = self.config.get(name)
        if value is None or value == []:
            return None
        if isinstance(value, str):
            return value if is_all_linear(value) else self._regex(name, value)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, value, "a list of names, one regex, or 'all-linear'")
        return value

    def pattern(self, name: str, read) -> dict[str, Any]:
        value = self.config.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object from module names to numbers")
        return {
            self._regex(name, key): read(f"{name}[{key!r}]", each) for key, each in value.items()
        }

    def _regex(self, name: str, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise self._wrong(name, value, f"a regular expression ({error})") from error
        return value
