"""What a path costs, counted from static shapes: bytes, products, launches, temporary memory.

The floor of a routed projection reads x, the base and the weights of the active adapters once and
writes y once; k does not enter. Everything above that is what a path pays for being simple: weights
read again, h written and read back, rows of a tile that are not its own, launches. A path's time is
its bytes and its products at the device's rates plus its launches, and `choose` takes the shortest.

Ids are taken to be uniform over the slots. A plan table (JSON) may overrule the model where
something was measured; see `pallas_kernels.plans`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from pallas_kernels.grouped_gemm.blocks import (
    all_slots_rows,
    choose_blocks,
    is_fused,
    power_of_two,
)
from pallas_kernels.numerics import FEW_ROWS
from pallas_kernels.paths import Path
from pallas_kernels.plans import planned
from pallas_kernels.shapes import ProblemSize as Size
from pallas_kernels.token_sort import num_groups, num_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A machine as the model sees it."""

    name: str
    itemsize: int  # bytes of an input's number, as the machine is used
    bytes_per_s: float
    products_per_s: float  # multiply-adds count two, on the inputs' numbers
    exact_products_per_s: float  # on float32, as XLA's second product of all_slots is
    launch_s: float  # one step of a compiled program
    sort_launches: int
    row_s: float  # finding, gathering and scattering one row of a tile, beside its bytes
    cache_bytes: int  # what is read again from here costs no bandwidth
    overlaps: bool  # whether bytes move while products are formed


H200 = Device(
    name="h200",
    itemsize=2,
    bytes_per_s=4.3e12,  # a large copy; 4.8e12 by the data sheet
    products_per_s=790e12,  # dense bfloat16 as cuBLAS reaches it; 989e12 by the data sheet
    exact_products_per_s=60e12,  # float32 without TF32; 67e12 by the data sheet
    launch_s=1.5e-6,  # a node of a CUDA graph, begin to begin; not measured on this machine yet
    sort_launches=4,  # codes, ranks, entries, tiles
    row_s=0.0,  # the kernels' bytes and launches hold it
    cache_bytes=30 * 2**20,  # half of the L2, as other data pass through it
    overlaps=True,
)
# Two cores of a server processor, float32. Fitted together, to the choices they lead to more than
# to times: N = 1 to 2048, K = 4 to 64, k = 1, 2, 4, r = 16, 64, D = 1024, 4096. Each holds some of
# the others, only ratios mean something, and estimates for a CPU are relative.
CPU = Device(
    name="cpu",
    itemsize=4,
    bytes_per_s=6e10,
    products_per_s=1e11,
    exact_products_per_s=1e11,
    launch_s=1.1e-7,
    sort_launches=20,
    row_s=8e-7,
    cache_bytes=0,
    overlaps=False,
)
DEVICES = {device.name: device for device in (H200, CPU)}

# A plan is made once for a routing decision and serves the projections of a decoder layer: q, k, v,
# o, gate, up and down. Each is charged its share of the sort.
PROJECTIONS_PER_PLAN = 7

# A plan is made before the widths of the projections are known, and serves several. Layout and
# block of its tiles are chosen for a projection like this one.
_TYPICAL = {"rank": 64, "d_in": 4096, "d_out": 4096}

# Above this many sets of adapters their table and the search for a tile's set cost more than a sort
# by adapter.
_MOST_SETS = 1024

_SMALL = 2048  # scalars and alignment, in bytes of temporary memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one projection costs by a path, beside its base product."""

    path: Path
    bytes: float  # to and from memory
    products: float  # multiply-adds count two; masked rows of a tile count
    launches: float  # with a share of the sort's
    temp_bytes: int  # the most that is alive at once beside operands and result
    seconds: float


def active_adapters(draws: int, num_slots: int) -> float:
    """The expected number of different slots among so many uniform draws, at most both."""
    if num_slots == 1:
        return min(1.0, float(draws))
    return num_slots * -math.expm1(draws * math.log1p(-1 / num_slots))


def floor_bytes(size: Size, *, itemsize: int, active: float | int | None = None) -> float:
    """What no path can avoid: x, the weights of the active adapters, base, y, an index a token.

        itemsize·(N·D + E·R·(D + F) + 2·N·F) + 4·N

    for any k. E is `active` where the adapters in use were counted, else what is expected.
    """
    n = size.num_tokens
    if active is None:
        active = active_adapters(n * size.top_k, size.num_slots)
    weights = active * size.rank * (size.d_in + size.d_out)
    return float(itemsize * (n * size.d_in + weights + 2 * n * size.d_out) + 4 * n)


def floor_seconds(size: Size, device: Device, *, active: float | int | None = None) -> float:
    """The slower of the floor's bytes and the products that no path can leave out."""
    products = 2 * size.num_tokens * size.top_k * size.rank * (size.d_in + size.d_out)
    least = floor_bytes(size, itemsize=device.itemsize, active=active)
    return max(least / device.bytes_per_s, products / device.products_per_s)


# --- tiles ----------------------------------------------------------------------------------------


def tiles_for(backend: str, size: Size, device: Device) -> tuple[str, int]:
    """Layout and block of the sorted paths, by N, k and K alone."""
    plan = planned(size, device.name)
    if "layout" in plan:
        sets = num_groups("sets", num_slots=size.num_slots, top_k=size.top_k)
        if plan["layout"] == "sets" and sets > _MOST_SETS:
            raise ValueError(
                f"the plan table asks for sets of K = {size.num_slots}, k = {size.top_k}: there "
                f"are {sets}, and {_MOST_SETS} at most are sorted by. Use layout passes"
            )
        return plan["layout"], plan["block"]
    typical = dataclasses.replace(size, **_TYPICAL)
    options = _sorted_paths("grouped", backend, size)
    best = min(options, key=lambda path: estimate(path, typical, device).seconds)
    return best.layout, best.block


def _sorted_paths(strategy: str, backend: str, size: Size) -> list[Path]:
    """A sorting strategy with every layout that is open to it."""
    if backend == "xla":
        # One loop over all entries: `passes` runs more tiles, and `sets` splits small shares.
        return [Path(strategy, backend, "entries", _block_xla(size))]
    layouts = ["passes"]
    groups = num_groups("sets", num_slots=size.num_slots, top_k=size.top_k)
    if size.top_k > 1 and groups <= _MOST_SETS:
        layouts.append("sets")
    return [Path(strategy, backend, each, _block_kernel(each, size)) for each in layouts]


def _block_xla(size: Size) -> int:
    """Rows in a tile of the loop on CPU: an adapter's share, and two deviations more.

    A product has as many rows as the block, whatever a tile holds, so a block that most shares
    just miss costs nearly twice. Past 320 rows a tile leaves the cache and a share is split evenly.
    Where adapters hardly have a row each, one row is a product of a matrix and a vector.
    """
    share = size.num_tokens * size.top_k / size.num_slots
    if share <= 1:
        return 1
    wanted = share + 2 * math.sqrt(share)
    return min(size.num_tokens * size.top_k, math.ceil(wanted / math.ceil(wanted / 320)))


def _block_kernel(layout: str, size: Size) -> int:
    """Rows in a tile of a kernel: a power of two at or below a group's share, 16 to 128."""
    groups = _likely_groups(layout, size)
    share = max(1, size.num_tokens // groups)
    block = min(128, 1 << (share.bit_length() - 1))
    # 128 rows only where that leaves a tile for each of 132 processors.
    return max(16, min(block, 128 if size.num_tokens >= 128 * 132 else 64))


def _likely_groups(layout: str, size: Size) -> int:
    """Groups that rows spread over: sets with an adapter twice or missing are not expected."""
    if layout == "sets":
        return max(1, math.comb(size.num_slots, min(size.top_k, size.num_slots)))
    return size.num_slots


@functools.lru_cache(maxsize=1024)
def live_tiles(num_rows: int, groups: int, block: int) -> float:
    """The expected number of tiles with a row, where rows choose groups at random.

    A group's rows follow a binomial law, here by its Poisson limit; c rows fill ⌈c / block⌉ tiles.
    """
    share = num_rows / groups
    if num_rows == 0 or groups == 1:
        return float(-(-num_rows // block))
    counts = np.arange(int(share + 8 * math.sqrt(share) + 10))
    log_factorial = np.cumsum(np.log(np.maximum(counts, 1)))
    chance = np.exp(counts * math.log(share) - share - log_factorial)
    return min(float(num_rows), groups * float(chance @ np.ceil(counts / block)))


# --- estimates ------------------------------------------------------------------------------------


def estimate(path: Path, size: Size, device: Device) -> Estimate:
    """What a path costs for a projection of these sizes."""
    count = {
        ("all_slots", "xla"): _all_slots,
        ("grouped", "xla"): _grouped_xla,
        ("bgmv", "xla"): _bgmv_xla,
        ("all_slots", "triton"): _all_slots_kernels,
        ("grouped", "triton"): _grouped_kernels,
        ("bgmv", "triton"): _bgmv_kernels,
    }[path.strategy, "xla" if path.backend == "xla" else "triton"]
    moved, products, exact, launches, temp = count(path, size, device)
    rows_s = 0.0
    if path.strategy == "grouped":
        launches += device.sort_launches / PROJECTIONS_PER_PLAN
        rows_s = size.num_tokens * size.top_k * device.row_s
    join = max if device.overlaps else lambda a, b: a + b
    rates = products / device.products_per_s + exact / device.exact_products_per_s
    seconds = join(moved / device.bytes_per_s, rates) + launches * device.launch_s + rows_s
    return Estimate(
        path=path,
        bytes=float(moved),
        products=float(products + exact),
        launches=float(launches),
        temp_bytes=temp,
        seconds=seconds,
    )


class _Count(NamedTuple):
    bytes: float
    products: float  # of numbers as the inputs are
    exact: float  # of float32
    launches: float
    temp_bytes: int


def _all_slots(path: Path, size: Size, device: Device) -> "_Count":
    n, columns, item = size.num_tokens, size.num_slots * size.rank, device.itemsize
    weights = columns * (size.d_in + size.d_out)
    moved = item * (n * size.d_in + weights + 2 * n * size.d_out)
    # h leaves the first product, is selected from, and enters the second; its sum with the base is
    # one more pass.
    moved += 4 * (4 * n * columns + 2 * n * size.d_out)
    shrink, expand = 2 * n * columns * size.d_in, 2 * n * columns * size.d_out
    # h before and after the selection, one of them where the result will lie if it fits; and who
    # chose what, with its gate.
    h = 4 * n * columns
    temp = h * (1 if h <= item * n * size.d_out else 2)
    if device is CPU and 2 <= n <= FEW_ROWS:  # x is turned before
        temp = max(temp, item * n * size.d_in)
    temp += n * size.num_slots * (4 * size.top_k + 1)
    temp += _SMALL
    # The second multiplies a float32 h: narrower weights are widened first.
    if item < 4:
        moved += 2 * 4 * columns * size.d_out
        temp += 4 * columns * size.d_out
    return _Count(moved + 4 * n * size.top_k, shrink, expand, 4, temp)


def _grouped_xla(path: Path, size: Size, device: Device) -> "_Count":
    """The loop over tiles of entries. On CPU every operation of its body is a step."""
    n, slots, block, item = size.num_tokens, size.num_slots, path.block, device.itemsize
    entries = n * size.top_k
    tiles = live_tiles(entries, _likely_groups("entries", size), block)
    widths = size.d_in + size.d_out
    # Weights are sliced off and then multiplied: read, written, read. Rows of x are gathered the
    # same way; the product is written, and read to be added into y.
    moved = tiles * 3 * item * size.rank * widths
    moved += tiles * block * (3 * item * size.d_in + 4 * 4 * size.d_out)
    moved += 2 * item * n * size.d_out  # y begins as a copy of the base
    products = 2 * tiles * block * size.rank * widths
    indices = 4 * 3 * num_tiles(entries, slots, block=block) * block
    # Either a tile's rows of x are alive and both slices of weights, or its rows of y and one.
    a, b = item * size.rank * size.d_in, item * size.rank * size.d_out
    loop = max(item * block * size.d_in + a + b, 4 * block * size.d_out + b)
    loop += 4 * block * size.rank + indices * 2 // 3 + slots * size.rank
    # Before it, the sort compares its codes with the slots.
    sort = 4 * entries * (slots + 1 + 3)
    temp = max(loop, sort) + _SMALL
    return _Count(moved + indices, products, 0, 10 + 10 * tiles, temp)


def _bgmv_xla(path: Path, size: Size, device: Device) -> "_Count":
    entries, item = size.num_tokens * size.top_k, device.itemsize
    widths = size.d_in + size.d_out
    moved = entries * item * (3 * size.rank * widths + widths)
    moved += 2 * item * size.num_tokens * size.d_out
    temp = item * (size.rank * widths + size.d_in) + 4 * entries + size.num_slots * size.rank
    temp += _SMALL
    products = 2 * entries * size.rank * widths
    return _Count(moved + 4 * entries, products, 0, 4 + 8 * entries, temp)


def _all_slots_kernels(path: Path, size: Size, device: Device) -> "_Count":
    """A program takes a block of tokens as they lie, and in the shrink one slot."""
    n, slots, item = size.num_tokens, size.num_slots, device.itemsize
    block = all_slots_rows(n)
    blocks_for = functools.partial(
        choose_blocks,
        block=block,
        rank=size.rank,
        d_in=size.d_in,
        d_out=size.d_out,
        itemsize=item,
        reload=True,
    )
    tiles = -(-n // block)
    planes = blocks_for(num_tiles=tiles * slots).planes
    blocks = blocks_for(num_tiles=tiles)
    x, columns = item * n * size.d_in, -(-size.rank // blocks.rank) * blocks.rank
    weights = item * slots * size.rank * (size.d_in + size.d_out)
    # x is read for every slot and the weights for every tile, unless the cache still has them.
    moved = x * (1 if x <= device.cache_bytes else slots)
    moved += weights * (1 if weights <= device.cache_bytes else tiles)
    moved += 2 * item * n * size.d_out + 8 * n * size.top_k
    temp = 4 * planes * n * slots * columns
    products = 2 * tiles * block * slots * columns * (size.d_in + _halves(device) * size.d_out)
    return _Count(moved + 2 * temp, products, 0, 2, temp)


def _halves(device: Device) -> int:
    """h keeps 16 bits of mantissa in the expand: with halves, two products for one."""
    return 2 if device.itemsize < 4 else 1


def _grouped_kernels(path: Path, size: Size, device: Device) -> "_Count":
    """shrink and expand, or both fused, as `grouped_gemm.triton` runs them."""
    n, k, item = size.num_tokens, size.top_k, device.itemsize
    sets = path.layout == "sets"
    passes, width = (1, k) if sets else (k, 1)
    groups = num_groups(path.layout, num_slots=size.num_slots, top_k=k)
    worst = passes * num_tiles(n, groups, block=path.block)
    blocks = choose_blocks(
        block=path.block, num_tiles=worst, rank=size.rank, d_in=size.d_in, d_out=size.d_out,
        itemsize=item,
        width=width,
    )  # fmt: skip
    tiles = live_tiles(n, _likely_groups(path.layout, size), path.block)  # of a pass
    fused = is_fused(num_tokens=n, rank=size.rank, width=width, itemsize=item)
    # A set's adapters read a token's x together; a pass reads it again unless the cache has it.
    reads_of_x = 1 if sets or item * n * size.d_in <= device.cache_bytes else k
    # The tiles of sets meet an adapter often. A launch of one pass meets it once, and the shrink,
    # which has all passes of a tile follow one another, mostly too.
    a, b = (item * size.rank * width_ for width_ in (size.d_in, size.d_out))
    active = active_adapters(n * k, size.num_slots)
    of_pass = active_adapters(n, size.num_slots)
    if active * (a + b) <= device.cache_bytes:
        weights = active * (a + b)
    elif sets:
        weights = max(active, tiles * width) * (a + b)
    else:
        weights = (passes * of_pass if fused else active) * a + passes * of_pass * b

    indices = passes * (4 * n * width + worst // passes * 4 * (2 + width)) + 4 * n * k
    moved = item * (reads_of_x * n * size.d_in + passes * 2 * n * size.d_out) + weights + indices
    columns = -(-size.rank // blocks.rank) * blocks.rank
    temp = 0 if fused else 4 * blocks.planes * n * k * columns
    moved += 2 * temp  # planes are written and read
    rows = passes * tiles * width * blocks.rows
    products = 2 * rows * columns * (size.d_in + _halves(device) * size.d_out)
    return _Count(moved, products, 0, passes + (0 if fused else 1), temp)


def _bgmv_kernels(path: Path, size: Size, device: Device) -> "_Count":
    n, entries, item = size.num_tokens, size.num_tokens * size.top_k, device.itemsize
    widths = size.d_in + size.d_out
    # An adapter's weights are read for every entry; the cache may serve some, but not faster than
    # a few programs ask.
    moved = item * (n * size.d_in + entries * size.rank * widths + 2 * n * size.d_out) + 4 * entries
    planes = power_of_two(max(1, min(32, 264 // max(1, entries)) + 1) // 2)
    temp = 4 * planes * entries * max(16, size.rank)
    # One program multiplies numbers one by one, in float32.
    return _Count(moved + 2 * temp, 0, 2 * entries * size.rank * widths, 2, temp)


# --- the choice -----------------------------------------------------------------------------------


def candidates(size: Size, device: Device, backend: str = "auto") -> list[Path]:
    """The path of every strategy on a device; `auto` is the backend made for it."""
    if device is CPU and backend == "auto":
        backend = "xla"
    backend = "triton" if backend == "auto" else backend
    return [path(each, backend, size, device) for each in ("all_slots", "grouped", "bgmv")]


def path(strategy: str, backend: str, size: Size, device: Device) -> Path:
    """A named strategy, with the layout and block that suit the sizes where it sorts."""
    if strategy == "reference" or (strategy, backend) == ("all_slots", "xla"):
        return Path(strategy, backend)
    # The others sort for their gradients, if for nothing else.
    layout, block = tiles_for(backend, size, device)
    return Path(strategy, backend, layout=layout, block=block)


def choose(size: Size, device: Device, backend: str = "auto") -> Path:
    """The path with the shortest estimate, or the one that the plan table names."""
    options = candidates(size, device, backend)
    for plan in (planned(size, device.name, widths=True), planned(size, device.name)):
        for option in options:
            if option.strategy == plan.get("strategy"):
                return option
    return min(options, key=lambda each: estimate(each, size, device).seconds)


def explain(size: Size, device: Device, backend: str = "auto") -> str:
    """A table of `candidates`, shortest first, with the choice marked."""
    chosen = choose(size, device, backend)
    least = max(1, floor_bytes(size, itemsize=device.itemsize))
    paths = candidates(size, device, backend)
    paths += [
        each for each in _sorted_paths("grouped", paths[0].backend, size) if each not in paths
    ]
    if device is H200:
        paths.append(path("all_slots", "xla", size, device))
    found = [estimate(each, size, device) for each in paths]
    unit = "µs" if device.overlaps else "µs (relative)"
    lines = [
        f"{device.name}: {', '.join(f'{k} {v}' for k, v in dataclasses.asdict(size).items())}; "
        f"floor {least / 1e6:.2f} MB, {1e6 * floor_seconds(size, device):.1f} µs",
        f"  {'path':34}{'MB':>9}{'/ floor':>9}{'GFLOP':>9}{'launches':>10}{'temp MB':>9}  {unit}",
    ]
    for each in sorted(found, key=lambda each: each.seconds):
        name = f"{each.path.strategy}/{each.path.backend}"
        if each.path.strategy == "grouped":
            name += f" {each.path.layout} of {each.path.block}"
            # Nothing but h is kept between launches.
            fused = each.path.backend != "xla" and each.temp_bytes == 0
            name += ", fused" if fused else ""
        lines.append(
            f"{'*' if each.path == chosen else ' '} {name:34}{each.bytes / 1e6:9.2f}"
            f"{each.bytes / least:9.2f}{each.products / 1e9:9.3f}{each.launches:10.1f}"
            f"{each.temp_bytes / 1e6:9.2f}  {1e6 * each.seconds:.1f}"
        )
    return "\n".join(lines)
