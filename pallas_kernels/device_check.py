"""On a GPU: are the kernels right there, and how near are they to the memory floor?

    python -m pallas_kernels.device_check --minutes=5 --out=device_check.jsonl

needs JAX, NumPy and this package alone. It checks numbers first (every strategy on every backend,
forward and gradients, against float64), then measures the machine's constants, then times the
paper's sizes in an order of importance, and stops in time. Every row is written when it is known,
as one line of JSON; a `summary` row ends the file. Exit code 0; 1 where a number is wrong; 2 where
there is no GPU to measure (`--allow_cpu` runs everything at tiny sizes, and then still says so).

Times are of one call, by the difference between a program of many and one of a quarter as many,
with CUDA graphs, over three sets of weights that rotate. The sort, which all calls of a program
share, drops out and has rows of its own.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench
from pallas_kernels.baselines import BASELINES, HOST
from pallas_kernels.cost import H200, floor_seconds
from pallas_kernels.device_cases import (
    CONSTANTS,
    GPU,
    TINY,
    Case,
    Scale,
    sections,
    sort_arm,
)
from pallas_kernels.device_numbers import NumberCheck, number_checks

THREADS = 12  # that compile


class Rows:
    """Writes a line of JSON for every row, to the file and to the terminal, at once."""

    def __init__(self, out: IO[str] | None):
        self._out = out
        self.counts: dict[str, int] = {}
        self.wrong: list[str] = []

    def write(self, row: str, **values: Any) -> None:
        self.counts[row] = self.counts.get(row, 0) + 1
        line = json.dumps({"row": row, **{name: _json(each) for name, each in values.items()}})
        for stream in (self._out, sys.stdout):
            if stream is not None:
                print(line, file=stream, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the whole check; returns the exit code."""
    arguments = _parser().parse_args(argv)
    begun = time.monotonic()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not arguments.allow_cpu:
        print(
            f"device_check: no GPU was measured: JAX runs on {jax.default_backend()}. Run it on a "
            "machine with an NVIDIA GPU and JAX for CUDA, or with --allow_cpu at tiny sizes, to "
            "see that the script itself works",
            file=sys.stderr,
        )
        return 2
    scale = GPU if on_gpu else TINY
    with open(arguments.out, "w", encoding="utf-8") as out:
        rows = Rows(out)
        check = Check(rows, scale, deadline=begun + 60 * arguments.minutes)
        rows.write(
            "machine",
            device=jax.devices()[0].device_kind,
            measured_gpu=on_gpu,
            jax=jax.__version__,
            dtype=scale.dtype,
            minutes=arguments.minutes,
        )
        check.numbers()
        check.constants()
        check.times()
        seconds = time.monotonic() - begun
        rows.write(
            "summary",
            measured_gpu=on_gpu,
            rows=rows.counts,
            wrong=rows.wrong,
            left_out=check.left_out,
            seconds=seconds,
        )
    print(
        f"{'' if on_gpu else 'No GPU was measured: this ran on CPU, at tiny sizes. '}"
        f"{rows.counts.get('numbers', 0)} checks of numbers, {len(rows.wrong)} wrong; "
        f"{rows.counts.get('time', 0)} times; {len(check.left_out)} cases left out for want of "
        f"time; {seconds:.0f} s; written to {arguments.out}"
    )
    code = 1 if rows.wrong else 0
    if check.abandoned:  # a compilation cannot be stopped, and Python would wait for its thread
        sys.stdout.flush()
        os._exit(code)
    return code


class Check:
    """The three parts, each of which looks at the clock before it begins anything."""

    def __init__(self, rows: Rows, scale: Scale, *, deadline: float):
        self.rows, self.scale, self.deadline = rows, scale, deadline
        self.left_out: list[str] = []
        self.abandoned = False

    def left(self) -> float:
        """Seconds until the end; 0 or less where it is past."""
        return self.deadline - time.monotonic()

    def _late(self) -> bool:
        return self.left() <= self.scale.margin_s

    def numbers(self) -> None:
        """Every strategy on every backend against float64. At most 40 % of the time."""
        checks = list(number_checks(wide=self.scale is GPU))
        end = self.left() * 0.4
        for check, result in self._in_threads(
            {check: functools.partial(NumberCheck.run, check) for check in checks}, seconds=end
        ):
            if isinstance(result, NotImplementedError):
                self.rows.write("missing", what=str(check), reason=str(result))
                continue
            if isinstance(result, BaseException):
                result = {"ok": False, "error": f"{type(result).__name__}: {result}"[:500]}
            if not result["ok"]:
                self.rows.wrong.append(str(check))
            self.rows.write("numbers", what=str(check), **result)

    def constants(self) -> None:
        """Node cost, L2 and copy bandwidth of this machine."""
        for name, measure in CONSTANTS.items():
            if self._late():
                self.left_out.append(name)
            else:
                self.rows.write("constant", what=name, **measure(self.scale))

    def times(self) -> None:
        """Case after case; those of a section compile together, and then run undisturbed."""
        for section in sections(self.scale).values():
            if self._late():
                self.left_out += [str(case) for case in section]
            else:
                self._section(section)

    def _section(self, section: Sequence[Case]) -> None:
        inputs = {case: self._inputs(case) for case in section}
        tasks: dict[tuple[Case, str], Callable] = {
            (case, name): functools.partial(self._compile, case, name, inputs[case])
            for case in section
            for name in (*case.arms, *(["sort"] if "grouped" in case.arms else []))
        }
        arms: dict[Case, dict[str, bench.Arm]] = {case: {} for case in section}
        for (case, name), result in self._in_threads(
            tasks, seconds=self.left() - self.scale.margin_s
        ):
            if isinstance(result, bench.Arm):
                arms[case][name] = result
            elif isinstance(result, BaseException):
                kind = "missing" if isinstance(result, NotImplementedError) else "failed"
                reason = f"{type(result).__name__}: {result}"[:500]
                self.rows.write(kind, what=f"{name}, {case}", reason=reason)
        for case in section:
            if self._late():
                self.left_out.append(str(case))
                continue
            self._time(case, arms[case], inputs[case])

    def _inputs(self, case: Case) -> bench.Inputs:
        return bench.make_inputs(
            case.size, dtype=self.scale.dtype, weight_sets=3, base_product=case.base_product
        )

    def _compile(self, case: Case, name: str, inputs: bench.Inputs) -> bench.Arm:
        if name in HOST:
            return bench.host_arm(BASELINES[name])
        if name == "sort":
            return sort_arm(inputs, calls=case.calls(self.scale))
        function = BASELINES[name] if name in BASELINES else bench.routed(name)
        return bench.compile_arm(
            function, inputs, calls=case.calls(self.scale), base_product=case.base_product
        )

    def _time(self, case: Case, arms: Mapping[str, bench.Arm], inputs: bench.Inputs) -> None:
        times = bench.time_arms(
            arms,
            inputs,
            repeats=self.scale.repeats,
            warm_up=3,
            budget_s=max(1.0, min(8.0, self.left() / 4)),
        )
        size, active = case.size, inputs.active
        device = dataclasses.replace(H200, itemsize=jnp.dtype(self.scale.dtype).itemsize)
        floor = floor_seconds(size, device, active=active)
        for name in arms:
            low, high = times.spread(name)
            beside: dict[str, Any] = {}
            if name != "sort" and not case.base_product:
                beside = {"floor_us": 1e6 * floor, "of_floor": floor / times.median(name)}
            if "single_lora" in arms:
                beside["over_single_lora"] = times.ratio(name, over="single_lora")
            self.rows.write(
                "time",
                section=case.section,
                arm=name,
                **dataclasses.asdict(size),
                active=active,
                base_product=case.base_product,
                calls=arms[name].calls,
                turns=len(times.seconds[name]),
                median_us=1e6 * times.median(name),
                p10_us=1e6 * low,
                p90_us=1e6 * high,
                temp_bytes=arms[name].temp_bytes,
                auto_takes=bench.path_here("auto", size).strategy if name == "auto" else None,
                **beside,
            )

    def _in_threads(
        self, tasks: Mapping[Any, Callable], *, seconds: float
    ) -> Iterator[tuple[Any, Any]]:
        """(task, result or exception) in the order given; what is late is left out and counted."""
        if seconds <= 0:
            self.left_out += [_label(task) for task in tasks]
            return
        end = time.monotonic() + seconds
        pool = concurrent.futures.ThreadPoolExecutor(THREADS if self.scale is GPU else 2)
        futures = {task: pool.submit(run) for task, run in tasks.items()}
        for task, future in futures.items():
            try:
                future.exception(timeout=max(0.0, end - time.monotonic()))
            except concurrent.futures.TimeoutError:
                self.left_out.append(_label(task))
                self.abandoned |= not future.cancel()
                continue
            yield task, future.exception() or future.result()
        pool.shutdown(wait=False, cancel_futures=True)


def _label(task: NumberCheck | tuple[Case, str]) -> str:
    return str(task) if isinstance(task, NumberCheck) else f"{task[1]}, {task[0]}"


def _json(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.device_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=_minutes, default=5.0, help="stop after so long")
    parser.add_argument("--out", default="device_check.jsonl", help="where the rows go")
    parser.add_argument(
        "--allow_cpu", action="store_true", help="run at tiny sizes where there is no GPU"
    )
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} minutes; expected more than 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
