"""Swapping an adapter into a slot: against copying its bytes, and beside a running decode step."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from experiments import kernel_timing
from experiments.kernel_timing import milliseconds
from experiments.random_models import random_adapter
from experiments.registry import check_config
from experiments.run_folder import Claim, Run, markdown
from experiments.turns import time_in_turns
from molora_jax.adapters import AdapterBank
from molora_jax.adapters.slot_format import HostSlot, StagedAdapter, readable_size
from molora_jax.adapters.stack import Stacks
from molora_jax.compilations import count_compilations
from molora_jax.generation.programs import empty_state
from molora_jax.models import BaseModel, ModelConfig, base_digest, load_base
from molora_jax.routing import SequenceRouter
from pallas_kernels.bench import Times

GOAL = 2.0  # a swap costs at most so many times the copy of its bytes
ARMS = {
    "copy": "the bytes of one slot, array by array, and nothing else",
    "stage": "checks, scale folded, converted: on the host, in any thread, before a slot is needed",
    "transfer": "the copy to the device; on a CPU it may be none, the device reading host memory",
    "write": "the slot written from what is on the device already",
    "load": "transfer and write",
    "write_both": "the write where the bank keeps the arrays of each layer too",
    "load_both": "transfer and that write: what the engine does on a CPU",
    "step": "a decode step of mixed rows, alone",
    "step_beside_transfer": "the same, an adapter's transfer started while it runs",
    "write_then_step": "the write of a slot whose transfer is done, and a step",
    "load_then_step": "transfer, write, and a step",
}
# What a swap adds to the step that follows it.
HELD_UP = {"write_then_step": "prefetched", "load_then_step": "cold"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A bank of `num_slots` slots of each of `ranks`, full, so that every load evicts.

    base       base model whose shapes the bank has
    dtype      of weights and activations
    ranks      R of a bank, each timed
    num_slots  K of a bank
    rows       of the decode step that runs beside
    repeats    turns of the loads
    beside     turns of that decode step, alone and with a load
    """

    base: str = "smollm2-135m"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    ranks: tuple[int, ...] = (8, 16, 64)
    num_slots: int = 4
    rows: int = 8
    repeats: int = 21
    beside: int = 21
    seed: int = 0

    def __post_init__(self):
        check_config(self)
        for name in ("num_slots", "rows", "repeats", "beside"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name} = {getattr(self, name)}: expected more than 0")
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"Config.ranks = {self.ranks}: expected ranks of 1 or more")


def digests(config: Config) -> dict[str, str]:
    return {"base": base_digest(config.base)}


def main(config: Config, run: Run) -> None:
    base = load_base(config.base, dtype=config.dtype)
    times: dict[int, Times] = {}
    sizes: dict[int, int] = {}
    compiled: list[str] = []
    for at, rank in enumerate(config.ranks):
        swaps = Swaps(base.config, config, rank)
        sizes[rank] = swaps.bank.bytes_per_slot
        steps = DecodeSteps(base, config, swaps)
        for arm in (*swaps.arms.values(), *steps.arms.values()):  # compile
            jax.block_until_ready(arm())
        with count_compilations() as found:
            alone = time_in_turns(swaps.arms, repeats=config.repeats)
            beside = time_in_turns(steps.arms, repeats=config.beside)
        compiled += found
        times[rank] = Times({**alone.seconds, **beside.seconds})
        values = {f"{arm}_s": list(each) for arm, each in times[rank].seconds.items()}
        run.log_metrics({"rank": rank, **values}, step=at, phase="ranks")
        del swaps, steps  # before the next rank's take their room
    _finish(config, run, times, sizes, compiled)


class Swaps:
    """A full bank, on a CPU one with the arrays of each layer too, and adapters by turns in them.

    arms  by name, what one turn does; those that only write find the transfer done
    """

    def __init__(self, model: ModelConfig, config: Config, rank: int):
        K = config.num_slots
        self.bank = AdapterBank(model, num_slots=K, max_rank=rank, dtype=config.dtype)
        # One more than there are slots: the next one is never resident, and takes the oldest slot.
        adapters = [
            random_adapter(model, f"adapter{i}", rank=rank, seed=config.seed + i)
            for i in range(K + 1)
        ]
        self.staged = [self.bank.stage(adapter) for adapter in adapters]
        self.ready = [jax.block_until_ready(each.transfer()) for each in self.staged]
        rooms = [empty_like(self.staged[0].content) for _ in range(2)]
        copies = zip(itertools.cycle(self.staged), itertools.cycle(rooms))
        stages, transfers = itertools.cycle(adapters), itertools.cycle(self.staged)
        banks = {"": self.bank}
        if jax.default_backend() == "cpu":
            banks["_both"] = AdapterBank(model, num_slots=K, max_rank=rank, dtype=config.dtype)
            assert len(banks["_both"].layers) == model.num_layers
        self.in_steps = list(banks.values())[-1]  # what the engine reads on this device
        self._turns = {}
        for bank in banks.values():
            self._turns[bank] = itertools.count(K)
            for staged in self.staged[:-1]:
                bank.load(staged)
        self.arms: dict[str, Callable[[], Any]] = {
            "copy": lambda: copy_bytes(*next(copies)),
            "stage": lambda: self.bank.stage(next(stages)).content,
            "transfer": lambda: next(transfers).transfer(),
        }
        for which, bank in banks.items():
            self.arms[f"write{which}"] = functools.partial(self.load, bank, ready=True)
            self.arms[f"load{which}"] = functools.partial(self.load, bank)

    def load(self, bank: AdapterBank, *, ready: bool = False) -> tuple[Stacks, Any]:
        """The adapter that went out last comes in again; returns what to wait for."""
        at = next(self._turns[bank]) % len(self.staged)
        bank.load(self.staged[at], evict=True, transferred=self.ready[at] if ready else None)
        return bank.stacks, bank._layers


class DecodeSteps:
    """A decode step of mixed rows over the bank, alone and with a swap before or beside it."""

    def __init__(self, base: BaseModel, config: Config, swaps: Swaps):
        self.swaps, self.stepper = swaps, base.decoder.unstacked()
        self.slots = np.arange(config.rows, dtype=np.int32) % config.num_slots
        self.tokens = np.arange(config.rows, dtype=np.int32)
        # Four arms, and two turns that only warm up. No prompt: a step costs what its cache's room
        # does, filled or not.
        room = 4 * (config.beside + 2)
        self.cache = empty_state(
            base.decoder, rows=config.rows, context=room, num_columns=config.num_slots
        ).cache
        self.arms: dict[str, Callable[[], Any]] = {
            "step": self.step,
            "step_beside_transfer": self.beside,
            "write_then_step": lambda: self.after(ready=True),
            "load_then_step": lambda: self.after(ready=False),
        }

    def step(self) -> jax.Array:
        """Starts one; what to wait for."""
        bank = self.swaps.in_steps
        adapters = bank.layers if jax.default_backend() == "cpu" else bank.stacks
        logits, self.cache = decode(self.stepper, self.tokens, self.cache, adapters, self.slots)
        return logits

    def beside(self) -> jax.Array:
        logits = self.step()
        self.swaps.staged[0].transfer()
        return logits

    def after(self, *, ready: bool) -> jax.Array:
        self.swaps.load(self.swaps.in_steps, ready=ready)
        return self.step()


@functools.partial(jax.jit, donate_argnames="cache")
def decode(decoder, tokens, cache, adapters, slots):
    """Logits (B, V) of one decode step, each row on its own slot."""
    out, cache = decoder.decode(tokens, cache, adapters=adapters, router=SequenceRouter(slots))
    return decoder.logits(out.hidden[:, 0]), cache


def empty_like(content: HostSlot) -> HostSlot:
    """Host memory that was written once, so that no copy pays for its first touch."""
    return {p: tuple(np.ones_like(each) for each in arrays) for p, arrays in content.items()}


def copy_bytes(staged: StagedAdapter, room: HostSlot) -> list[jax.Array]:
    """The plain copy: within host memory on a CPU, one transfer for each array elsewhere."""
    arrays = [each for part in staged.content.values() for each in part]
    if jax.default_backend() != "cpu":
        return [jax.device_put(each) for each in arrays]
    for array, place in zip(arrays, (e for part in room.values() for e in part), strict=True):
        np.copyto(place, array)
    return []


def _finish(
    config: Config,
    run: Run,
    times: Mapping[int, Times],
    sizes: Mapping[int, int],
    compiled: list[str],
) -> None:
    where = f"{kernel_timing.device()}, {config.base}"
    loads = [arm for arm in ("load", "load_both") if arm in times[config.ranks[0]]]
    claims, metrics = [], {}
    for rank, each in times.items():
        for arm in each.seconds:
            over = "step" if "step" in arm else "copy"
            if arm != over:
                metrics[f"{arm}_over_{over}_r{rank}"] = each.ratio(arm, over=over)
        for arm, name in HELD_UP.items():
            more = np.median(each.seconds[arm] - each.seconds["step"])
            metrics[f"held_up_{name}_r{rank}_ms"] = 1e3 * float(more)
        for arm in loads:
            ours = each.ratio(arm, over="copy")
            claims.append(
                Claim(
                    id=f"swap.{arm}_over_copy_r{rank}",
                    kind="ratio",
                    ours=ours,
                    unit="x",
                    direction="lower",
                    holds=ours <= GOAL,
                    note=f"{where}; our own goal is {GOAL:g} at most",
                )
            )
    claims.append(
        Claim(
            id="swap.compilations",
            kind="order",
            ours=len(compiled),
            direction="lower",
            holds=not compiled,
            note=f"{where}; our own goal is none over all loads" + "".join(
                f"; {name}" for name in sorted(set(compiled))
            ),
        )
    )  # fmt: skip
    arms = list(times[config.ranks[0]].seconds)
    header = ["", *(f"rank {rank}, {readable_size(size)}" for rank, size in sizes.items())]
    rows = [[arm.replace("_", " "), *(_cell(each, arm) for each in times.values())] for arm in arms]
    rows += [
        [
            f"held up, {name}",
            *(f"{metrics[f'held_up_{name}_r{rank}_ms']:.3g}" for rank in config.ranks),
        ]
        for name in HELD_UP.values()
    ]
    report = (
        f"# Swapping an adapter\n\n{config.base}, a full bank of {config.num_slots} slots on all "
        f"seven projections, {config.dtype} on {kernel_timing.device()}. Milliseconds: medians of "
        f"{config.repeats} turns, of steps {config.beside}, in alternating order (10th to 90th "
        "percentile), and the median of paired ratios over the copy, of steps over the step.\n\n"
        + markdown(header, rows)
        + "\n"
        + "".join(f"- {arm.replace('_', ' ')}: {ARMS[arm]}\n" for arm in arms)
        + "- held up: the median of what a swap adds to a step, its transfer done before or not\n"
        + f"\nCompiled over all loads and steps: {len(compiled)}.\n"
    )
    kernel_timing.draw_bars(
        run,
        "swap",
        {
            arm.replace("_", " "): [
                kernel_timing.ratio_band(each, arm, "copy") for each in times.values()
            ]
            for arm in arms
            if arm in ("transfer", "write", "load", "write_both", "load_both")
        },
        config=config,
        groups=[f"rank {rank}, {readable_size(size)}" for rank, size in sizes.items()],
        ylabel="times the copy of the bytes",
        title="Swapping an adapter, over the plain copy of its bytes",
        sizes=f"{config.base}, {config.num_slots} slots",
    )
    run.finish(metrics=metrics, claims=claims, report=report)


def _cell(times: Times, arm: str) -> str:
    over = "step" if "step" in arm else "copy"
    ratio = "" if arm == over else f", {times.ratio(arm, over=over):.2f} x"
    return milliseconds(times, arm) + ratio
