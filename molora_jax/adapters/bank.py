"""AdapterBank: many adapters in slots of fixed shape, so that swapping one recompiles nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Int

from molora_jax.adapters.adapter import Adapter, BaseShape
from molora_jax.adapters.names import PROJECTIONS, check_label, nearest, split_module
from molora_jax.adapters.peft_load import load_adapter
from molora_jax.adapters.report import LoadReport
from molora_jax.adapters.stack import AdapterStack

Stacks = dict[str, AdapterStack]
# One slot on the host: (lora_a (L, R, D), lora_b (L, R, F), ranks (L,)) per projection.
HostSlot = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Occupant:
    """Who lies in a slot. `id` is never used twice in a bank; `name` is a label and may be."""

    slot: int
    id: int
    name: str
    adapter: Adapter = dataclasses.field(repr=False)
    report: LoadReport = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        return self.adapter.digest


class AdapterBank:
    """`{projection: AdapterStack}` on the device, and on the host who lies in which slot.

    The number of slots K, the rank R and the projections are fixed here; any adapter of rank up to
    R on any of the projections fits, and `stacks` never changes a shape, so a step that takes it as
    an argument is compiled once. Rank tails and modules an adapter lacks are zero.

    config       the base model's config: number of layers, sizes of the projections
    num_slots    K
    max_rank     R
    projections  any of PROJECTIONS
    dtype        of every weight in the bank, whatever the files hold, so that the order of loading
                 cannot matter: float32 (default), bfloat16 or float16. The scale is folded in
                 float32 before the one rounding.
    base_name    the base's name: a PEFT folder that names another base is loaded with a warning

    A write gives the old buffers back to the device (donation): take `bank.stacks` anew for every
    step, since a reference kept from before a load is deleted and says so when used.
    """

    def __init__(
        self,
        config: BaseShape,
        *,
        num_slots: int,
        max_rank: int,
        projections: Sequence[str] = PROJECTIONS,
        dtype: jax.typing.DTypeLike = jnp.float32,
        base_name: str | None = None,
    ):
        for name, value in (("num_slots", num_slots), ("max_rank", max_rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive integer")
        unknown = [name for name in projections if name not in PROJECTIONS]
        if unknown or not projections or isinstance(projections, str):
            raise ValueError(
                f"projections is {projections!r}; expected a list of some of "
                f"{', '.join(PROJECTIONS)}"
            )
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype is {self.dtype}; expected float32, bfloat16 or float16")
        self.config, self.num_slots, self.max_rank = config, num_slots, max_rank
        self.base_name = base_name
        self.projections = tuple(name for name in PROJECTIONS if name in projections)
        self._occupants: list[Occupant | None] = [None] * num_slots
        self._next_id = 0
        self.stacks: Stacks = {
            name: AdapterStack(*(jnp.zeros(*each) for each in self._layout(name, num_slots)))
            for name in self.projections
        }
        logging.info("%s", self)

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot, taken at creation whether or not it is used."""
        sizes = (self.config.projection_sizes()[name] for name in self.projections)
        per_layer = sum(self.max_rank * (D + F) * self.dtype.itemsize + 4 for D, F in sizes)
        return self.config.num_layers * per_layer

    def load(
        self, adapter: Adapter | str | Path, *, name: str | None = None, slot: int | None = None
    ) -> LoadReport:
        """Puts an adapter, or the PEFT folder at a path, into `slot` or the first free one.

        Raises ValueError, leaving the bank as it was, where it does not fit (rank, projections,
        base, non-finite weights), where no slot is free, or where the name or the very same content
        is there already: `replace` swaps.
        """
        adapter, report = self._read(adapter, name)
        self._refuse_double(report.name, adapter.digest)
        if slot is None:
            slot = next((i for i, each in enumerate(self._occupants) if each is None), None)
            if slot is None:
                raise ValueError(
                    f"adapter {report.name!r}: the bank is full ({self.num_slots} slots: "
                    f"{self._names()}). Unload or replace one, or create the bank with a larger "
                    f"num_slots (+{_size(self.bytes_per_slot)} each)"
                )
        elif not 0 <= slot < self.num_slots:
            raise ValueError(f"slot is {slot}; the bank has slots 0..{self.num_slots - 1}")
        elif (occupant := self._occupants[slot]) is not None:
            raise ValueError(
                f"adapter {report.name!r}: slot {slot} holds {occupant.name!r}. Use "
                f"replace({occupant.name!r}, ...), unload it first, or leave slot out"
            )
        return self._put(slot, adapter, report)

    def replace(
        self, key: str, adapter: Adapter | str | Path, *, name: str | None = None
    ) -> LoadReport:
        """Puts an adapter into the slot of another, named by `key` (a name or digest).

        It takes the old one's name unless `name` is given; router columns follow digests, so a
        column of the old adapter does not come to point at the new one.
        """
        old = self.occupant(key)
        adapter, report = self._read(adapter, old.name if name is None else name)
        self._refuse_double(report.name, adapter.digest, but=old)
        return self._put(old.slot, adapter, report)

    def unload(self, key: str) -> int:
        """Empties the slot of a name or digest, and returns its index. Its weights become zero."""
        slot = self.slot_of(key)
        self._write(slot, self._empty())
        self._occupants[slot] = None
        return slot

    def list(self) -> tuple[Occupant, ...]:
        """Who is in the bank, by slot."""
        return tuple(each for each in self._occupants if each is not None)

    def inspect(self, key: str) -> LoadReport:
        """The load report of a resident adapter, by name or digest."""
        return self.occupant(key).report

    def slot_of(self, key: str) -> int:
        """The slot of a name or digest; KeyError, with the nearest names, where it is not there."""
        return self.occupant(key).slot

    def occupant(self, key: str) -> Occupant:
        """Who a name or digest is; KeyError, with the nearest names, where it is not there."""
        for each in self.list():
            if key in (each.name, each.digest):
                return each
        near = nearest(key, [each.name for each in self.list()])
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KeyError(f"no adapter {key!r} in the bank.{hint} It holds: {self._names()}")

    def column_to_slot(self, digests: Sequence[str]) -> Int[np.ndarray, " C"]:
        """The slot of each router column's adapter, −1 where it is not resident.

        An ordinary input of the compiled step, made anew after every load and unload.
        """
        slots = {each.digest: each.slot for each in self.list()}
        return np.array([slots.get(digest, -1) for digest in digests], np.int32)

    def __str__(self) -> str:
        total = self.num_slots * self.bytes_per_slot
        lines = [
            f"adapter bank: {self.num_slots} slots of rank {self.max_rank} on "
            f"{', '.join(self.projections)}; {self.dtype.name}, "
            f"{_size(self.bytes_per_slot)} a slot, {_size(total)} in all"
        ]
        lines += [
            f"  {each.slot:>3}  {each.name}  rank {each.adapter.rank}  "
            f"{', '.join(each.adapter.projections)}  sha256:{each.digest[:12]}"
            for each in self.list()
        ]
        return "\n".join(lines)

    def _read(self, adapter: Adapter | str | Path, name: str | None) -> tuple[Adapter, LoadReport]:
        """The adapter, checked against the bank, with its report under the name it will have."""
        if isinstance(adapter, Adapter):
            report = LoadReport.of(adapter)
        else:
            adapter, report = load_adapter(
                adapter, name=name, config=self.config, base_name=self.base_name
            )
        name = adapter.name if name is None else check_label(name)
        report = dataclasses.replace(report, name=name, bank_dtype=self.dtype.name)
        self._check(adapter, name)
        return adapter, report

    def _check(self, adapter: Adapter, name: str) -> None:
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
                more = self.bytes_per_slot * adapter.rank // self.max_rank - self.bytes_per_slot
                raise ValueError(
                    f"adapter {name!r}: rank {pair.rank} exceeds max_rank {self.max_rank} of the "
                    f"bank ({module}). Create the bank with max_rank={adapter.rank} "
                    f"(+{_size(more)} a slot), or train the adapter with r={self.max_rank}"
                )

    def _refuse_double(self, name: str, digest: str, *, but: Occupant | None = None) -> None:
        for each in self.list():
            if each is but:
                continue
            if each.name == name:
                raise ValueError(
                    f"adapter {name!r} is in the bank already, in slot {each.slot}. Use "
                    f"replace({name!r}, ...) to update it, or load it under another name="
                )
            if each.digest == digest:
                raise ValueError(
                    f"adapter {name!r} has the same content as {each.name!r} in slot {each.slot} "
                    f"(sha256:{digest[:12]}). Use that one: router columns follow the content"
                )

    def _put(self, slot: int, adapter: Adapter, report: LoadReport) -> LoadReport:
        self._write(slot, self._content(adapter, report.name))
        report = dataclasses.replace(report, slot=slot)
        self._occupants[slot] = Occupant(slot, self._next_id, report.name, adapter, report)
        self._next_id += 1
        return report

    def _content(self, adapter: Adapter, name: str) -> HostSlot:
        """One whole slot, zeros included, so that nothing of its last tenant stays."""
        content = self._empty()
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
        return content

    def _write(self, slot: int, content: HostSlot) -> None:
        # The transfer comes first: where it fails for memory, nothing has been donated yet.
        on_device = jax.block_until_ready(jax.device_put(content))
        self.stacks = write_slot(
            self.stacks, np.int32(slot), {p: AdapterStack(*a) for p, a in on_device.items()}
        )

    def _empty(self) -> HostSlot:
        return {p: tuple(np.zeros(*each) for each in self._layout(p)) for p in self.projections}

    def _layout(self, projection: str, *slots: int) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shape and dtype of lora_a, lora_b and ranks, with the given slot axes."""
        L, R = self.config.num_layers, self.max_rank
        D, F = self.config.projection_sizes()[projection]
        return (
            ((L, *slots, R, D), self.dtype),
            ((L, *slots, R, F), self.dtype),
            ((L, *slots), np.dtype(np.int32)),
        )

    def _names(self) -> str:
        return ", ".join(f"{each.slot}: {each.name!r}" for each in self.list()) or "nothing"


@functools.partial(jax.jit, donate_argnums=0)
def write_slot(stacks: Stacks, slot: Int[jax.Array, ""], content: Stacks) -> Stacks:
    """Writes one slot (axis 1) in place. The slot is traced, so one program serves every write."""
    return jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, slot, axis=1),
        stacks,
        content,
    )


def _size(count: int) -> str:
    unit = "MiB" if count >= 2**20 else "KiB"
    return f"{count / (2**20 if unit == 'MiB' else 2**10):.3g} {unit}"
