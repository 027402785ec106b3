"""Long fuzzing: python -m tests.fuzz.run --inputs=100000 [--targets=gguf,gin] [--seed=0].

Prints the inputs of each target, how many were refused and how many accepted and verified, and the
first input that broke the promise, which is also written to a folder. Exit code 1 on such a one.
"""

import argparse
import contextlib
import os
import pathlib
import pprint
import sys
import time
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
from absl import logging
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz.targets import Target, all_targets, laid_out, run_case

CHUNK = 1000  # cases that one search keeps in mind: it grows slow with their number


def fuzz(target: Target, inputs: int, *, seed: int, shrink: bool = True) -> dict[str, int]:
    """Tries that many inputs: {"refused": n, "accepted": n}; raises where one breaks a promise."""
    count = {"refused": 0, "accepted": 0}
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    chunk = 0
    while (left := inputs - sum(count.values())) > 0:
        before = sum(count.values())

        @hypothesis.seed(f"{target.name}-{seed}-{chunk}")
        @settings(
            max_examples=min(CHUNK, left),
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @hypothesis.given(target.inputs)
        def search(case):
            search.last = case
            count["accepted" if run_case(target, case) else "refused"] += 1

        try:
            search()
        except AssertionError as error:
            error.case = search.last
            raise
        chunk += 1
        if sum(count.values()) == before:  # every case that there is was tried
            break
    return count


def saved(target: Target, case: object, folder: pathlib.Path) -> str:
    """Writes a failing case where it can be looked at and given to a reader by hand."""
    place = folder / target.name
    place.mkdir(parents=True, exist_ok=True)
    (place / "case.txt").write_text(pprint.pformat(case, width=100), "utf-8", "backslashreplace")
    if isinstance(case, dict):
        with contextlib.suppress(OSError, ValueError):
            laid_out(case, place)
    elif isinstance(case, bytes):
        (place / "content").write_bytes(case)
    return str(place)


def main(argv: list[str] | None = None) -> int:
    """Fuzzes every target with its share of the inputs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--targets", default="", help="comma-separated names; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=pathlib.Path, default=pathlib.Path("fuzz-failures"))
    parser.add_argument("--keep_going", action="store_true", help="go on after a failing target")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=hypothesis.errors.HypothesisWarning)
    found = all_targets()
    wanted = options.targets.split(",") if options.targets else list(found)
    if unknown := [name for name in wanted if name not in found]:
        parser.error(f"unknown target {unknown[0]!r}; known are {', '.join(found)}")
    parts = sum(found[name].share for name in wanted)
    total, start, failed = {"refused": 0, "accepted": 0}, time.monotonic(), 0
    for name in wanted:
        target, begin = found[name], time.monotonic()
        inputs = -(-options.inputs * target.share // parts)
        try:
            count = fuzz(target, inputs, seed=options.seed)
        except AssertionError as error:
            failed += 1
            case = getattr(error, "case", None)
            print(f"{name}: FAILED with --seed={options.seed}: {str(error)[:800]}")
            print(f"  {case!r:.600}\n  written to {saved(target, case, options.failures)}")
            if not options.keep_going:
                return 1
            continue
        for kind, number in count.items():
            total[kind] += number
        _print_line(name, count, time.monotonic() - begin)
    _print_line("all", total, time.monotonic() - start)
    return 1 if failed else 0


def _print_line(name: str, count: dict[str, int], seconds: float) -> None:
    tried = sum(count.values())
    print(
        f"{name:18} {tried:7} inputs: {count['refused']:7} refused, {count['accepted']:6} accepted "
        f"and verified, 0 broken, {seconds:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    logging.set_verbosity(logging.FATAL)  # a hundred thousand notes would hide the counts
    sys.exit(main())
