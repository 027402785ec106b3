"""One LoRA adapter on the host, as PEFT stores it: A, B and scale per module, with its identity."""

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from molora_jax.adapters.lora_config import lora_scale
from molora_jax.adapters.lora_describe import fitted_config, new_config
from molora_jax.adapters.names import (
    PROJECTIONS,
    check_label,
    is_module,
    module_name,
    shortened,
    split_module,
)
from molora_jax.routing.statistics_file import PackedStatistics

FLOAT_TYPES = ("float16", "bfloat16", "float32", "float64")


@runtime_checkable
class BaseShape(Protocol):
    """What adapters need to know of a base model; molora_jax.models.ModelConfig is one.

    A protocol, because the decoder imports this package and imports point one way.
    """

    num_layers: int

    def projection_sizes(self) -> dict[str, tuple[int, int]]:
        """Input and output width (D, F) per projection."""
        ...


@dataclass(frozen=True, eq=False)
class LoraPair:
    """One module's update ΔW = scale · B·A, in PEFT's layout; the layer adds scale · B·(A·x).

    a (r, D), b (F, r) in the dtype they were stored in; `scale` is the only place where alpha and
    rank meet, so nothing downstream computes it again. The arrays are copied and read-only: the
    digest of an adapter would otherwise not speak of its content.
    """

    a: Float[np.ndarray, "r D"]
    b: Float[np.ndarray, "F r"]
    scale: float

    def __post_init__(self):
        for name in ("a", "b"):
            array = np.array(getattr(self, name), order="C")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
            if array.dtype.name not in FLOAT_TYPES:
                raise ValueError(f"lora_{name.upper()} is {array.dtype}; expected a floating type")
        matrices = self.a.ndim == 2 and self.b.ndim == 2
        if not matrices or len(self.a) != self.b.shape[1] or not self.a.size:
            raise ValueError(
                f"lora_A {self.a.shape} and lora_B {self.b.shape} do not make an update: expected "
                "A (r, in) and B (out, r) with one rank r >= 1, as PEFT stores them"
            )
        if not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; expected a finite number")

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter. The name is a label; `digest` (sha256 of modules and scales) is the identity.

    modules     {"layers.3.self_attn.q_proj": LoraPair}, in the order of layers and PROJECTIONS
    config      the adapter_config.json it has in a PEFT folder
    statistics  what a router must know of its data, where it came with them (`with_statistics`)

        >>> a, b = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)  # A (r, D), B (F, r)
        >>> mj.Adapter.from_arrays("ones", {"layers.0.self_attn.q_proj": (a, b)}, alpha=4).rank
        2
    """

    name: str
    modules: Mapping[str, LoraPair]
    config: Mapping[str, Any]
    digest: str = field(init=False)
    statistics: PackedStatistics | None = field(init=False, default=None)

    def __post_init__(self):
        check_label(self.name)
        if not self.modules:
            raise ValueError(f"adapter {self.name!r} has no modules: it would not change anything")
        unknown = [name for name in self.modules if not is_module(name)]
        if unknown:
            raise ValueError(
                f"adapter {self.name!r}: unknown module {unknown[0]!r}; expected names such as "
                f"{module_name(0, 'q_proj')!r} of the projections {', '.join(PROJECTIONS)}"
            )

        def position(name: str):
            layer, projection = split_module(name)
            return layer, PROJECTIONS.index(projection)

        ordered = {name: self.modules[name] for name in sorted(self.modules, key=position)}
        object.__setattr__(self, "modules", MappingProxyType(ordered))
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))
        object.__setattr__(self, "digest", _digest(ordered))

    @classmethod
    def from_arrays(
        cls,
        name: str,
        arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
        *,
        alpha: int | float | Mapping[str, int | float],
        use_rslora: bool = False,
        base_name: str | None = None,
        num_layers: int | None = None,
    ) -> "Adapter":
        """An adapter from A (r, D) and B (F, r) per module, with the config that describes it.

        `alpha` is one number or {module: number}; ranks may differ, too. `num_layers` of the base
        lets the config say `q_proj` for "in every layer". `base_name` goes into the config, so it
        should be a model id and not a path of this machine.
        """
        alphas = alpha if isinstance(alpha, Mapping) else dict.fromkeys(arrays, alpha)
        if lacking := [module for module in arrays if module not in alphas]:
            raise ValueError(f"alpha has no value for the modules {shortened(lacking)}")
        modules = {
            module: LoraPair(a, b, lora_scale(alphas[module], len(a), use_rslora=use_rslora))
            for module, (a, b) in arrays.items()
        }
        config = new_config(
            {module: pair.rank for module, pair in modules.items()},
            alpha={module: alphas[module] for module in modules},
            use_rslora=use_rslora,
            base_name=base_name,
            num_layers=num_layers,
        )
        return cls(name, modules, config)

    def with_statistics(self, statistics: PackedStatistics) -> "Adapter":
        """The same adapter, sharing its arrays, with router statistics.

        Raises ValueError for those of another adapter.
        """
        if statistics.adapter != self.digest:
            raise ValueError(
                f"the router statistics are of an adapter of another content "
                f"(sha256:{statistics.adapter[:12]}) than {self.name!r} "
                f"(sha256:{self.digest[:12]}): gather them for this one"
            )
        other = copy.copy(self)
        object.__setattr__(other, "statistics", statistics)
        return other

    def described(self) -> dict[str, Any]:
        """The config for this adapter's PEFT folder: `config`, made to fit where it does not.

        Raises ValueError where no alpha gives one of the scales exactly.
        """
        modules = {module: (pair.rank, pair.scale) for module, pair in self.modules.items()}
        return fitted_config(self.config, modules, name=self.name)

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections it adapts in at least one layer."""
        present = {split_module(name)[1] for name in self.modules}
        return tuple(name for name in PROJECTIONS if name in present)

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max(pair.rank for pair in self.modules.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """How many of its tensors have each dtype."""
        return dict(
            Counter(m.dtype.name for pair in self.modules.values() for m in (pair.a, pair.b))
        )

    def nonfinite(self) -> dict[str, int]:
        """How many NaN or infinite values each tensor has, of those that have any."""
        counts = {
            f"{name}.lora_{matrix.upper()}": int((~np.isfinite(getattr(pair, matrix))).sum())
            for name, pair in self.modules.items()
            for matrix in ("a", "b")
        }
        return {name: count for name, count in counts.items() if count}

    def check_finite(self) -> None:
        """Raises where a weight is NaN or infinite: one such value can spoil every output."""
        found = [f"{name} ({count} values)" for name, count in self.nonfinite().items()]
        if found:
            raise ValueError(
                f"adapter {self.name!r} has NaN or infinite weights in {shortened(found)}. Its "
                "training diverged or the file is damaged: train it again or take an earlier save"
            )

    def check_fits(self, config: BaseShape) -> None:
        """Raises where a module is not one of the base model's, in place or in size."""
        sizes = config.projection_sizes()
        for name, pair in self.modules.items():
            layer, projection = split_module(name)
            if layer >= config.num_layers:
                raise ValueError(
                    f"adapter {self.name!r} has weights for layer {layer}; the base model has "
                    f"{config.num_layers} layers. It was trained on another base"
                )
            D, F = sizes[projection]
            got = (pair.a.shape, pair.b.shape)
            if got != ((pair.rank, D), (F, pair.rank)):
                raise ValueError(
                    f"adapter {self.name!r}: {name} has lora_A {got[0]} and lora_B {got[1]}; the "
                    f"base model's projection needs (r, {D}) and ({F}, r). It was trained on "
                    "another base, or its matrices are transposed"
                )


def _digest(modules: Mapping[str, LoraPair]) -> str:
    content = hashlib.sha256()
    for name, pair in modules.items():
        content.update(f"{name} {pair.scale.hex()}".encode())
        for array in (pair.a, pair.b):
            content.update(f" {array.dtype.name} {array.shape} ".encode())
            content.update(array.tobytes())
    return content.hexdigest()
