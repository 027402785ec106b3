"""Token ids that a vocabulary does not hold are refused wherever they can be read."""

from typing import Any

import jax
import numpy as np


def check_token_ids(
    ids: Any,
    vocab_size: int,
    *,
    name: str = "tokens",
    of: str = "the model's vocabulary",
    mask: Any = None,
    remedy: str = "was the text encoded with another tokenizer?",
) -> None:
    """ValueError for the first id outside 0..vocab_size − 1, with its position and how many more.

    ids   integers of any shape; inside jit they cannot be read and nothing is checked
    mask  of the same shape, True where an id counts; padding may hold anything

    A look-up in an array would not tell: JAX reads the last row for id −1 and for one past the end.
    """
    if isinstance(ids, jax.core.Tracer) or isinstance(mask, jax.core.Tracer):
        return
    try:
        ids = np.asarray(ids)
    except (ValueError, OverflowError) as error:  # lists of unequal lengths
        raise ValueError(f"{name} is no array of token ids: {error}") from None
    if not np.issubdtype(ids.dtype, np.integer) and ids.size:
        raise ValueError(f"{name} holds {ids.dtype}; expected integer token ids")
    bad = (ids < 0) | (ids >= vocab_size)
    if mask is not None:
        bad &= np.asarray(mask)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name}[{', '.join(map(str, at))}] is token id {ids[at]}, outside {of} of "
            f"{vocab_size} ids ({int(bad.sum())} such in all): expected 0 <= id < {vocab_size}; "
            f"{remedy}"
        )
