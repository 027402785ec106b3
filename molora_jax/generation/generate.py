"""Prompts in, tokens out, with the adapters that every token used."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from molora_jax.adapters import AdapterStack
from molora_jax.call import check_decoder, check_prompts
from molora_jax.display.progress import waiting
from molora_jax.generation.sampling import Sampling, sample
from molora_jax.models.decoder import Decoder
from molora_jax.parallel import check_same, computing, current_mesh, place
from molora_jax.parallel.local import constrain, constrain_tree
from molora_jax.routing.metrics import main_adapter
from molora_jax.routing.reach import check_reach
from molora_jax.token_ids import check_token_ids
from pallas_kernels import Routing


@dataclasses.dataclass(frozen=True)
class Generated:
    """One row's answer.

    tokens   the new ids, the stop id included where one ended it
    routing  Routing of prompt and new tokens together, (L, n, k) numpy arrays; None for the base
    stopped  whether a stop id ended it, and not the length

        >>> routed = composition.routed
        >>> (answer,) = mj.generate(base.decoder, [[104, 105]], max_new_tokens=3, **routed)
        >>> answer.main_adapters.shape  # of prompt and new tokens, (n,)
        (5,)
        >>> answer
        3 new tokens, ended by the length; routing of (4, 5, 1) (layers, tokens, adapters)
    """

    tokens: list[int]
    routing: Routing | None
    stopped: bool

    def __str__(self) -> str:
        kept = "no routing"
        if self.routing is not None:
            kept = f"routing of {self.routing.adapter_ids.shape} (layers, tokens, adapters)"
        why = "a stop id" if self.stopped else "the length"
        count = f"{len(self.tokens)} new token{'s' * (len(self.tokens) != 1)}"
        return f"{count}, ended by {why}; {kept}"

    __repr__ = __str__

    @property
    def main_adapters(self) -> Int[np.ndarray, " n"] | None:
        """(n,) slot of the main adapter of every token of `routing`, by `metrics.main_adapter`.

        The one rule by which tools and pages say whose a token is: the largest sum of its top-1
        gates over the later half of the layers; −1 for the base alone. None without a routing.
        """
        if self.routing is None:
            return None
        return main_adapter(self.routing.adapter_ids, self.routing.gates)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = Sampling(),
    seed: int = 0,
    adapters: dict[str, AdapterStack] | None = None,
    router=None,
    column_to_slot=None,
    padding: str = "left",
    on_tokens: Callable[[np.ndarray], None] | None = None,
) -> list[Generated]:
    """Continues every prompt of a batch by up to `max_new_tokens`.

    Greedy results do not depend on what else is in the batch or on the side of the padding. Prompt
    and cache lengths are rounded up to powers of two, so that few lengths are ever compiled.
    `on_tokens` is called with the (B,) ids of each step as soon as they are known.

    Raises ValueError for an argument of another kind, a learned router without column_to_slot, an
    empty prompt, ids outside the vocabulary, a length past the model's, a router that names an
    adapter which is not there, or logits that are not finite.

        >>> routed = composition.routed  # adapters, router and column_to_slot
        >>> (answer,) = mj.generate(base.decoder, [[104, 105]], max_new_tokens=3, **routed)
        >>> len(answer.tokens), answer.routing.adapter_ids.shape  # (L, n, k)
        (3, (4, 5, 1))
    """
    check_decoder(decoder)
    check_prompts(prompts)
    config = decoder.config
    if not len(prompts):
        return []
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: expected at least 1")
    if padding not in ("left", "right"):
        raise ValueError(f"padding {padding!r}: expected 'left' or 'right'")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{row}] is empty: a prompt needs at least one token")
        check_token_ids(prompt, config.vocab_size, name=f"prompts[{row}]")
        if np.ndim(prompt) != 1:
            raise ValueError(f"prompts[{row}] has {np.ndim(prompt)} axes: expected a list of ids")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > config.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed the model's "
            f"{config.max_positions} positions: shorten either"
        )

    # Rounded, but never past the model's positions, which the decoder refuses.
    S = min(_round_up(longest), config.max_positions - max_new_tokens)
    tokens = np.zeros((len(prompts), S), np.int32)
    mask = np.zeros((len(prompts), S), bool)
    for row, prompt in enumerate(prompts):
        start = S - len(prompt) if padding == "left" else 0
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = True

    check_reach(router, adapters, column_to_slot, config=config)

    mesh = current_mesh()
    if mesh is not None:
        check_same(
            "text to generate",
            lambda: {
                "prompts": [list(map(int, prompt)) for prompt in prompts],
                "max_new_tokens": max_new_tokens,
                "sampling": sampling,
                "seed": seed,
            },
        )
    decoder = place(decoder, mesh)
    routed = place({"adapters": adapters, "router": router}, mesh)
    routed["column_to_slot"] = column_to_slot
    knobs = (sampling.temperature, sampling.top_k, sampling.top_p)
    with computing(mesh), waiting("compiling, and reading the prompt"):
        chosen, routing, cache, state = _prefill(
            decoder, tokens, mask, routed, _seeded(seed, 0), knobs,
            cache_size=min(_round_up(S + max_new_tokens), config.max_positions),
        )  # fmt: skip
        jax.block_until_ready(chosen)
    # A step that sliced the layers out of stacked weights would copy all of them for every token.
    stepper = place(decoder.unstacked(), mesh)
    steps, routings = [], []
    running = np.ones(len(prompts), bool)
    for step in range(1, max_new_tokens + 1):
        steps.append(np.asarray(chosen))
        if (running & (steps[-1] < 0)).any():
            row = int(np.argmax(running & (steps[-1] < 0)))
            raise ValueError(
                f"prompts[{row}]: after {step - 1} new tokens the logits are NaN or infinite: an "
                "adapter, or the base, overflows on this text. Take it out, or a wider dtype"
            )
        if on_tokens is not None:
            on_tokens(steps[-1])
        running &= ~np.isin(steps[-1], stop_ids)
        last = step == max_new_tokens or not running.any()
        if last and routing is None:
            break
        # The last token is read too when routed: its routing is part of the answer.
        compiles = waiting("compiling the step") if step == 1 else contextlib.nullcontext()
        with computing(mesh), compiles:
            chosen, each, cache, state = _step(
                stepper, chosen, cache, state, routed, _seeded(seed, step), knobs
            )
        routings.append(jax.tree.map(np.asarray, each))
        if last:
            break

    answers = []
    for row in range(len(prompts)):
        new = [int(each[row]) for each in steps]
        stop = next((at for at, token in enumerate(new) if token in stop_ids), None)
        new = new if stop is None else new[: stop + 1]
        chosen_here = None
        if routing is not None:
            chosen_here = _of_row(row, mask, routing, routings[: len(new)])
        answers.append(Generated(new, chosen_here, stop is not None))
    return answers


@functools.partial(jax.jit, static_argnames="cache_size")
def _prefill(decoder, tokens, mask, routed, key, knobs, *, cache_size):
    out, cache = decoder.prefill(tokens, mask, cache_size=cache_size, **routed)
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    hidden = jnp.take_along_axis(out.hidden, last[:, None, None], axis=1)[:, 0]
    chosen = _next(key, decoder.logits(hidden), knobs)
    return *_whole(chosen, out.routing), constrain_tree(cache, name="cache"), out.router_state


@functools.partial(jax.jit, donate_argnames="cache")
def _step(decoder, tokens, cache, router_state, routed, key, knobs):
    out, cache = decoder.decode(tokens, cache, router_state=router_state, **routed)
    chosen = _next(key, decoder.logits(out.hidden[:, 0]), knobs)
    return *_whole(chosen, out.routing), constrain_tree(cache, name="cache"), out.router_state


def _whole(*read):
    """On a mesh, whole on every device: the host reads them."""
    return jax.tree.map(constrain, read)


def _seeded(seed: int, step: int) -> tuple[np.uint32, np.uint32]:
    """The key of a step, made inside: an array of one process's device could not go to a mesh."""
    return np.uint32(seed % 2**32), np.uint32(step)


def _next(key, logits, knobs):
    """The next token of each row, −1 where its logits are not finite: the largest would be id 0."""
    B, (seed, step) = logits.shape[0], key
    key = jax.random.fold_in(jax.random.key(seed), step)
    temperature, top_k, top_p = (
        jnp.broadcast_to(jnp.asarray(each, dtype), B)
        for each, dtype in zip(knobs, (jnp.float32, jnp.int32, jnp.float32), strict=True)
    )
    chosen = sample(jax.random.split(key, B), logits, temperature, top_k, top_p)
    return jnp.where(jnp.isfinite(logits).all(axis=-1), chosen, -1)


def _round_up(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def _of_row(row: int, mask: np.ndarray, prefill: Routing, steps: list[Routing]) -> Routing:
    """One row's decisions, prompt and new tokens together: (L, n, k)."""

    def join(of_prompt, *of_steps):
        by_row = np.asarray(of_prompt).reshape(len(of_prompt), *mask.shape, -1)
        new = [step[:, row : row + 1] for step in of_steps]
        return np.concatenate([by_row[:, row][:, mask[row]], *new], axis=1)

    return jax.tree.map(join, prefill, *steps)
