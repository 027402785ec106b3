"""The engine's step compiled for a GPU without one: everything it may do is in one CUDA graph."""

import functools

import jax
import jax.numpy as jnp
import pytest

from molora_jax.generation import programs
from pallas_kernels import deviceless
from tests.models.test_capture import SMALL, K, R, decoder_shapes, routed_shapes, router_shapes

ROWS, CONTEXT = 7, 48  # of which no weight's size is a multiple


@pytest.mark.deviceless
@pytest.mark.parametrize("learned", [False, True])
def test_a_step_of_the_engine_is_one_graph(learned):
    """Sampling, sorting and log-probabilities are branches inside it."""
    config = SMALL["llama"]
    decoder = decoder_shapes(config)
    state = jax.eval_shape(
        functools.partial(programs.empty_state, rows=ROWS, context=CONTEXT, num_columns=K), decoder
    )
    report = deviceless.compile_for(
        programs.decode,
        decoder,
        routed_shapes(config, "auto")["adapters"],
        router_shapes(config) if learned else None,
        jax.ShapeDtypeStruct((2, config.vocab_size), jnp.int16),
        state,
        jax.ShapeDtypeStruct((ROWS,), jnp.bool_),
        donate=(4,),
    )
    assert report.graphs == 1 and report.outside == []
    cache = ROWS * config.num_kv_heads * CONTEXT * config.head_dim
    for d_in, d_out in config.projection_sizes().values():
        for size in (d_in * d_out, K * R * d_in, K * R * d_out):
            assert report.writes(size) == []
    assert not [each for each in report.copies if each in report.writes(cache)]
