"""A small multimodal task: disjoint vocabularies, a grammar of its own in each, mixed in every row.

Letters beyond the table of design.md: M modalities, n symbols of each. All modalities name the same
n symbols: id m·n + c is symbol c in modality m. A row is a sequence of segments, each of one
modality, and its grammar says what follows:

    text   order 1: one of two permutations of the symbol before, three to one
    image  raster: a permutation of the symbol a line (4 tokens) before
    audio  order 2: one of two permutations of the symbol before, chosen by the one before that

The first 4 symbols of a segment are free, and any later one with probability `noise`.
"""

import numpy as np

from molora_jax.models.config import ModelConfig
from molora_jax.models.weights import random_arrays
from molora_jax.training.data import Batch, make_batch
from molora_jax.training.pretrain import small_llama

MODALITIES = ("text", "image", "audio")
FREE = 4  # symbols of a segment that nothing foretells; also the length of an image's line
SEGMENT = (12, 28)  # tokens of a segment: from the first, up to less than the second


def tables(symbols: int, seed: int) -> dict[str, np.ndarray]:
    """The permutations of the grammars."""
    rng = np.random.default_rng([seed, 7])
    names = ("often", "seldom", "line", "low", "high")
    return {name: rng.permutation(symbols) for name in names}


def make_rows(
    grammar: dict[str, np.ndarray],
    *,
    count: int,
    seq_len: int,
    noise: float,
    seed: int,
    mixed: bool = False,
) -> Batch:
    """`count` rows, every token labelled with its modality.

    mixed  the base's own data: any grammar in any vocabulary, drawn for each segment
    """
    rng = np.random.default_rng([seed, 11])
    symbols = len(grammar["line"])
    tokens = np.zeros((count, seq_len), np.int64)
    labels = np.zeros((count, seq_len), np.int64)
    for row in range(count):
        filled, modality = 0, -1
        while filled < seq_len:
            others = [m for m in range(len(MODALITIES)) if m != modality]
            modality = int(rng.choice(others))
            rule = int(rng.integers(len(MODALITIES))) if mixed else modality
            length = int(rng.integers(*SEGMENT))
            segment = _segment(rule, grammar, length, noise, rng)[: seq_len - filled]
            here = slice(filled, filled + len(segment))
            tokens[row, here] = modality * symbols + np.asarray(segment)
            labels[row, here] = modality
            filled += len(segment)
    every = np.ones_like(tokens, bool)
    return make_batch(tokens, every, every, labels=labels)


def _segment(rule: int, grammar, length: int, noise: float, rng) -> list[int]:
    symbols = len(grammar["line"])
    made = [int(each) for each in rng.integers(0, symbols, FREE)]
    while len(made) < length:
        if rng.random() < noise:
            following = rng.integers(symbols)
        elif rule == 0:
            following = grammar["often" if rng.random() < 0.75 else "seldom"][made[-1]]
        elif rule == 1:
            following = grammar["line"][made[-FREE]]
        else:
            following = grammar["low" if made[-2] < symbols // 2 else "high"][made[-1]]
        made.append(int(following))
    return made


def sizes(*, symbols: int, width: int, layers: int, seq_len: int) -> ModelConfig:
    """The base: a small Llama over all vocabularies, embeddings tied."""
    return small_llama(symbols * len(MODALITIES), width=width, layers=layers, seq_len=seq_len)


def aligned_start(model: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Random weights whose embedding is symbol + modality, as encoders aligned with each other."""
    arrays = random_arrays(model, seed=seed)
    rng = np.random.default_rng([seed, 13])
    symbols = model.vocab_size // len(MODALITIES)
    D = model.hidden_size
    symbol = 0.8 * rng.standard_normal((1, symbols, D))
    modality = 0.6 * rng.standard_normal((len(MODALITIES), 1, D))
    embedding = (symbol + modality).reshape(-1, D) * D**-0.5
    arrays["embed_tokens.weight"] = embedding.astype(np.float32)
    return arrays


def pieces(tokens, symbols: int) -> list[str]:
    """Ids as a person reads them: t7, i12, a3, each with a blank before it."""
    return [f" {MODALITIES[each // symbols][0]}{each % symbols}" for each in np.ravel(tokens)]
