"""What `generate` and `evaluate` are given, refused in words of this package where it is another
object than they take: JAX would name a leaf of a tree.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from molora_jax.adapters import AdapterBank, AdapterStack, Composition
from molora_jax.adapters.names import brief
from molora_jax.models.decoder import Decoder
from molora_jax.models.lookup import BaseModel


def check_models(decoder: Any, adapters: Any, router: Any) -> None:
    """ValueError for a base, a bank or a composition where a part of it is meant."""
    if not isinstance(decoder, Decoder):
        remedy = "base.decoder" if isinstance(decoder, BaseModel) else "load_base(NAME).decoder"
        raise ValueError(f"decoder is a {_kind(decoder)}: pass {remedy}")
    if isinstance(adapters, Composition) or isinstance(router, Composition):
        name = "adapters" if isinstance(adapters, Composition) else "router"
        raise ValueError(f"{name} is a composition: pass **composition.routed")
    if isinstance(adapters, AdapterBank):
        raise ValueError("adapters is a bank: pass bank.stacks, or **composition.routed")
    if adapters is not None and not _are_stacks(adapters):
        raise ValueError(
            f"adapters is a {_kind(adapters)}: expected bank.stacks of an AdapterBank, or "
            "**composition.routed"
        )
    for given, missing in (("adapters", "router"), ("router", "adapters")):
        values = {"adapters": adapters, "router": router}
        if values[given] is not None and values[missing] is None:
            raise ValueError(
                f"{given} without {missing}: pass both (**composition.routed), or neither for the "
                "base alone"
            )


def check_prompts(prompts: Any) -> None:
    """ValueError for what is no list of lists of ids: a text, or one list alone."""
    if isinstance(prompts, str):
        _refuse_text("prompts", prompts)
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str | bytes):
            _refuse_text(f"prompts[{row}]", prompt)
        if np.ndim(prompt) == 0:
            raise ValueError(
                f"prompts[{row}] is {prompt!r}: prompts is a list of lists of token ids; for one "
                "prompt pass [ids]"
            )


def _refuse_text(name: str, text: str | bytes) -> None:
    raise ValueError(
        f"{name} is the text {brief(text)}; expected token ids. Encode it first: "
        "base.tokenizer.encode(text)"
    )


def _are_stacks(adapters: Any) -> bool:
    """Stacks by projection, or a layer's in a list of them."""
    layers = [adapters] if isinstance(adapters, Mapping) else adapters
    return isinstance(layers, Sequence) and all(
        isinstance(each, Mapping) and all(isinstance(e, AdapterStack) for e in each.values())
        for each in layers
    )


def _kind(value: Any) -> str:
    return type(value).__name__
