"""HotSet: adapters by name on the host, and those that requests use in the slots of a bank."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import logging

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import AdapterBank, Occupant
from molora_jax.adapters.names import check_label, nearest, shortened
from molora_jax.adapters.slot_format import StagedAdapter, readable_size
from molora_jax.adapters.stack import Stacks


@dataclasses.dataclass(frozen=True)
class Version:
    """What a name means at one moment. `id` is never used again; a reload is another version."""

    id: int
    name: str
    staged: StagedAdapter = dataclasses.field(repr=False)

    @property
    def digest(self) -> str:
        return self.staged.digest


@dataclasses.dataclass(frozen=True, eq=False)
class Lease:
    """Adapters that stay where they are until `HotSet.release`: versions by name, with slots."""

    versions: dict[str, Version]
    occupants: dict[str, Occupant] = dataclasses.field(repr=False)

    @property
    def slots(self) -> dict[str, int]:
        """Slot in the bank by adapter name."""
        return {name: each.slot for name, each in self.occupants.items()}


class HotSet:
    """Many adapters on the host, checked and ready, the ones in use resident in a bank.

    A name is a label: what it means is a version (id, digest). A request takes a lease of the
    versions that its names mean when it is admitted, and keeps just these until it ends, whatever
    is loaded, replaced or removed meanwhile. A slot is rewritten only where no lease holds it, the
    least recently used first. Nothing is checked late: what `add` has taken can be served.

    bank         the slots; nobody else may load into it
    host_budget  bytes of host memory for prepared adapters (bank.bytes_per_slot each); None: no
                 limit

    `add`, `replace`, `remove`, `pin` and `prefetch` may be called from any thread. `acquire` and
    `release` write slots and belong to the thread that runs the steps.

        >>> hot = mj.HotSet(mj.AdapterBank(base.config, num_slots=1, max_rank=4))
        >>> hot.add(code).name, hot.add(math).name  # more than there are slots
        ('code', 'math')
    """

    def __init__(self, bank: AdapterBank, *, host_budget: int | None = None):
        self.bank, self.host_budget = bank, host_budget
        self._versions: dict[str, Version] = {}
        self._pinned: set[str] = set()
        self._transfers: dict[str, Stacks] = {}  # by digest: copies under way or done
        self._next_id = 0
        self._lock = threading.RLock()

    def add(self, adapter: Adapter | str | Path, *, name: str | None = None) -> Version:
        """Reads, checks and prepares an adapter. It is served from the next admission on.

        Raises ValueError where it does not fit the bank, where the name is taken (`replace`), or
        where the host budget is used up; what was there stays as it was.
        """
        staged = self.bank.stage(adapter, name=name)
        with self._lock:
            if staged.name in self._versions:
                raise ValueError(
                    f"adapter {staged.name!r} is loaded already (sha256:"
                    f"{self._versions[staged.name].digest[:12]}). Replace or remove it, or choose "
                    "another name"
                )
            self._check_room(len(self._versions) + 1)
            return self._register(staged)

    def replace(self, name: str, adapter: Adapter | str | Path) -> Version:
        """Gives a name another content. Requests that hold the old version end with that one."""
        self.version(name)
        staged = self.bank.stage(adapter, name=name)
        with self._lock:
            self.version(name)
            return self._register(staged)

    def remove(self, name: str) -> Version:
        """Forgets a name. Requests that hold its version end with it."""
        with self._lock:
            version = self.version(name)
            del self._versions[name]
            self._pinned.discard(name)
            self._place_pins()
            self._forget_transfer(version)
            return version

    def version(self, name: str) -> Version:
        """What the name means now; KeyError, with the nearest names, where it means nothing."""
        with self._lock:
            if name not in self._versions:
                near = nearest(name, self._versions)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                known = shortened(self._versions, limit=20) or "none"
                raise KeyError(f"no adapter {name!r} is loaded.{hint} Loaded are: {known}")
            return self._versions[name]

    def list(self) -> tuple[Version, ...]:
        """What every name means now, in the order of their loading."""
        with self._lock:
            return tuple(self._versions.values())

    def is_resident(self, name: str) -> bool:
        """Whether the version of the name lies in a slot now."""
        return any(each.digest == self.version(name).digest for each in self.bank.list())

    def pin(self, name: str) -> None:
        """Once in a slot, the adapter stays there until `unpin`, `replace` or `remove`.

        Raises ValueError where no slot would be left for the adapters without a pin.
        """
        with self._lock:
            self.version(name)
            if len(self._pinned | {name}) >= self.bank.num_slots:
                raise ValueError(
                    f"adapter {name!r} is not pinned: {len(self._pinned)} of {self.bank.num_slots} "
                    "slots are, and one must stay free for the others"
                )
            self._pinned.add(name)
            self._place_pins()

    def unpin(self, name: str) -> None:
        """Lets the adapter be evicted when it is idle."""
        with self._lock:
            self._pinned.discard(name)
            self._place_pins()

    def prefetch(self, names: Iterable[str]) -> None:
        """Starts the copies to the device that `acquire` of these names will need; returns at once.

        At most as many wait as the bank has slots: each takes a slot's bytes beside the bank.
        """
        with self._lock:
            for name in names:
                version = self.version(name)
                if version.digest in self._transfers or self.is_resident(name):
                    continue
                if len(self._transfers) >= self.bank.num_slots:  # nobody came for the oldest
                    del self._transfers[next(iter(self._transfers))]
                self._transfers[version.digest] = version.staged.transfer()

    def acquire(self, names: Sequence[str]) -> Lease | None:
        """A lease of all these adapters together, or None where slots must become free first.

        Raises KeyError for an unknown name, ValueError for more adapters than there ever is room.
        """
        with self._lock:
            versions = {name: self.version(name) for name in names}
            wanted = {version.digest: version for version in versions.values()}
            self._check_possible(versions)
            resident = {each.digest for each in self.bank.list()}
            missing = [each for digest, each in wanted.items() if digest not in resident]
            spare = [each for each in self.bank.evictable if each.digest not in wanted]
            if len(missing) > self.bank.num_free + len(spare):
                return None
            held = {digest: self.bank.hold(digest) for digest in wanted if digest in resident}
            try:
                for version in missing:
                    held[version.digest] = self._bring_in(version)
            except Exception:
                for occupant in held.values():
                    self.bank.release(occupant)
                raise
            return Lease(versions, {name: held[v.digest] for name, v in versions.items()})

    def release(self, lease: Lease) -> None:
        """Ends a lease; its slots may be rewritten when no other holds them."""
        with self._lock:
            for occupant in {id(each): each for each in lease.occupants.values()}.values():
                self.bank.release(occupant)

    def __str__(self) -> str:
        with self._lock:
            taken = len(self._versions) * self.bank.bytes_per_slot
            return (
                f"{len(self._versions)} adapters on the host ({readable_size(taken)}), "
                f"{len(self.bank.list())} of them or their earlier versions in slots\n{self.bank}"
            )

    def _register(self, staged: StagedAdapter) -> Version:
        name = check_label(staged.name)
        if (old := self._versions.get(name)) is not None:
            self._forget_transfer(old)
        self._versions[name] = Version(self._next_id, name, staged)
        self._next_id += 1
        self._place_pins()
        return self._versions[name]

    def _bring_in(self, version: Version) -> Occupant:
        """Loads a version into a free slot, or over the least recently used one."""
        # Names in the bank are of versions, so that an old one in use is no obstacle to a new one.
        label = f"{version.name}@{version.id}"
        transferred = self._transfers.pop(version.digest, None)
        self.bank.load(version.staged, name=label, evict=True, transferred=transferred)
        self._place_pins()
        logging.info("adapter %s is in slot %d", label, self.bank.slot_of(label))
        return self.bank.hold(label)

    def _place_pins(self) -> None:
        pinned = {self._versions[name].digest for name in self._pinned}
        for each in self.bank.list():
            (self.bank.pin if each.digest in pinned else self.bank.unpin)(each.digest)

    def _forget_transfer(self, version: Version) -> None:
        others = {each.digest for each in self._versions.values() if each is not version}
        if version.digest not in others:
            self._transfers.pop(version.digest, None)

    def _check_room(self, count: int) -> None:
        needed = count * self.bank.bytes_per_slot
        if self.host_budget is not None and needed > self.host_budget:
            raise ValueError(
                f"{count} adapters need {readable_size(needed)} on the host, more than host_budget "
                f"{readable_size(self.host_budget)}. Remove one, or give more"
            )

    def _check_possible(self, versions: dict[str, Version]) -> None:
        pinned = {self._versions[name].digest for name in self._pinned}
        needed = {version.digest for version in versions.values()} | pinned
        if len(needed) > self.bank.num_slots:
            raise ValueError(
                f"a request for {len(versions)} adapters ({shortened(versions)}) does not fit the "
                f"bank of {self.bank.num_slots} slots, of which {len(pinned)} are pinned. Use "
                "fewer, unpin some, or create the bank with a larger num_slots"
            )
