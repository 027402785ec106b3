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
from molora_jax.adapters.names import PROJECTIONS, check_label, nearest
from molora_jax.adapters.peft_load import load_adapter
from molora_jax.adapters.report import LoadReport
from molora_jax.adapters.slot_format import (
    HostSlot,
    SlotFormat,
    StagedAdapter,
    check_positive,
    readable_size,
    zeros,
)
from molora_jax.adapters.stack import AdapterStack, Stacks
from molora_jax.parallel import check_same, computing, current_mesh, place
from molora_jax.parallel.local import constrain_tree


class BankFull(ValueError):
    """No slot can be had now; one may be once a request ends or a pin is taken off."""


class SlotInUse(ValueError):
    """The slot is held by requests and must not change under them."""


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
    num_slots    K; or instead
    memory_budget  bytes of device memory: K is as many slots as it holds
    max_rank     R
    projections  any of PROJECTIONS
    dtype        of every weight in the bank, whatever the files hold, so that the order of loading
                 cannot matter: float32 (default), bfloat16 or float16. The scale is folded in
                 float32 before the one rounding.
    base_name    the base's name: a PEFT folder that names another base is loaded with a warning

    A slot that requests hold (`hold`, `release`) or that is pinned is never rewritten. One of the
    others, the least recently used, makes room where a load may `evict`.

    A write gives the old buffers back to the device (donation): take `bank.stacks` anew for every
    step, since a reference kept from before a load is deleted and says so when used.

        >>> bank = mj.AdapterBank(base.config, num_slots=2, max_rank=4)
        >>> bank.load(code).slot
        0
        >>> bank.stacks["q_proj"].lora_a.shape  # (L, K, R, D)
        (4, 2, 4, 64)
    """

    def __init__(
        self,
        config: BaseShape,
        *,
        num_slots: int | None = None,
        memory_budget: int | None = None,
        max_rank: int,
        projections: Sequence[str] = PROJECTIONS,
        dtype: jax.typing.DTypeLike = jnp.float32,
        base_name: str | None = None,
    ):
        self.config, self.base_name = config, base_name
        self.format = SlotFormat.of(config, max_rank=max_rank, projections=projections, dtype=dtype)
        if (num_slots is None) == (memory_budget is None):
            raise ValueError(
                f"num_slots is {num_slots} and memory_budget {memory_budget}: give one of them"
            )
        if memory_budget is not None:
            check_positive("memory_budget", memory_budget)
            num_slots = memory_budget // self.bytes_per_slot
            if not num_slots:
                raise ValueError(
                    f"memory_budget is {readable_size(memory_budget)}; one slot of rank {max_rank} "
                    f"in {self.dtype.name} takes {readable_size(self.bytes_per_slot)}. Give more, "
                    "lower max_rank, or name fewer projections"
                )
        self.num_slots = check_positive("num_slots", num_slots)
        self.mesh = current_mesh()  # over which the slots' weights are split
        parts = 1 if self.mesh is None else self.mesh.shape["slots"]
        if self.num_slots % parts and self.num_slots > parts:  # fewer lie whole on every device
            raise ValueError(
                f"num_slots is {self.num_slots}, and the mesh splits the bank over slots={parts}: "
                "give a multiple of that"
            )
        self._occupants: list[Occupant | None] = [None] * self.num_slots
        self._holds, self._pinned = [0] * self.num_slots, [False] * self.num_slots
        self._last_used, self._clock = [0] * self.num_slots, 0
        self._next_id = 0
        logging.info("allocating %s", str(self).splitlines()[0])
        empty = {name: zeros(self.format.layout(name, self.num_slots)) for name in self.projections}
        self.stacks: Stacks = place(empty, self.mesh, title="adapter bank")
        self._layers: tuple[Stacks, ...] | None = None

    @property
    def layers(self) -> tuple[Stacks, ...]:
        """The same weights in arrays of each layer's own, lora_a (K, R, D) and lora_b (K, R, F).

        For an unrolled step on a CPU, where a slice of `stacks` inside it would copy every layer.
        Made when first asked for and written along from then on; memory holds both.
        """
        if self._layers is None:
            with computing(self.mesh):
                self._layers = split_layers(self.stacks)
        return self._layers

    @property
    def max_rank(self) -> int:
        """R."""
        return self.format.max_rank

    @property
    def projections(self) -> tuple[str, ...]:
        """Those that the bank holds, in the order of PROJECTIONS."""
        return self.format.projections

    @property
    def dtype(self) -> np.dtype:
        """Of every weight."""
        return self.format.dtype

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot, taken at creation whether or not it is used."""
        return self.format.num_bytes

    def stage(self, adapter: Adapter | str | Path, *, name: str | None = None) -> StagedAdapter:
        """Checks an adapter, or the PEFT folder at a path, and prepares its slot on the host.

        Raises ValueError where it does not fit (rank, projections, base, non-finite weights).
        Touches nothing of the bank, so that it may run beside it in another thread.
        """
        adapter, report = self._read(adapter, name)
        return StagedAdapter(adapter, report, self.format.content(adapter, report.name))

    def load(
        self,
        adapter: Adapter | StagedAdapter | str | Path,
        *,
        name: str | None = None,
        slot: int | None = None,
        evict: bool = False,
        transferred: Stacks | None = None,
    ) -> LoadReport:
        """Puts an adapter, or the PEFT folder at a path, into `slot` or the first free one.

        evict        where no slot is free, takes that of the least recently used adapter that is
                     neither held nor pinned
        transferred  of a staged adapter, what its `transfer` returned

        Raises, leaving the bank as it was: BankFull where no slot can be had; ValueError where the
        adapter does not fit (`stage`), or where the name or the very same content is there already:
        `replace` swaps.
        """
        staged = self._staged(adapter, name)
        self._refuse_double(staged.name, staged.digest)
        if slot is None:
            slot = self._slot_for(staged.name, evict=evict)
        elif not 0 <= slot < self.num_slots:
            raise ValueError(f"slot is {slot}; the bank has slots 0..{self.num_slots - 1}")
        elif (occupant := self._occupants[slot]) is not None:
            raise ValueError(
                f"adapter {staged.name!r}: slot {slot} holds {occupant.name!r}. Use "
                f"replace({occupant.name!r}, ...), unload it first, or leave slot out"
            )
        return self._put(slot, staged, transferred)

    def replace(
        self,
        key: str,
        adapter: Adapter | StagedAdapter | str | Path,
        *,
        name: str | None = None,
    ) -> LoadReport:
        """Puts an adapter into the slot of another, named by `key` (a name or digest).

        It takes the old one's name unless `name` is given; router columns follow digests, so a
        column of the old adapter does not come to point at the new one. Raises SlotInUse where
        requests hold the old one.
        """
        old = self.occupant(key)
        staged = self._staged(adapter, old.name if name is None else name)
        self._refuse_double(staged.name, staged.digest, but=old)
        self._refuse_held(old)
        return self._put(old.slot, staged, None)

    def unload(self, key: str) -> int:
        """Empties the slot of a name or digest, and returns its index. Its weights become zero.

        Raises SlotInUse where requests hold it.
        """
        occupant = self.occupant(key)
        self._refuse_held(occupant)
        self._write(occupant.slot, self.format.empty())
        self._occupants[occupant.slot], self._pinned[occupant.slot] = None, False
        return occupant.slot

    def warm_up(self) -> None:
        """Compiles the write of a slot, by writing the first one anew with what it holds."""
        first = self._occupants[0]
        self._write(
            0, self.format.content(first.adapter, first.name) if first else self.format.empty()
        )

    def hold(self, key: str) -> Occupant:
        """One more request uses the adapter: until `release` its slot stays as it is."""
        occupant = self.occupant(key)
        self._holds[occupant.slot] += 1
        self._use(occupant.slot)
        return occupant

    def release(self, occupant: Occupant) -> None:
        """Ends one `hold`. Raises ValueError for one that was ended before."""
        if self._occupants[occupant.slot] is not occupant or not self._holds[occupant.slot]:
            raise ValueError(f"adapter {occupant.name!r} (slot {occupant.slot}) is not held")
        self._holds[occupant.slot] -= 1
        self._use(occupant.slot)

    def holds(self, key: str) -> int:
        """How many requests hold the adapter."""
        return self._holds[self.slot_of(key)]

    def pin(self, key: str) -> None:
        """Keeps the adapter from being evicted; `unload` and `replace` still take it away."""
        self._pinned[self.slot_of(key)] = True

    def unpin(self, key: str) -> None:
        """Takes the pin off; an adapter without one stays as it is."""
        self._pinned[self.slot_of(key)] = False

    @property
    def evictable(self) -> tuple[Occupant, ...]:
        """Who may make room, the least recently used first."""
        idle = [e for e in self.list() if not self._holds[e.slot] and not self._pinned[e.slot]]
        return tuple(sorted(idle, key=lambda each: self._last_used[each.slot]))

    @property
    def num_free(self) -> int:
        """Slots that nobody lies in."""
        return self._occupants.count(None)

    def list(self) -> tuple[Occupant, ...]:
        """Who is in the bank, by slot."""
        return tuple(each for each in self._occupants if each is not None)

    @property
    def slot_names(self) -> tuple[str, ...]:
        """(K,) what the adapter of each slot is called, "" where there is none.

        As `display.terminal_text` and `html_page` take them, with slots for adapters.
        """
        return tuple("" if each is None else each.name for each in self._occupants)

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
            f"{readable_size(self.bytes_per_slot)} a slot, {readable_size(total)} in all"
        ]
        lines += [
            f"  {each.slot:>3}  {each.name}  rank {each.adapter.rank}  "
            f"{', '.join(each.adapter.projections)}  sha256:{each.digest[:12]}"
            for each in self.list()
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from molora_jax.display.tables import bank_table

        return bank_table(self)._repr_html_()

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
        self.format.check(adapter, name)
        return adapter, report

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

    def _staged(self, adapter: Any, name: str | None) -> StagedAdapter:
        if not isinstance(adapter, StagedAdapter):
            return self.stage(adapter, name=name)
        shapes = {p: tuple(array.shape for array in part) for p, part in adapter.content.items()}
        mine = {p: tuple(shape for shape, _ in self.format.layout(p)) for p in self.projections}
        if shapes != mine or adapter.report.bank_dtype != self.dtype.name:
            raise ValueError(
                f"adapter {adapter.name!r} was staged for a bank of other sizes or another dtype: "
                "stage it with this one"
            )
        if name is None or name == adapter.name:
            return adapter
        report = dataclasses.replace(adapter.report, name=check_label(name))
        return dataclasses.replace(adapter, report=report)

    def _slot_for(self, name: str, *, evict: bool) -> int:
        if None in self._occupants:
            return self._occupants.index(None)
        if evict and (idle := self.evictable):
            return idle[0].slot
        state = " and each is held by a request or pinned" if evict else ""
        raise BankFull(
            f"adapter {name!r}: the bank is full ({self.num_slots} slots: {self._names()}){state}. "
            "Unload or replace one, or create the bank with a larger num_slots "
            f"(+{readable_size(self.bytes_per_slot)} each)"
        )

    def _refuse_held(self, occupant: Occupant) -> None:
        if count := self._holds[occupant.slot]:
            raise SlotInUse(
                f"adapter {occupant.name!r} in slot {occupant.slot} is in use by {count} "
                "requests, which would go on with other weights. Wait until they end, or load the "
                "new one under another name="
            )

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def _put(self, slot: int, staged: StagedAdapter, transferred: Stacks | None) -> LoadReport:
        if self.mesh is not None:
            check_same("adapter to load", lambda: {"digest": staged.digest, "slot": slot})
        self._write(slot, staged.content, transferred)
        report = dataclasses.replace(staged.report, slot=slot)
        self._occupants[slot] = Occupant(slot, self._next_id, report.name, staged.adapter, report)
        self._next_id += 1
        self._use(slot)
        return report

    def _write(self, slot: int, content: HostSlot, transferred: Stacks | None = None) -> None:
        # The transfer comes first: where it fails for memory, nothing has been donated yet. Arrays
        # of the host are transferred by the program's call, a CPU's without a copy.
        # To a mesh the program brings it by itself: each device needs its part alone.
        if transferred is None or self.mesh is not None:
            host: dict[str, Any] = dict(content)
            transferred = {p: AdapterStack(*arrays) for p, arrays in host.items()}
        transferred = jax.block_until_ready(transferred)
        with computing(self.mesh):
            self.stacks = write_slot(self.stacks, np.int32(slot), transferred)
            if self._layers is not None:
                self._layers = write_layers(self._layers, np.int32(slot), transferred)

    def _names(self) -> str:
        return ", ".join(f"{each.slot}: {each.name!r}" for each in self.list()) or "nothing"


@functools.partial(jax.jit, donate_argnums=0)
def write_slot(stacks: Stacks, slot: Int[jax.Array, ""], content: Stacks) -> Stacks:
    """Writes one slot (axis 1) in place. The slot is traced, so one program serves every write."""
    written = jax.tree.map(
        lambda whole, part: jax.lax.dynamic_update_index_in_dim(whole, part, slot, axis=1),
        stacks,
        content,
    )
    return constrain_tree(written)


@jax.jit
def split_layers(stacks: Stacks) -> tuple[Stacks, ...]:
    """One dict for each layer, without the layer axis."""
    return constrain_tree(_by_layer(stacks))


def _by_layer(stacks: Stacks) -> tuple[Stacks, ...]:
    num_layers = len(next(iter(stacks.values())).ranks)
    return tuple(jax.tree.map(lambda leaf, at=at: leaf[at], stacks) for at in range(num_layers))


@functools.partial(jax.jit, donate_argnums=0)
def write_layers(
    layers: tuple[Stacks, ...], slot: Int[jax.Array, ""], content: Stacks
) -> tuple[Stacks, ...]:
    """`write_slot` for the arrays of `split_layers`."""

    def written(whole, part):
        return jax.lax.dynamic_update_index_in_dim(whole, part, slot, axis=0)

    parts = zip(layers, _by_layer(content), strict=True)
    return constrain_tree(tuple(jax.tree.map(written, *each) for each in parts))
