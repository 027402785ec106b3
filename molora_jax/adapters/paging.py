"""The paging baseline: adapters in host memory, copied to a small pool when a step needs them."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from molora_jax.adapters.adapter import Adapter, BaseShape
from molora_jax.adapters.bank import write_slot
from molora_jax.adapters.names import PROJECTIONS, check_label, nearest, shortened
from molora_jax.adapters.slot_format import (
    HostSlot,
    SlotFormat,
    check_positive,
    readable_size,
    zeros,
)
from molora_jax.adapters.stack import AdapterStack, Stacks
from pallas_kernels import Routing


@dataclasses.dataclass(frozen=True)
class _Host:
    """An adapter cut into pages, each a slot of `page_rank` rows of all projections and layers."""

    pages: tuple[HostSlot, ...]

    def transfer(self) -> list[Stacks]:
        """Starts the copies to the device and returns at once."""
        on_device = jax.device_put(self.pages)
        return [{p: AdapterStack(*arrays) for p, arrays in page.items()} for page in on_device]


class PagedAdapters:
    """Any number of adapters on the host, and on the device a pool of pages for the last used.

    What an `AdapterBank` is measured against: `fetch` brings in what a step needs, and the step
    waits for it. After S-LoRA (arXiv 2311.03285, "unified paging") it has

    - adapters in host memory, copied when a batch needs them, the least recently used given up;
    - one pool of pages of `page_rank` rows, in which an adapter of rank r takes ceil(r / page_rank)
      pages, wherever there is room: they lie scattered and are found by a page table;
    - kernels that read the pages where they lie: a page is a slot of a bank of rank `page_rank`,
      and B·A·x the sum over an adapter's pages, so `paged` sends a token to all of them;
    - `prefetch`, which starts the copies of a later step beside the present one.

    and, other than S-LoRA, keeps adapters that the present batch does not use until room is needed
    (which is kinder), has pages of all layers and projections together and `page_rank` rows where
    S-LoRA's have one (fewer, longer copies), and shares no pool with the KV cache.

    config     the base model's config
    num_pages  P, of the pool; what one step needs must fit together
    page_rank  rows of a page
    max_rank   of an adapter; a multiple of page_rank
    projections, dtype  as of an AdapterBank

    `stacks` is {projection: AdapterStack} with P slots. A copy gives the old buffers back to the
    device: take it anew after every `fetch`.
    """

    def __init__(
        self,
        config: BaseShape,
        *,
        num_pages: int,
        page_rank: int,
        max_rank: int,
        projections: Sequence[str] = PROJECTIONS,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        check_positive("page_rank", page_rank)
        check_positive("num_pages", num_pages)
        self.whole = SlotFormat.of(config, max_rank=max_rank, projections=projections, dtype=dtype)
        if max_rank % page_rank:
            raise ValueError(
                f"max_rank is {max_rank} and page_rank {page_rank}; expected a multiple of it"
            )
        self.page = dataclasses.replace(self.whole, max_rank=page_rank)
        self.num_pages, self.max_pages = num_pages, max_rank // page_rank
        if num_pages < self.max_pages:
            raise ValueError(
                f"num_pages is {num_pages}; an adapter of rank {max_rank} takes {self.max_pages}"
            )
        self.stacks: Stacks = {
            name: zeros(self.page.layout(name, num_pages)) for name in self.page.projections
        }
        self.reads = self.misses = self.bytes_copied = 0
        self._host: dict[str, _Host] = {}
        self._resident: collections.OrderedDict[str, list[int]] = collections.OrderedDict()
        self._free = list(range(num_pages))[::-1]
        self._transfers: collections.OrderedDict[str, list[Stacks]] = collections.OrderedDict()

    def add(self, adapter: Adapter, *, name: str | None = None) -> None:
        """Checks an adapter and keeps it on the host in pages.

        Raises ValueError where it does not fit (as a bank does) or the name is taken.
        """
        name = adapter.name if name is None else check_label(name)
        if name in self._host:
            raise ValueError(f"adapter {name!r} is there already: choose another name")
        self.whole.check(adapter, name)
        content, rows = self.whole.content(adapter, name), self.page.max_rank
        pages = []
        for first in range(0, adapter.rank, rows):
            page = self.page.empty()
            for p, (lora_a, lora_b, ranks) in content.items():
                page[p][0][...] = lora_a[:, first : first + rows]
                page[p][1][...] = lora_b[:, first : first + rows]
                page[p][2][...] = np.clip(ranks - first, 0, rows)
            pages.append(page)
        self._host[name] = _Host(tuple(pages))

    def fetch(self, names: Sequence[str]) -> Int[np.ndarray, "n m"]:
        """Brings these adapters into the pool, and returns the pages of each, −1 past its last.

        Row i is the adapter names[i]: `paged` maps a Routing of such rows to one of pages. Copies
        are issued here; a step that reads `stacks` waits for them.

        Raises KeyError for an unknown name, ValueError where they do not fit the pool together.
        """
        wanted = {name: self._known(name) for name in names}
        needed = sum(len(each.pages) for each in wanted.values())
        if needed > self.num_pages:
            raise ValueError(
                f"{shortened(wanted)} need {needed} pages together, more than the pool's "
                f"{self.num_pages}: use fewer in a step, or give more num_pages "
                f"(+{readable_size(self.page.num_bytes)} each)"
            )
        missing = [name for name in wanted if name not in self._resident]
        self.reads, self.misses = self.reads + len(wanted), self.misses + len(missing)
        # All copies are under way before the first one is waited for.
        copies = {
            name: self._transfers.pop(name) if name in self._transfers else self._start(name)
            for name in missing
        }
        for name, pages in copies.items():
            while len(self._free) < len(pages):
                idle = next(each for each in self._resident if each not in wanted)
                self._free += self._resident.pop(idle)
            self._resident[name] = places = [self._free.pop() for _ in pages]
            for place, page in zip(places, pages, strict=True):
                self.stacks = write_slot(self.stacks, np.int32(place), page)
        for name in names:
            self._resident.move_to_end(name)
        rows = [self._resident[name] for name in names]
        return np.array([row + [-1] * (self.max_pages - len(row)) for row in rows], np.int32)

    def prefetch(self, names: Iterable[str]) -> None:
        """Starts the copies that `fetch` of these will need, and returns at once.

        No more wait than the pool has pages: the oldest are given up, since each takes a page's
        bytes beside the pool.
        """
        for name in names:
            self._known(name)
            if name not in self._resident and name not in self._transfers:
                self._transfers[name] = self._start(name)
        while sum(map(len, self._transfers.values())) > self.num_pages:
            self._transfers.popitem(last=False)

    def is_resident(self, name: str) -> bool:
        """Whether its pages are in the pool now."""
        return name in self._resident

    def _known(self, name: str) -> _Host:
        if name not in self._host:
            near = nearest(name, self._host)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"no adapter {name!r} on the host.{hint}")
        return self._host[name]

    def _start(self, name: str) -> list[Stacks]:
        self.bytes_copied += len(self._host[name].pages) * self.page.num_bytes
        return self._host[name].transfer()


def paged(routing: Routing, table: Int[Array | np.ndarray, "n m"]) -> Routing:
    """A Routing (N, k) of rows of a page table as one of pages, (N, k·m): same gates, same update.

    Σ_j gate_j · B_j·A_j·x = Σ_j Σ_p gate_j · B_jp·A_jp·x over the pages p of adapter j. A row
    outside the table is no adapter.
    """
    ids = jnp.asarray(routing.adapter_ids)
    inside = (ids >= 0) & (ids < len(table))
    pages = jnp.asarray(table)[jnp.where(inside, ids, 0)]  # (N, k, m)
    pages = jnp.where(inside[..., None], pages, -1)
    gates = jnp.where(pages >= 0, routing.gates[..., None], 0)
    flat = (*ids.shape[:-1], -1)
    return Routing(pages.reshape(flat), gates.reshape(flat))
