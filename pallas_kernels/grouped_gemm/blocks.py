"""How much of a routed update one program of a kernel computes; read by the cost model too."""

import dataclasses


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
    *, block: int, num_tiles: int, rank: int, d_in: int, d_out: int, itemsize: int
) -> Blocks:
    """Blocks for an H200: 132 processors, and 227 KiB of shared memory each.

    Planes and parts multiply the programs until there are one or two for each processor, as long
    as a plane costs little beside x and y (its R numbers are written and read once in float32).
    """
    rows = max(16, power_of_two(block))
    step = 128 if itemsize <= 2 and rows <= 64 else 64
    steps_in, steps_out = -(-d_in // step), -(-d_out // step)
    programs = max(1, num_tiles)
    planes = parts = 1
    while planes < 32 and programs * planes < 160 and 2 * planes <= steps_in:
        planes *= 2
    while programs * parts < 264 and 2 * parts <= steps_out:
        parts *= 2
    return Blocks(
        rows=rows,
        rank=max(16, min(64, power_of_two(rank))),
        inner=step,
        outer=step,
        planes=planes,
        parts=parts,
        warps=8 if rows >= 128 else 4,
    )


def is_fused(*, num_tokens: int, rank: int) -> bool:
    """Whether h stays in registers: there are tiles enough without planes, and h is one block."""
    return num_tokens >= 4096 and rank <= 64


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
