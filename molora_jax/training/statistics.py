"""Gathers the statistics of one adapter's own data: a pass of the frozen base, no other text."""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
from absl import logging
from jaxtyping import Array, Int

from molora_jax.display.progress import Progress
from molora_jax.files import read_json
from molora_jax.generation.generate import generate
from molora_jax.generation.sampling import Sampling
from molora_jax.models import BaseModel
from molora_jax.models.cache import cache_folder, remember
from molora_jax.models.decoder import Decoder
from molora_jax.parallel import computing, current_mesh, fetch, place
from molora_jax.routing.statistics import RouterStatistics, few_tokens
from molora_jax.token_ids import check_token_ids
from molora_jax.training.data import Batch, make_batch

_ROWS = 8


def gather_statistics(
    base: BaseModel,
    windows: Batch,
    *,
    num_features: int | None = 256,
    max_rows: int = 64,
    prefixes: Int[np.ndarray, "P S"] | None = None,
    seed: int = 0,
) -> RouterStatistics:
    """Of the own tokens in `windows`, read by the base alone.

    Text rarely begins where an adapter's own begins, so every row first has a foreign text and then
    the window's beginning; only the latter's tokens count. The foreign text is what the base itself
    writes (`self_written`): nobody's data is needed, and everybody has the same.

    windows       the adapter's own data, as it was trained on
    num_features  m; None, or no fewer than D: all D channels. L·m² bytes when saved
    max_rows      rows read at most, drawn evenly
    prefixes      other foreign text, rows of at least 3/4 of a window
    seed          of the draw and of where the own text begins (a quarter to three quarters in)

    Every real token counts, a question's as well as its answer's: the router has to know both.

    Raises ValueError for a token id that the base does not have, windows longer than it has
    positions for, or prefixes that are too short.

        >>> mj.gather_statistics(base, windows, num_features=8).moments.shape  # (L, m + 1, m + 1)
        (4, 9, 9)
    """
    if max_rows < 1:
        raise ValueError(f"max_rows is {max_rows}: expected at least 1")
    if windows.seq_len > base.config.max_positions:
        raise ValueError(
            f"windows of {windows.seq_len} tokens: base {base.name!r} has positions for "
            f"{base.config.max_positions}. Cut shorter ones (seq_len)"
        )
    check_token_ids(windows.tokens, base.config.vocab_size, name="windows: tokens")
    S = windows.seq_len
    longest = S - S // 4
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(windows.num_rows)[:max_rows])
    if prefixes is None:
        prefixes = self_written(base, length=longest)
    check_token_ids(prefixes, base.config.vocab_size, name="prefixes")
    if prefixes.shape[1] < longest:
        raise ValueError(
            f"prefixes has rows of {prefixes.shape[1]} tokens; windows of {S} need {longest}"
        )
    config = base.config
    D = config.hidden_size
    m = num_features if num_features is not None and num_features < D else None
    found = RouterStatistics(config.num_layers, D, num_features=m)
    tokens, mask = np.array(windows.tokens[rows]), np.array(windows.mask[rows])
    counted = mask.copy()
    for row in range(len(rows)):
        cut = int(rng.integers(S // 4, longest + 1))
        tokens[row, cut:], mask[row, cut:] = tokens[row, : S - cut], mask[row, : S - cut]
        counted[row, cut:], counted[row, :cut] = mask[row, cut:], False
        tokens[row, :cut], mask[row, :cut] = prefixes[rng.integers(len(prefixes)), :cut], True
    mesh = current_mesh()
    decoder = place(base.decoder, mesh)
    starts = range(0, len(rows), _ROWS)
    with Progress("summing statistics", len(starts)) as progress:
        for first in starts:
            here = slice(first, first + _ROWS)
            read = make_batch(tokens[here], mask[here], mask[here]).filled(_ROWS)
            with computing(mesh):
                inputs = fetch(_layer_inputs(decoder, read.tokens, read.mask))
            found.add(inputs[:, : len(tokens[here])], counted[here])
            progress.update()
    if found.count and (warning := few_tokens(found.count, m or D)):
        logging.warning("%s", warning)
    if not found.count:
        raise ValueError(
            f"none of {int(counted.sum())} own tokens has finite layer inputs: the base overflows "
            "on these windows"
        )
    return found


def self_written(base: BaseModel, *, length: int, rows: int = 32) -> Int[np.ndarray, "P S"]:
    """What the base writes at temperature 1 behind a line break, always the same.

    P = rows. The base is let to write twice `length` tokens, or as many as it has positions for,
    and each row begins somewhere in what is over: foreign text is mostly a cut from the middle.

    It takes longer than reading an adapter's data, so MOLORA_CACHE keeps it for the next adapter.
    """
    # What else decides: the last bit of a logit may turn a draw.
    device, dtype = jax.devices()[0].device_kind, base.decoder.embedding[...].dtype.name
    key = f"{base.digest} {dtype} {length} {rows} {device} {jax.__version__}"
    file = cache_folder() / "foreign_text" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    # Where sums are split the last bits are others; and of several processes all write, or none,
    # since the cache of one may be another folder.
    kept = current_mesh() is None and jax.process_count() == 1
    if key not in _WRITTEN and kept and (read := _read(file, key, rows, length, base)) is not None:
        _WRITTEN[key] = read
    if key not in _WRITTEN:
        first = base.tokenizer.encode("\n")
        count = min(2 * length, base.config.max_positions - len(first))
        with Progress("the base writes text that is no adapter's", count, compiles=2) as progress:
            written = generate(
                base.decoder,
                [first] * rows,
                max_new_tokens=count,
                sampling=Sampling(temperature=1.0),
                on_tokens=lambda _: progress.update(),
            )
        starts = np.random.default_rng(0).integers(0, count - length + 1, rows)
        _WRITTEN[key] = np.stack(
            [row.tokens[at : at + length] for row, at in zip(written, starts, strict=True)]
        )
        if kept:
            remember(file, json.dumps({"key": key, "tokens": _WRITTEN[key].tolist()}))
    return _WRITTEN[key]


_WRITTEN: dict[str, np.ndarray] = {}


def _read(file: Path, key: str, rows: int, length: int, base: BaseModel) -> np.ndarray | None:
    """The token ids in a file of the cache; None where it holds others, or none."""
    try:
        found = read_json(file, where=str(file))
        tokens = np.asarray(found.get("tokens"))
        check_token_ids(tokens, base.config.vocab_size)
    except (ValueError, OSError, TypeError):
        return None
    right = tokens.shape == (rows, length) and found.get("key") == key
    return tokens if right and tokens.dtype.kind == "i" else None


@jax.jit
def _layer_inputs(decoder: Decoder, tokens: Array, mask: Array) -> Array:
    inputs = decoder(tokens, mask, return_layer_inputs=True).layer_inputs
    assert inputs is not None
    return inputs
