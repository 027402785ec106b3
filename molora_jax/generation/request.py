"""What is asked of an engine, and what comes back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from molora_jax.adapters.hot_set import Version
from molora_jax.adapters.names import brief
from molora_jax.generation.sampling import Sampling
from pallas_kernels import Routing

MAX_LOGPROBS = 20  # alternatives a token, as many as OpenAI's interface gives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One continuation of one prompt.

    prompt      token ids
    max_tokens  new tokens at most
    sampling    temperature, top_k, top_p
    seed        of this request's draws: the same ones whatever else is in the batch
    stop        texts that end the answer and are not part of it
    ignore_eos  goes on behind the model's own end tokens
    logprobs    None; 0 for the chosen tokens' own; n ≤ 20 for the n likeliest beside them
    adapter     one adapter for every token, by name; None with `profile` None is the base
    profile     a routing profile of the engine
    among       of a learned profile, the adapters that may be chosen; None: all of its columns

        >>> request = mj.Request(prompt=base.tokenizer.encode("hi"), adapter="code", max_tokens=8)
        >>> request.prompt, request.sampling.temperature
        ((104, 105), 0.0)
    """

    prompt: Sequence[int]
    max_tokens: int = 16
    sampling: Sampling = Sampling()
    seed: int = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    adapter: str | None = None
    profile: str | None = None
    among: Sequence[str] | None = None

    def __post_init__(self):
        # A copy, so that what was checked is what is served.
        for field in ("prompt", "stop", "among"):
            value = getattr(self, field)
            if isinstance(value, str | bytes):
                raise ValueError(f"{field} is {value!r}; expected a list")
            if value is not None:
                object.__setattr__(self, field, tuple(value))
        if not self.prompt:
            raise ValueError("prompt is empty: it needs at least one token")
        for token in self.prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise ValueError(f"prompt holds {brief(token)}; expected integer token ids")
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("seed", self.seed, 0, 2**32 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for field, kinds in _KINDS.items():
            if not isinstance(getattr(self, field), kinds):
                value = getattr(self, field)
                raise ValueError(
                    f"{field} is {value!r}; expected {getattr(kinds, '__name__', kinds)}"
                )
        if self.adapter is not None and self.profile is not None:
            raise ValueError(
                f"adapter {self.adapter!r} and profile {self.profile!r}: a request has one of them"
            )
        if self.among is not None and (self.profile is None or not self.among):
            raise ValueError(
                f"among is {list(self.among)}; expected adapters of a learned profile, and "
                "that profile"
            )

    def samples(self, n: int) -> list[Request]:
        """The request n times, with the seeds from its own on, so that sampled answers differ."""
        _check_integer("n", n, 1)
        return [dataclasses.replace(self, seed=(self.seed + i) % 2**32) for i in range(n)]


_KINDS = {"sampling": Sampling, "ignore_eos": bool, "adapter": str | None, "profile": str | None}


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Any integer but a bool, numpy's too."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or value < least
        or (most is not None and value > most)
    ):
        upper = "or more" if most is None else f"to {most}"
        raise ValueError(f"{name} is {value!r}; expected an integer, {least} {upper}")


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the probability before temperature and restrictions.

    top  the likeliest tokens with theirs, in falling order, as many as were asked for
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """What one step added to an answer: one token (None for a cancelled one), and its text.

    finish_reason  None while it goes on; "stop" (an end token or a stop text), "length",
                   "cancelled", or "error" with `error` saying what
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    error: str | None = None


@dataclasses.dataclass(eq=False)
class Generation:
    """A request on its way through an engine, growing until `finish_reason` is set.

    versions  the adapters it is served with, fixed when it was admitted: by name (id, digest)
    slots     where they lay, by name: what the ids of `routing` mean
    routing   of every token read, prompt and answer (the last token of an answer is not read), as
              slots: Routing of (L, n, k) numpy arrays; None for an engine without adapters
    """

    id: int
    request: Request
    on_delta: Callable[[Delta], None] | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    versions: dict[str, Version] = dataclasses.field(default_factory=dict)
    slots: dict[str, int] = dataclasses.field(default_factory=dict)
    submitted: float = math.nan  # seconds of time.monotonic(), as the three below
    admitted: float = math.nan
    first_token: float = math.nan
    finished: float = math.nan
    _routing: list[Routing] = dataclasses.field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        state = self.finish_reason or "under way"
        return f"answer {self.id}, {len(self.tokens)} tokens, {state}: {brief(self.text)}"

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def routing(self) -> Routing | None:
        if not self._routing:
            return None
        ids, gates = (
            [getattr(r, name) for r in self._routing] for name in ("adapter_ids", "gates")
        )
        return Routing(np.concatenate(ids, axis=1), np.concatenate(gates, axis=1))
