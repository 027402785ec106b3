"""SlotFormat: the shape of one slot of a bank, and how an adapter is brought into it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters.adapter import Adapter, BaseShape
from molora_jax.adapters.names import PROJECTIONS, split_module
from molora_jax.adapters.report import LoadReport
from molora_jax.adapters.stack import AdapterStack, Stacks

ALIGNMENT = 64  # bytes; what XLA wants of memory that it reads in place
# One slot on the host: (lora_a (L, R, D), lora_b (L, R, F), ranks (L,)) per projection.
HostSlot = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class StagedAdapter:
    """An adapter that was checked for a bank and brought into its form; a load of it cannot fail.

    content  the whole slot on the host: scale folded, converted, zero where it has nothing
    """

    adapter: Adapter = dataclasses.field(repr=False)
    report: LoadReport = dataclasses.field(repr=False)
    content: HostSlot = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def digest(self) -> str:
        return self.adapter.digest

    def transfer(self) -> Stacks:
        """Starts the copy to the device and returns at once; `AdapterBank.load` takes the result.

        Issued while a step runs, it leaves only the write of one slot between two steps.
        """
        on_device = jax.device_put(self.content)
        return {name: AdapterStack(*arrays) for name, arrays in on_device.items()}


@dataclasses.dataclass(frozen=True)
class SlotFormat:
    """Rank, projections and dtype that every slot of a bank has, whoever lies in it.

    config  the base model's config: number of layers, sizes of the projections
    """

    config: BaseShape
    max_rank: int
    projections: tuple[str, ...]
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        config: BaseShape,
        *,
        max_rank: int,
        projections: Sequence[str],
        dtype: jax.typing.DTypeLike,
    ) -> SlotFormat:
        """Raises ValueError for a rank, projections or a dtype that no bank has."""
        check_positive("max_rank", max_rank)
        unknown = [name for name in projections if name not in PROJECTIONS]
        if unknown or not projections or isinstance(projections, str):
            raise ValueError(
                f"projections is {projections!r}; expected a list of some of "
                f"{', '.join(PROJECTIONS)}"
            )
        if np.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype is {np.dtype(dtype)}; expected float32, bfloat16 or float16")
        ordered = tuple(name for name in PROJECTIONS if name in projections)
        return cls(config, max_rank, ordered, np.dtype(dtype))

    @property
    def num_bytes(self) -> int:
        """Device memory of one slot, taken at creation whether or not it is used."""
        sizes = (self.config.projection_sizes()[name] for name in self.projections)
        per_layer = sum(self.max_rank * (D + F) * self.dtype.itemsize + 4 for D, F in sizes)
        return self.config.num_layers * per_layer

    def content(self, adapter: Adapter, name: str) -> HostSlot:
        """One whole slot, zeros included, so that nothing of its last tenant stays."""
        content = self.empty()
        for module, pair in adapter.modules.items():
            layer, projection = split_module(module)
            lora_a, lora_b, ranks = content[projection]
            with np.errstate(over="ignore"):
                lora_a[layer, : pair.rank] = pair.a
                scaled = pair.b.astype(np.float32) * np.float32(pair.scale)
                lora_b[layer, : pair.rank] = scaled.T
            ranks[layer] = pair.rank
            for written in (lora_a[layer], lora_b[layer]):
                if not np.isfinite(written).all():
                    raise ValueError(
                        f"adapter {name!r}: {module} with scale {pair.scale:.6g} overflows "
                        f"{self.dtype.name}. Create the bank with dtype=float32"
                    )
            if scaled.any() and not lora_b[layer].any():
                raise ValueError(
                    f"adapter {name!r}: lora_B of {module} with scale {pair.scale:.6g} is at most "
                    f"{np.abs(scaled).max():.3g} and becomes all zero in {self.dtype.name}: the "
                    "module would change nothing. Create the bank with dtype=float32"
                )
        for array in itertools.chain(*content.values()):
            array.flags.writeable = False  # the device may read it where it lies
        return content

    def check(self, adapter: Adapter, name: str) -> None:
        adapter.check_fits(self.config)
        adapter.check_finite()
        lacking = [p for p in adapter.projections if p not in self.projections]
        if lacking:
            raise ValueError(
                f"adapter {name!r} adapts {', '.join(lacking)}, which this bank does not hold "
                f"(bank.projections: {', '.join(self.projections)}). Create the bank with "
                f"projections={(*self.projections, *lacking)}"
            )
        for module, pair in adapter.modules.items():
            if pair.rank > self.max_rank:
                more = self.num_bytes * adapter.rank // self.max_rank - self.num_bytes
                raise ValueError(
                    f"adapter {name!r}: rank {pair.rank} exceeds max_rank {self.max_rank} of the "
                    f"bank ({module}). Create the bank with max_rank={adapter.rank} "
                    f"(+{readable_size(more)} a slot), or train the adapter with r={self.max_rank}"
                )

    def empty(self) -> HostSlot:
        return {p: tuple(aligned_zeros(*each) for each in self.layout(p)) for p in self.projections}

    def layout(self, projection: str, *slots: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shape and dtype of lora_a, lora_b and ranks, with the given slot axes."""
        L, R = self.config.num_layers, self.max_rank
        D, F = self.config.projection_sizes()[projection]
        return (
            ((L, *slots, R, D), self.dtype),
            ((L, *slots, R, F), self.dtype),
            ((L, *slots), np.dtype(np.int32)),
        )


def aligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Host memory that a CPU's `device_put` takes as it lies, where another would be copied.

    A transfer costs nothing then, and what is transferred must not be written to any more.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(count + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count].view(dtype).reshape(shape)


def zeros(layout: tuple[tuple[tuple[int, ...], Any], ...]) -> AdapterStack:
    """An empty stack on the device."""
    return AdapterStack(*(jnp.zeros(*each) for each in layout))


def check_positive(name: str, value: Any) -> int:
    """The value; ValueError unless it is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer")
    return value


def readable_size(count: int) -> str:
    """As MiB, or KiB below one."""
    unit = "MiB" if count >= 2**20 else "KiB"
    return f"{count / (2**20 if unit == 'MiB' else 2**10):.3g} {unit}"
