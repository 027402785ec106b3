"""The collectives of a compiled program, read from its text."""

import math
import re
from typing import NamedTuple

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf" = (.+?) ({'|'.join(_KINDS)})(-start)?\(")


class Collective(NamedTuple):
    """One operation of the program, done `times` a step.

    size  bytes on one device: an all-gather's result, the operand of the others
    n     devices of a group
    """

    kind: str
    size: int
    n: int
    times: int


def collectives(hlo: str) -> list[Collective]:
    """Those of a program's text after optimisation; what a loop holds counts as often as it runs.

    Raises ValueError where a loop with collectives does not say how often it runs.
    """
    computations: dict[str, str] = {}
    entry = ""
    for match in re.finditer(r"^(ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S):
        computations[match[2]] = match[3]
        entry = match[2] if match[1] else entry
    return _of(entry, computations, 1)


def _of(name: str, computations: dict[str, str], times: int) -> list[Collective]:
    found = []
    for line in computations.get(name, "").splitlines():
        if operation := _OPERATION.search(line):
            found.append(_collective(line, operation, times))
        body = re.search(r"\bbody=%?([\w.\-]+)", line)
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
        called = re.findall(r"\b(?:body|calls|to_apply)=%?([\w.\-]+)", line)
        if branches := re.search(r"_computations=\{(.*?)\}", line):
            called += re.findall(r"[\w.\-]+", branches[1])
        for each in called:
            inside = _of(each, computations, times * (int(count[1]) if body and count else 1))
            if inside and body and not count:
                raise ValueError(f"{name}: a loop over {each} does not say how often it runs")
            found += inside
    return found


def _collective(line: str, operation: re.Match, times: int) -> Collective:
    shapes, kind, started = operation.groups()
    sizes = [
        _WIDTHS.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    ]
    n = _group_size(line)
    if started and kind != "all-reduce":
        sizes = sizes[len(sizes) // 2 :]  # behind the operands
    size = sum(sizes)
    return Collective(kind, size * n if kind == "reduce-scatter" else size, n, times)


def _group_size(line: str) -> int:
    """Devices of a group, in each of the three ways that XLA writes them."""
    groups = re.search(r"replica_groups=(.*)", line)
    if groups is None:  # a permutation
        return 2
    if listed := re.match(r"\{\{([\d,]+)\}", groups[1]):
        return listed[1].count(",") + 1
    if shaped := re.match(r"\[\d+,(\d+)\]<=", groups[1]):
        return int(shaped[1])
    named = re.match(r"mesh\[(.*?)\][^{]*\{(.*?)\}", groups[1])
    assert named is not None, line
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
