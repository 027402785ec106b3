"""Rope scalings of a config.json: what is read, what is refused, and how far one table reaches.

That the frequencies are right is tested against transformers, in tests/parity.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.generation import generate
from molora_jax.models.config import ModelConfig, RopeScaling, rope_frequencies
from molora_jax.models.decoder import Decoder
from molora_jax.models.weights import random_arrays

LLAMA = {
    "model_type": "llama",
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2, 3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 20,
}


def read(entry, **settings) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | {"rope_scaling": entry} | settings)


def test_dynamic_is_the_plain_table_up_to_the_context():
    config = read({"rope_type": "dynamic", "factor": 4.0})
    assert config.max_positions == 40
    np.testing.assert_array_equal(rope_frequencies(config)[0], rope_frequencies(read(None))[0])


def test_longrope_is_the_short_numbers_up_to_the_original_context():
    config = read(LONGROPE)
    assert config.max_positions == 20
    plain, _ = rope_frequencies(read(None))
    frequencies, factor = rope_frequencies(config)
    np.testing.assert_allclose(frequencies * LONGROPE["short_factor"], plain, rtol=1e-6)
    assert factor == pytest.approx((1 + np.log(40 / 20) / np.log(20)) ** 0.5)


@pytest.mark.parametrize("entry", [LONGROPE, {"rope_type": "dynamic", "factor": 4.0}, None])
def test_texts_past_the_context_are_refused(entry):
    config = read(entry)
    limit = config.max_positions
    decoder = Decoder(config, random_arrays(config))
    tokens = jnp.ones((1, limit + 1), jnp.int32)
    for call in (decoder, jax.jit(lambda tokens: decoder(tokens).hidden)):
        with pytest.raises(ValueError, match=f"has {limit + 1} positions.*the model has {limit}"):
            call(tokens)
    mask = jnp.ones((1, 3), bool)
    with pytest.raises(ValueError, match=f"cache_size is {limit + 1} positions"):
        decoder.prefill(tokens[:, :3], mask, cache_size=limit + 1)
    with pytest.raises(ValueError, match=f"exceed the model's {limit} positions"):
        generate(decoder, [[1] * (limit - 4)], max_new_tokens=5)
    # Rounding up to sizes that are compiled often does not go past it either.
    (answer,) = generate(decoder, [[1] * (limit - 4)], max_new_tokens=4)
    assert len(answer.tokens) == 4


def test_a_note_says_how_long_texts_may_be(caplog):
    with caplog.at_level("INFO", logger="absl"):
        read(LONGROPE)
        read({"rope_type": "dynamic", "factor": 4.0})
        read({"rope_type": "linear", "factor": 4.0})
    lines = [record.getMessage() for record in caplog.records]
    assert [("up to 20" in line, "up to 40" in line) for line in lines] == [(1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "'ntk' is not supported"),
        ({"rope_type": "linear"}, "'linear' lacks factor"),
        ({"type": "dynamic"}, "'dynamic' lacks factor"),
        (
            {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8},
            "'llama3' lacks low_freq_factor, high_freq_factor",
        ),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4}, "lacks short_factor"),
        (LONGROPE | {"short_factor": [1.0] * 3}, "3 numbers for head_dim 8, expected 4"),
        (LONGROPE | {"short_factor": [1.0, 2.0, 3.0, 0.0]}, "one positive number"),
        (LONGROPE | {"short_factor": 2.0}, "expected a list"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": "2"}, "factor of the rope scaling is '2'"),
        ({"rope_type": "linear", "factor": True}, "factor of the rope scaling is True"),
        ({"rope_type": "linear", "factor": -2.0}, "must be positive"),
        ({"rope_type": ["yarn"], "factor": 2.0}, "rope_type is"),
        ({"rope_type": None, "factor": 2.0}, "expected a name"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast and beta_slow"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta other than 1"),
        ({"full_attention": {"rope_type": "yarn", "factor": 2.0}}, "full_attention"),
        ("yarn", "expected an object"),
    ],
)
def test_entries_that_cannot_be_computed_are_refused(entry, words):
    with pytest.raises(ValueError, match=words):
        read(entry)


def test_old_and_new_key_may_not_contradict_each_other():
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config = read({"type": "linear", "factor": 2.0}, rope_parameters=new)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0, original_max_positions=40)
    assert config.rope_theta == 100.0
    for old in ({"type": "linear", "factor": 4.0}, {"type": "dynamic", "factor": 2.0}):
        with pytest.raises(ValueError, match="contradict each other"):
            read(old, rope_parameters=new)
