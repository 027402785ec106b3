"""What `generate` and `evaluate` are given, refused in words of this package where it is another
object than they take: JAX would name a leaf of a tree.
"""

from typing import Any

import numpy as np

from molora_jax.adapters.names import brief
from molora_jax.models.decoder import Decoder
from molora_jax.models.lookup import BaseModel


def check_decoder(decoder: Any) -> None:
    """ValueError for a base, or whatever else, in a decoder's place."""
    if not isinstance(decoder, Decoder):
        remedy = "base.decoder" if isinstance(decoder, BaseModel) else "load_base(NAME).decoder"
        raise ValueError(f"decoder is a {type(decoder).__name__}: pass {remedy}")


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
