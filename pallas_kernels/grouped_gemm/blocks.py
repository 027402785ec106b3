"""How much of a routed update one program of a kernel computes; read by the cost model too."""

import dataclasses

_WAVE = 128  # programs for the 132 processors of an H200, one each


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What a program works on. Powers of two; a product needs 16 of everything."""

    rows: int  # of a tile
    rank: int  # columns of h
    inner: int  # of D, a step of the shrink
    outer: int  # of F, a step of the expand
    planes: int  # parts of D that are summed apart
    parts: int  # parts of F that different programs write
    warps: int
    stages: int = 2


def choose_blocks(
    *,
    block: int,
    num_tiles: int,
    rank: int,
    d_in: int,
    d_out: int,
    itemsize: int,
    width: int = 1,
    float16: bool = False,
    reload: bool = False,
) -> Blocks:
    """Blocks for an H200, whose processors have 227 KiB of shared memory and 64 K registers each.

    Planes and parts multiply the programs until there are one or two for each processor, as long
    as a plane costs little beside x and y (its R numbers are written and read once in float32).
    Steps are as wide as the registers hold: float32 products keep both operands there, and a
    float16 weight is two bfloat16 ones in the expand.

    Args:
      block: rows of a tile; a tile of more rows than a program takes is cut further.
      num_tiles: tiles at most.
      itemsize: bytes of the widest of x and the weights.
      width: adapters of a tile, whose h are held together.
      float16: the weights are float16.
      reload: the expand loads h in its innermost loop, as it does for a rank of several blocks:
        fewer columns and planes at a time.
    """
    rows = min(128, max(16, power_of_two(block)))
    columns = most_columns(itemsize)
    reload = reload or rank > columns
    # Steps over D and F: a power of two for which the compiler reports no spill.
    if itemsize > 2:
        rows, inner, outer = min(rows, 32), 32, 64
    else:
        inner = outer = 128 if rows <= 64 else 64
        if reload or float16 or width > 2:
            outer = 64 if rows <= 64 and not (reload and float16) else 32

    programs = max(1, num_tiles) * -(-block // rows)
    shrinking = programs * width * -(-rank // columns)
    # What the registers hold of h while its planes are summed.
    most = max(1, (64 if reload or width > 2 else 512) // (rows * width))
    if num_tiles * rows >= 1024:
        # Written and read, the planes of a token cost a tenth of its x, base and y at most.
        most = min(most, max(1, itemsize * (d_in + 2 * d_out) // (10 * 8 * rank * width)))
    planes = parts = 1
    while planes < most and shrinking * planes < _WAVE and 2 * planes * inner <= d_in:
        planes *= 2
    while programs * parts < 2 * _WAVE and 2 * parts * outer <= d_out:
        parts *= 2

    columns = max(16, min(columns, power_of_two(rank)))
    return Blocks(
        rows=rows,
        rank=columns,
        inner=inner,
        outer=outer,
        planes=planes,
        parts=parts,
        warps=8 if rows >= 128 or (float16 and reload) else 4,
    )


def all_slots_rows(num_tokens: int) -> int:
    """Rows of a block that is not sorted: as low as fills the machine."""
    return 16 if num_tokens <= 256 else 32 if num_tokens <= 1024 else 64


def is_fused(*, num_tokens: int, rank: int, width: int, itemsize: int) -> bool:
    """Whether h stays in registers: tiles enough without planes, and a block or two of columns.

    A tile of `width` adapters holds a block for each.
    """
    return num_tokens >= 4096 and width <= 2 and rank <= most_columns(itemsize)


def most_columns(itemsize: int) -> int:
    """Columns of h in a block: float32 products keep both operands in registers."""
    return 64 if itemsize <= 2 else 32


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
