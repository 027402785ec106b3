"""Who asks for which adapter, and when: traces that suit a small cache, and one that beats it."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

MEAN_RUN = 16  # accesses of a burst

PATTERNS = ("bursty", "uniform", "zipf", "adversarial")


def pattern(name: str, *, num_adapters: int, length: int, seed: int) -> Int[np.ndarray, " length"]:
    """The adapter, 0 to num_adapters − 1, of each of `length` accesses.

    bursty       runs of one adapter, their lengths geometric with a mean of 16; the next run is of
                 any other adapter: nearly all accesses repeat the last one
    uniform      each access is any adapter, whatever was before
    zipf         adapter i has a share in proportion to 1 / (i + 1), each access drawn alone
    adversarial  all adapters in turn, from a random first one: a cache of the least recently used
                 that holds fewer than all of them misses every time

    Raises ValueError for an unknown name, no adapter or a negative length.
    """
    if name not in _DRAW:
        raise ValueError(f"access pattern is {name!r}; expected one of {', '.join(PATTERNS)}")
    if num_adapters < 1 or length < 0:
        raise ValueError(
            f"num_adapters is {num_adapters} and length {length}; expected at least one adapter "
            "and no negative length"
        )
    drawn = _DRAW[name](np.random.default_rng(seed), num_adapters, length)
    return drawn.astype(np.int64)


def _bursty(rng: np.random.Generator, num_adapters: int, length: int) -> np.ndarray:
    if num_adapters == 1:
        return np.zeros(length)
    starts = rng.random(length) < 1 / MEAN_RUN
    # Steps of 1 to K − 1 from an adapter to the next can never lead back to the same one.
    steps = np.where(starts, rng.integers(1, num_adapters, length), 0)
    return (rng.integers(num_adapters) + np.cumsum(steps)) % num_adapters


def _zipf(rng: np.random.Generator, num_adapters: int, length: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, num_adapters + 1)
    return rng.choice(num_adapters, length, p=weights / weights.sum())


_DRAW: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "bursty": _bursty,
    "uniform": lambda rng, num_adapters, length: rng.integers(num_adapters, size=length),
    "zipf": _zipf,
    "adversarial": lambda rng, num_adapters, length: (
        (rng.integers(num_adapters) + np.arange(length)) % num_adapters
    ),
}
