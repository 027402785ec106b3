"""Measured choices that go before the cost model: a small table in JSON, by bucket of sizes."""

import functools
import json
import os
import re
from pathlib import Path

from pallas_kernels.grouped_gemm.blocks import power_of_two
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.token_sort import LAYOUTS

DEVICES = ("h200", "cpu")
_EXAMPLE = "h200 N=16 K=8 k=1 R=64 D=4096 F=4096"


def bucket(size: ProblemSize, device: str, *, widths: bool = False) -> str:
    """The key of a plan: sizes but K and k are rounded up to a power of two.

    Without widths it may name the tiles, which projections of all widths share, and the strategy;
    with widths the strategy alone, and goes first.
    """
    key = f"{device} N={power_of_two(size.num_tokens)} K={size.num_slots} k={size.top_k}"
    if widths:
        key += "".join(
            f" {name}={power_of_two(value)}"
            for name, value in (("R", size.rank), ("D", size.d_in), ("F", size.d_out))
        )
    return key


def planned(size: ProblemSize, device: str, *, widths: bool = False) -> dict:
    """What the table says of these sizes, if anything."""
    return read_plans(plans_file()).get(bucket(size, device, widths=widths), {})


def plans_file() -> str:
    """MOLORA_PLANS, or the table beside this file."""
    return os.environ.get("MOLORA_PLANS") or str(Path(__file__).with_name("plans.json"))


@functools.lru_cache(maxsize=8)
def read_plans(file: str) -> dict[str, dict]:
    """The whole table, checked; read when a program is traced.

        {"h200 N=1024 K=8 k=2": {"layout": "sets", "block": 64},
         "h200 N=16 K=8 k=1 R=64 D=4096 F=4096": {"strategy": "bgmv"}}

    Raises ValueError for a table that says anything else.
    """

    def refuse(what):
        raise ValueError(f"plan table {file}: {what}")

    try:
        table = json.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"plan table {file} cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        refuse(f"is a {type(table).__name__}; expected an object of buckets")
    number = r"(0|[1-9]\d*)"
    form = rf"({'|'.join(DEVICES)}) N={number} K={number} k={number}"
    form += rf"( R={number} D={number} F={number})?"
    for key, plan in table.items():
        if not re.fullmatch(form, key):
            refuse(f"key {key!r}; expected e.g. {_EXAMPLE!r}")
        if not isinstance(plan, dict):
            refuse(f"{key!r} is {plan!r}; expected an object")
        for name, value in plan.items():
            known = {
                "strategy": value in ("all_slots", "grouped", "bgmv"),
                "layout": value in LAYOUTS and (value == "entries") == key.startswith("cpu"),
                "block": type(value) is int
                and (value > 0 if key.startswith("cpu") else value in (16, 32, 64, 128)),
            }
            if not known.get(name):
                refuse(
                    f"{key!r} has {name} {value!r}; expected strategy (all_slots, grouped, bgmv), "
                    "or layout (cpu: entries; h200: passes, sets) and block (cpu: any number of "
                    "rows; h200: 16, 32, 64, 128)"
                )
        if ("layout" in plan) != ("block" in plan) or ("layout" in plan and " R=" in key):
            refuse(
                f"{key!r} is {plan}; expected layout and block together, in a key without R, D, F"
            )
        if power_of_two(n := int(key.split("N=")[1].split()[0])) != n:
            refuse(f"{key!r} has N={n}, which no bucket has; expected a power of two")
    return table
