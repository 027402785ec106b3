"""Arrival traces: which request comes when, Poisson or in bursts, with lengths drawn at random."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from molora_jax.generation.request import Request


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request and when it comes, in seconds from the start of the simulation."""

    at: float
    request: Request

    def __post_init__(self):
        if not 0 <= self.at < math.inf:
            raise ValueError(f"at is {self.at}; expected seconds from the start, 0 or more")


def poisson_times(rate: float, count: int, *, seed: int) -> Float[np.ndarray, " count"]:
    """When `count` requests arrive, `rate` a second on average, each on its own; in seconds."""
    _check_rate(rate)
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def bursty_times(
    rate: float, count: int, *, seed: int, on_s: float = 1.0, off_s: float = 3.0
) -> Float[np.ndarray, " count"]:
    """As many on average, but all within `on_s` seconds of every on_s + off_s."""
    _check_rate(rate)
    if not on_s > 0 or not off_s >= 0:
        raise ValueError(f"on_s is {on_s} and off_s {off_s}; expected positive seconds, and 0 off")
    busy = poisson_times(rate * (on_s + off_s) / on_s, count, seed=seed)
    return busy + off_s * np.floor(busy / on_s)


def random_arrivals(
    times: Float[np.ndarray, " n"],
    adapters: Sequence[str | None],
    *,
    vocab_size: int,
    prompt_tokens: tuple[int, int],
    answer_tokens: tuple[int, int],
    seed: int,
) -> list[Arrival]:
    """A request at each of the times for each of the adapters, None being the base.

    Prompts are random ids. Their lengths, and those of the answers, are drawn log-uniformly from
    the least to the most given, both included; answers end at theirs and never before.
    """
    if len(adapters) != len(times):
        raise ValueError(f"{len(adapters)} adapters for {len(times)} times: expected one for each")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("answer_tokens", answer_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} is ({low}, {high}); expected 1 <= least <= most")
    rng = np.random.default_rng(seed)

    def length(low, high):
        drawn = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
        return min(max(drawn, low), high)

    return [
        Arrival(
            float(at),
            Request(
                prompt=rng.integers(0, vocab_size, length(*prompt_tokens)).tolist(),
                max_tokens=length(*answer_tokens),
                ignore_eos=True,
                adapter=adapter,
            ),
        )
        for at, adapter in zip(times, adapters, strict=True)
    ]


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}; expected requests a second, more than 0")
