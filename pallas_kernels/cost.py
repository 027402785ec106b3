"""What a path costs, counted from static shapes: bytes, products, launches, temporary memory.

The floor of a routed projection reads x and the weights of the active adapters once, reads the base
and writes y once (k does not enter). A path's time is estimated as the slower of its bytes and its
products, plus its launches.
"""

import dataclasses
import math

from pallas_kernels.paths import Path
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.token_sort import num_groups, num_tiles

Size = ProblemSize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Constants of a machine, from measurements or the makers' figures."""

    name: str
    bytes_per_s: float
    products_per_s: float  # multiply-adds count two, in the inputs' dtype
    launch_s: float  # one more step of a compiled program
    cache_bytes: int


H200 = Device(
    name="NVIDIA H200",
    bytes_per_s=4.3e12,  # a large copy
    products_per_s=790e12,  # dense bfloat16
    launch_s=1.5e-6,  # a node of a CUDA graph
    cache_bytes=60 * 2**20,
)
CPU = Device(
    name="CPU",
    bytes_per_s=2e10,
    products_per_s=1.5e11,
    launch_s=3e-6,
    cache_bytes=2**20,
)


def path(strategy: str, backend: str, size: Size) -> Path:
    """A named strategy with the layout and block that suit the sizes."""
    if strategy != "grouped" and not (strategy == "bgmv"):
        return Path(strategy, backend)
    layout = layout_for(backend, size)
    return Path(strategy, backend, layout=layout, block=block_rows(layout, backend, size))


def layout_for(backend: str, size: Size) -> str:
    if backend == "xla":
        return "entries"
    if size.top_k == 1:
        return "passes"
    groups = num_groups("sets", num_slots=size.num_slots, top_k=size.top_k)
    return "sets" if groups <= 1024 and size.num_tokens >= 16 * math.comb(size.num_slots, min(size.top_k, size.num_slots)) else "passes"


def block_rows(layout: str, backend: str, size: Size) -> int:
    """Rows in a tile: the power of two at or below an adapter's fair share of entries, up to 128.

    Padding costs half a tile per adapter; a tile under 32 rows costs its own overhead. Past 128
    rows nothing is gained on CPU and the tile leaves the cache.
    """
    rows = size.num_tokens * (size.top_k if layout == "entries" else 1)
    groups = size.num_slots
    if layout == "sets":
        groups = math.comb(size.num_slots, min(size.top_k, size.num_slots))
    share = max(1, rows // groups)
    block = min(128, 1 << (share.bit_length() - 1))
    if backend == "xla":
        return block
    # 128 rows only where that leaves a tile for each of 132 processors.
    return max(16, min(block, 128 if rows >= 128 * 132 else 64))


def choose(size: Size, device: Device, backend: str) -> Path:
    if device is H200:
        if size.num_tokens * size.top_k <= 2 * size.num_slots or size.num_tokens * size.top_k <= 8:
            return path("bgmv", backend, size)
        return path("grouped", backend, size)
    if size.num_slots <= 2 * size.top_k or (size.num_slots <= 8 and size.num_tokens <= 64):
        return path("all_slots", "xla", size)
    return path("grouped", "xla", size)


def explain(size: Size, device: Device) -> str:
    raise NotImplementedError
