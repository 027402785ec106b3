"""Settings of training runs. They check themselves; units and meaning stand beside each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from molora_jax.adapters import PROJECTIONS
from molora_jax.adapters.names import nearest
from molora_jax.routing.select import GATES


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every training run reads.

    steps             optimiser steps; a router keeps its initial values with 0
    lr                peak learning rate: linear warm-up, then cosine decay towards 0
    warmup_steps      steps until the peak; the first step has lr / warmup_steps
    weight_decay      decoupled (AdamW), times the learning rate
    clip              largest global norm of the gradient
    batch_size        rows of one forward and backward pass
    accumulate        passes whose gradients make one step, weighed by their target tokens
    seed              of the initial values and of the order of the data
    checkpoint_every  steps between checkpoints, the last step included; 0 writes none
    """

    steps: int = 40
    lr: float = 1e-3
    warmup_steps: int = 5
    weight_decay: float = 0.0
    clip: float = 1.0
    batch_size: int = 2
    accumulate: int = 1
    seed: int = 0
    checkpoint_every: int = 0

    def __post_init__(self):
        for name, least in {
            "steps": 0,
            "warmup_steps": 0,
            "batch_size": 1,
            "accumulate": 1,
            "seed": 0,
            "checkpoint_every": 0,
        }.items():
            _whole(self, name, least=least)
        _positive(self, "lr", "clip")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay!r}")

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True, kw_only=True)
class AdapterTrainConfig(TrainConfig):
    """How one adapter is trained; `TrainConfig` says what the other fields are.

    rank         r
    alpha        scale is alpha / rank, or alpha / √rank with use_rslora
    projections  which of the seven are adapted

        >>> config = mj.AdapterTrainConfig(rank=4, alpha=8.0, steps=10, warmup_steps=5)
        >>> config.lr_at(0), config.lr_at(4)
        (0.0002, 0.001)
    """

    rank: int = 8
    alpha: float = 16.0
    projections: Sequence[str] = PROJECTIONS
    use_rslora: bool = False

    def __post_init__(self):
        super().__post_init__()
        _whole(self, "steps", least=1)
        _whole(self, "rank", least=1)
        _positive(self, "alpha")
        if isinstance(self.projections, str) or not self.projections:
            raise ValueError(
                f"projections must be a list of some of {', '.join(PROJECTIONS)}, got "
                f"{self.projections!r}"
            )
        for name in self.projections:
            if name not in PROJECTIONS:
                near = nearest(str(name), PROJECTIONS)
                raise ValueError(
                    f"projections has {name!r}"
                    + (f"; did you mean {near[0]!r}?" if near else ".")
                    + f" Known are {', '.join(PROJECTIONS)}"
                )
        # A set, so that the same ones in any order are the same training.
        ordered = tuple(name for name in PROJECTIONS if name in self.projections)
        object.__setattr__(self, "projections", ordered)


@dataclass(frozen=True, kw_only=True)
class AnnealedConfig(TrainConfig):
    """A training of a router whose temperature falls.

    temperature  (first, last): what the router's logits are divided by. It falls geometrically
                 until `anneal` of the steps are done, and the last one is folded into the router's
                 weights
    anneal       share of the steps in which it falls
    """

    temperature: tuple[float, float] = (1.0, 1.0)
    anneal: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        _positive(self, "anneal")
        given = self.temperature
        numbers = isinstance(given, tuple | list) and all(
            isinstance(each, int | float) and 1e-3 <= each <= 1e3 for each in given
        )
        if not numbers or len(given) != 2:
            raise ValueError(
                f"{type(self).__name__}.temperature must be two numbers from 0.001 to 1000, the "
                f"first and the last, got {given!r}"
            )

    @property
    def held_steps(self) -> int:
        """Steps at the start in which the router stands still."""
        return 0

    def temperature_at(self, step: int) -> float:
        """Temperature of a step, counted from 0."""
        first, last = self.temperature
        whole = max(self.anneal * self.steps - self.held_steps, 1)
        share = min(max((step - self.held_steps) / whole, 0.0), 1.0)
        return first * (last / first) ** share


@dataclass(frozen=True, kw_only=True)
class RouterTrainConfig(AnnealedConfig):
    """How a router is trained; the base classes say what the other fields are.

    steps          gradient steps through the model; 0 keeps the start
    top_k          adapters per token at evaluation
    width          hidden units of the router; with start="ridge" at least two an adapter
    after_layer    None: a decision in every layer. n: one decision, from the output of layer n;
                   −1: from the embedding
    gate           "softmax", or "unit", which is trained at top_k and not densely
    start          "ridge" (closed form, reads labels) or "random"
    start_states   layer inputs that the start reads: "oracle" (each token through its own adapter,
                   as a good router will have it) or "base". With after_layer no adapter comes
                   before the decision, so they are the base's
    start_rows     rows read for the start, a sixth of them to set how sharp the gates are
    ridge          λ in units of a feature's mean square
    feature_steps  gradient steps on those stored layer inputs, against the label, without passes
                   through the model; the inputs are then held in memory (4·L·D bytes a token)
    label_coef     × cross-entropy against the adapter whose own data a token came from
    balance_coef   × K·Σ f·p;    z_coef  × router z-loss
    joined_share   share of the rows that change domain in the middle
    joined_split   where they change: "half" or "random"
    collapse_share  a warning is given when one adapter takes more of a layer's tokens

        >>> mj.RouterTrainConfig(steps=0, top_k=1).label_use()
        'own-data label used: closed-form start'
    """

    steps: int = 20
    lr: float = 3e-3
    top_k: int = 2
    width: int = 64
    after_layer: int | None = None
    gate: str = "softmax"
    start: Literal["ridge", "random"] = "ridge"
    start_states: Literal["oracle", "base"] = "oracle"
    start_rows: int = 96
    ridge: float = 1e-2
    feature_steps: int = 0
    label_coef: float = 0.1
    balance_coef: float = 0.0
    z_coef: float = 0.0
    joined_share: float = 1 / 3
    joined_split: Literal["half", "random"] = "random"
    collapse_share: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        for name, known in {
            "gate": GATES,
            "start": ("ridge", "random"),
            "start_states": ("oracle", "base"),
            "joined_split": ("half", "random"),
        }.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        _whole(self, "top_k", least=1)
        # The solved start takes two hidden units an adapter, and there are two or more of these.
        _whole(self, "width", least=4 if self.start == "ridge" else 1)
        _whole(self, "start_rows", least=6)
        _whole(self, "feature_steps", least=0)
        for name in ("label_coef", "balance_coef", "z_coef", "ridge"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if not 0 <= self.joined_share < 1:
            raise ValueError(f"joined_share must be in [0, 1), got {self.joined_share!r}")
        if not 0 < self.collapse_share <= 1:
            raise ValueError(f"collapse_share must be in (0, 1], got {self.collapse_share!r}")

    def uses_labels(self) -> bool:
        """Whether training reads the adapter's-own-data label anywhere."""
        in_loss = self.steps > 0 and self.label_coef > 0
        return self.start == "ridge" or self.feature_steps > 0 or in_loss

    def label_use(self) -> str:
        """Where training reads the adapter's-own-data label, in words for a report."""
        uses = []
        if self.start == "ridge":
            uses.append("closed-form start")
        if self.feature_steps:
            uses.append(f"{self.feature_steps} steps on stored layer inputs")
        if self.steps and self.label_coef:
            uses.append(f"loss ({self.label_coef:g} × cross-entropy)")
        return f"own-data label used: {', '.join(uses) or 'no'}"


def _whole(config: Any, name: str, *, least: int) -> None:
    """Raises ValueError unless field `name` of `config` is an integer of at least `least`."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{type(config).__name__}.{name} must be an integer of at least {least}, got {value!r}"
        )


def _positive(config: Any, *names: str) -> None:
    """Raises ValueError unless the fields `names` of `config` are positive, finite numbers."""
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(
                f"{type(config).__name__}.{name} must be a positive number, got {value!r}"
            )
