"""Which algorithm for which shape, and why; and who can run it.

A strategy is the algorithm, a backend is who runs it. What each one costs beside the base product,
a token of D inputs and F outputs, with k adapters of rank R out of K:

  all_slots   K·R·(D + F) products in two large matrices; weights read once
  grouped     k·R·(D + F) products in tiles of one adapter; rows gathered and scattered k times,
              which costs about as much as another ten to twenty columns of rank
  reference   k·R·(D + F) numbers gathered before the first product; the definition, not a path
"""

import difflib

STRATEGIES = ("all_slots", "grouped", "bgmv", "reference")
BACKENDS = ("xla", "triton", "interpret")


def resolve(strategy: str, backend: str, *, num_tokens: int, top_k: int, num_slots: int) -> str:
    """The strategy that will run: the one named, or the choice for these sizes.

    Raises:
      ValueError: a name that is none of ours.
      NotImplementedError: a strategy or a backend that is not there yet, and what to use instead.
    """
    _check_name("strategy", strategy, STRATEGIES)
    _check_name("backend", backend, BACKENDS)
    if strategy == "bgmv":
        raise NotImplementedError(
            "strategy 'bgmv' is not there yet; there are 'all_slots', 'grouped' and 'reference'. "
            "Use 'grouped': it takes the same routings, and tiles of one row when tokens are few"
        )
    if backend in ("triton", "interpret"):
        raise NotImplementedError(
            f"backend {backend!r} has no kernels yet; there is 'xla', which runs every strategy "
            "on CPU and GPU. Use backend='xla' or 'auto'"
        )
    if strategy == "auto":
        return choose(num_tokens=num_tokens, top_k=top_k, num_slots=num_slots)
    return strategy


def choose(*, num_tokens: int, top_k: int, num_slots: int) -> str:
    """The faster strategy on XLA, by static sizes alone, so that one program holds one path.

    Sorting saves the products of the slots that a token does not use and pays for moving rows.
    Measured on two CPU cores at ranks 8 to 64, the two meet near K = 2k; below it the large
    products also have the cheaper gradient. A step of few tokens and slots is bound by the number
    of operations and not by their size, and all slots need the fewest.

    The rank is left out, so that a plan can be made before a stack is at hand: at rank 64 sorting
    wins from K = 2k on, and the rule gives away about 15 %.
    """
    if num_slots <= 2 * top_k or (num_slots <= 8 and num_tokens <= 64):
        return "all_slots"
    return "grouped"


def block_rows(num_entries: int, num_slots: int) -> int:
    """Rows in a tile: the power of two at or below an adapter's fair share of entries, up to 128.

    Padding costs half a tile per adapter; a tile under 32 rows costs its own overhead. Past 128
    rows nothing is gained on CPU and the tile leaves the cache.
    """
    share = max(1, num_entries // num_slots)
    return min(128, 1 << (share.bit_length() - 1))


def _check_name(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value in (*known, "auto"):
        return
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{argument} is {value!r}; expected 'auto' or one of {', '.join(map(repr, known))}{hint}"
    )
