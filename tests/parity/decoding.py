"""The same work on both sides: a padded batch, then 32 greedy steps through the key/value cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.models.weights import load_safetensors
from tests.parity.random_models import NEW, PROMPT, padded


def our_decoder(settings: dict, folder) -> Decoder:
    """The decoder of a folder, read as `load_base` reads it but without a tokenizer."""
    config = ModelConfig.from_hf(settings)
    return Decoder(config, load_safetensors(folder, config))


def both_sides(prompts) -> tuple[np.ndarray, np.ndarray]:
    """The prompts padded on the left, and below them the same padded on the right."""
    left, right = (padded(prompts, side) for side in ("left", "right"))
    return tuple(np.concatenate(each) for each in zip(left, right, strict=True))


@functools.partial(jax.jit, static_argnames="new")
def our_logits(decoder, tokens, mask, routed, new=NEW):
    """Logits of the prompts (B, S, V), of `new` greedy steps (new, B, V), and their ids."""
    out, cache = decoder.prefill(tokens, mask, cache_size=tokens.shape[1] + new, **routed)
    prompt = decoder.logits(out.hidden)
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    first = jnp.take_along_axis(prompt, last[:, None, None], axis=1)[:, 0]

    def step(carry, _):
        logits, cache = carry
        ids = logits.argmax(-1).astype(jnp.int32)
        out, cache = decoder.decode(ids, cache, **routed)
        return (decoder.logits(out.hidden[:, 0]), cache), (logits, ids)

    _, (logits, ids) = jax.lax.scan(step, (first, cache), length=new)
    return prompt, logits, ids


def their_logits(model, prompts, side="left", **options):
    """The same of transformers or peft: `model(...)` with positions, and `model.generate`.

    Decoding is only asked of prompts padded on the left, the one side that it can continue.
    """
    import torch

    tokens, mask = (torch.tensor(each.astype(np.int64)) for each in padded(prompts, side))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    with torch.no_grad():
        prompt = model(**inputs, position_ids=positions, **options).logits.numpy()
        if side == "right":
            return prompt, None, None
        done = model.generate(
            **inputs, **options, max_new_tokens=NEW, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    logits = np.stack([step.numpy() for step in done.logits])
    return prompt, logits, done.sequences[:, PROMPT:].numpy().T


def their_model(folder):
    """The folder as transformers reads it, in float32, without an end token that would stop it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # more would only wait for each other on models this small
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
