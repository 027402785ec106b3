"""The modulated scale: its recurrence, its start, padding, rows, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.models import load_base
from molora_jax.models.decoder import KVCache
from molora_jax.routing import ModulatedRouter, SequenceRouter, router_arrays
from molora_jax.routing.modulated import recurrence
from tests.composed import composition

RNG = np.random.default_rng(0)


def made(d_model=6, num_layers=1, *, trained=True, recurrent=True):
    router = ModulatedRouter(d_model, num_layers=num_layers, recurrent=recurrent, rngs=nnx.Rngs(1))
    if trained:
        shape = router.w_out[...].shape
        router.w_out[...] = jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)
    return router


def layer(router):
    """The router as a decoder hands one layer its slice."""
    graph, state = nnx.split(router)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))


def scales(router, hidden, mask):
    graph, state = nnx.split(layer(router))
    run = jax.jit(lambda state, hidden, mask: nnx.merge(graph, state).scales(hidden, mask))
    return np.asarray(run(state, hidden, mask))


def test_the_scan_is_the_plain_loop():
    keep, added = RNG.uniform(size=(2, 3, 37, 4)).astype(np.float32)
    h, states = np.zeros((3, 4)), []
    for t in range(37):
        h = keep[:, t].astype(np.float64) * h + added[:, t]
        states.append(h)
    found = jax.jit(recurrence)(jnp.asarray(keep), jnp.asarray(added))
    np.testing.assert_allclose(found, np.stack(states, axis=1), rtol=1e-5)


@pytest.fixture(scope="module")
def tiny():
    base = load_base("tiny-random")
    bank = composition(base, SequenceRouter(np.zeros(1, np.int32))).bank
    routed = {
        "adapters": bank.stacks,
        "column_to_slot": bank.column_to_slot([bank.list()[0].digest]),
    }
    return base, RNG.integers(0, base.config.vocab_size, size=(1, 4)), routed


def test_an_untrained_modulator_is_plain_lora_exactly_and_a_trained_one_is_not(tiny):
    base, tokens, routed = tiny
    read = jax.jit(lambda router: base.decoder(tokens, router=router, **routed).hidden)
    plain = read(SequenceRouter(np.zeros(1, np.int32)))
    size = (base.config.hidden_size, base.config.num_layers)
    router = made(*size, trained=False)
    assert (read(router) == plain).all()
    router.w_out[...] = made(*size).w_out[...]
    assert (read(router) != plain).any()


def test_the_decoder_refuses_to_step_with_it_and_texts_that_would_share_a_state(tiny):
    base, tokens, routed = tiny
    router = made(base.config.hidden_size, base.config.num_layers)
    config = base.config
    keys = (jnp.zeros((1, config.num_kv_heads, 8, config.head_dim)),) * config.num_layers
    cache = KVCache(keys, keys, filled=jnp.zeros((1, 8), bool), next_slot=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="got one token a row"):
        base.decoder.decode(tokens[:, 0], cache, router=router, **routed)
    with pytest.raises(ValueError, match="segments are given with a recurrent ModulatedRouter"):
        base.decoder(tokens, segments=np.array([[0, 0, 1, 1]]), router=router, **routed)


def test_padding_keeps_the_state_wherever_it_stands():
    router, hidden = made(), RNG.normal(size=(1, 5, 6)).astype(np.float32)
    whole = scales(router, hidden, np.ones((1, 5), bool))[0]
    places = [1, 2, 4, 5, 8]
    padded, mask = np.full((1, 9, 6), np.nan, np.float32), np.zeros((1, 9), bool)
    padded[:, places], mask[:, places] = hidden, True
    np.testing.assert_allclose(scales(router, padded, mask)[0, places], whole, rtol=1e-6)


def test_a_row_sees_itself_alone_and_remembers_only_where_it_is_recurrent():
    hidden, mask = RNG.normal(size=(2, 5, 6)).astype(np.float32), np.ones((2, 5), bool)
    changed = hidden.copy()
    changed[0, 0] = RNG.normal(size=6)
    for recurrent in (True, False):
        router = made(recurrent=recurrent)
        one, other = scales(router, hidden, mask), scales(router, changed, mask)
        assert (one[1] == other[1]).all()
        assert (
            (one[0, 1:] != other[0, 1:]).all() if recurrent else (one[0, 1:] == other[0, 1:]).all()
        )


def test_gradients_reach_every_parameter_and_are_finite():
    router, hidden = layer(made()), jnp.asarray(RNG.normal(size=(2, 7, 6)), jnp.float32)
    hidden = hidden.at[1, 5:].set(jnp.nan)
    mask = jnp.ones((2, 7), bool).at[1, 5:].set(False)
    graph, params = nnx.split(router)

    def loss(params):
        return jnp.where(mask, nnx.merge(graph, params).scales(hidden, mask), 0.0).sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


def test_settings_and_arrays_make_the_same_router():
    router = made()
    again = ModulatedRouter.from_config(router.to_config(), router_arrays(router))
    hidden, mask = RNG.normal(size=(1, 4, 6)).astype(np.float32), np.ones((1, 4), bool)
    assert (scales(router, hidden, mask) == scales(again, hidden, mask)).all()
    arrays = router_arrays(router) | {"w_out": np.zeros((2, 8), np.float32)}
    with pytest.raises(ValueError, match="w_out has shape"):
        ModulatedRouter.from_config(router.to_config(), arrays)
