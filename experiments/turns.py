"""Arms timed in turns, in one process: whatever slows the machine down meets all of them."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench import MIN_REPEATS, Times


def time_in_turns(
    arms: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warm_up: int = 1,
    budget_s: float = math.inf,
) -> Times:
    """Seconds of a call of each arm, turn by turn, in alternating order.

    Args:
      arms: each returns what to wait for.
      warm_up: turns before the first that counts.
      budget_s: no turn begins after so many seconds, once there are three.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    begun = time.perf_counter()
    for turn in range(-warm_up, repeats):
        if turn >= MIN_REPEATS and time.perf_counter() - begun > budget_s:
            break
        for name in list(arms)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(arms[name]())
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return Times({name: np.array(values) for name, values in seconds.items()})
