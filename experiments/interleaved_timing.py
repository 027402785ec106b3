"""Table 8's times: a decode step in one pass against K passes.

The paper's "per-sequence" is K passes over all tokens, of which a token keeps its own. Servers of
many adapters already take an adapter for each row, so that baseline stands beside it (bgmv).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.interleaved_data import GRID, PICTURE, Layout
from experiments.turns import time_in_turns
from molora_jax.adapters.bank import split_layers
from molora_jax.models import Decoder, ModelConfig
from molora_jax.models.decoder import KVCache
from molora_jax.routing import VocabularyRouter
from pallas_kernels.bench import Times

ARMS = {
    "per_token": "one pass, each token with the adapter of its id (strategy auto)",
    "full_passes": "K passes with one adapter each on every token, of which a token keeps its own",
    "per_row_bgmv": "one pass in which every token reads its own adapter (strategy bgmv)",
    "base": "one pass without adapters",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is timed: K = 2 adapters, of text and of pictures, in the first two slots of `stacks`.

    rows, seq_len  B rows, each of which reads token number S
    """

    decoder: Decoder
    stacks: Any
    layout: Layout
    rows: int
    seq_len: int

    @property
    def tokens(self) -> np.ndarray:
        """(B,) ids of a step: a word in one row, a code of a picture in the next."""
        rows = np.arange(self.rows)
        words, codes = 97 * rows % self.layout.num_text, self.layout.picture + 1 + rows % 16
        return np.where(rows % 2 == 0, words, codes).astype(np.int32)

    @functools.cached_property
    def router(self) -> VocabularyRouter:
        ranges = [(start, stop, min(column, 1)) for start, stop, column in self.layout.ranges()]
        return VocabularyRouter.from_ranges(
            ranges, vocab_size=self.decoder.config.vocab_size, num_columns=2
        )


def random_problem(
    *,
    width: int,
    layers: int,
    rank: int,
    rows: int,
    seq_len: int,
    dtype: str,
    seed: int,
    vocab_size: int = 65_536,
) -> Problem:
    """A random decoder of heads of 64, four times as wide inside; the vocabulary is Chameleon's."""
    from experiments.overhead import random_stacks
    from experiments.random_models import random_decoder

    layout = Layout(vocab_size - len(PICTURE) - len(GRID))
    config = ModelConfig(
        model_type="llama",
        vocab_size=layout.vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_layers=layers,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    rng = np.random.default_rng(seed)
    stacks = random_stacks(config, 2, rank, rng)

    def cast(leaf):
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, dtype) if floating else jnp.asarray(leaf)

    return Problem(
        decoder=random_decoder(config, dtype=dtype, seed=seed),
        stacks=jax.tree.map(cast, stacks),
        layout=layout,
        rows=rows,
        seq_len=seq_len,
    )


def time_steps(problem: Problem, *, repeats: int) -> Times:
    """Seconds of a decode step of all rows, by arm.

    All arms run once a turn, in alternating order, so that values of a turn are pairs.
    """
    arms = decode_arms(problem, room=repeats + 2)
    return time_in_turns(arms, repeats=repeats, warm_up=2)  # the first compiles, the second warms


def _routers(problem: Problem) -> dict[str, list[tuple[Any, str]]]:
    """The passes of every arm: (router, strategy) each."""
    # One adapter everywhere as a table too, so that the arms differ in what they say alone.
    table = np.zeros(problem.decoder.config.vocab_size, np.int32)
    everywhere = [VocabularyRouter(table + k, num_columns=2) for k in range(2)]
    return {
        "per_token": [(problem.router, "auto")],
        "full_passes": [(router, "auto") for router in everywhere],
        "per_row_bgmv": [(problem.router, "bgmv")],
        "base": [(None, "auto")],
    }


def decode_arms(problem: Problem, *, room: int) -> dict[str, Callable[[], Any]]:
    """By arm, a function that decodes one step and returns the logits of every row.

    room  steps that fit into the cache
    """
    stepper = problem.decoder.unstacked()
    on_gpu = jax.default_backend() == "gpu"
    # As the engine has them: a slice of stacked weights in a step would copy them on a CPU.
    stacks = problem.stacks if on_gpu else split_layers(problem.stacks)
    tokens = problem.tokens
    is_text = (problem.layout.modality(tokens) == 0)[:, None]
    filled = full_cache(problem, room=room)

    @functools.partial(jax.jit, static_argnames="strategy", donate_argnames="cache")
    def step(decoder, adapters, router, ids, cache, *, strategy):
        routed = {} if router is None else {"adapters": adapters, "router": router}
        out, cache = decoder.decode(ids, cache, strategy=strategy, **routed)
        return decoder.logits(out.hidden[:, 0]), cache

    def arm(passes):
        # A pass of its own needs a cache of its own: it writes its adapter's keys and values.
        caches = [jax.tree.map(jnp.array, filled) for _ in passes]

        def run():
            outputs = []
            for at, (router, strategy) in enumerate(passes):
                logits, caches[at] = step(
                    stepper, stacks, router, tokens, caches[at], strategy=strategy
                )
                outputs.append(logits)
            return outputs[0] if len(passes) == 1 else jnp.where(is_text, *outputs)

        return run

    return {name: arm(passes) for name, passes in _routers(problem).items()}


def full_cache(problem: Problem, *, room: int) -> KVCache:
    """Of rows that have read S - 1 tokens; what keys and values are costs no time."""
    c, B, S = problem.decoder.config, problem.rows, problem.seq_len
    dtype = problem.decoder.embedding[...].dtype
    zeros = jnp.zeros((B, c.num_kv_heads, S + room, c.head_dim), dtype)
    return KVCache(
        keys=(zeros,) * c.num_layers,
        values=(zeros,) * c.num_layers,
        filled=jnp.broadcast_to(jnp.arange(S + room) < S - 1, (B, S + room)),
        next_slot=jnp.full(B, S - 1, jnp.int32),
    )
