"""Routers without training: their logits, what they are saved as, keys from weights alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import Adapter
from molora_jax.adapters.names import module_name
from molora_jax.routing import (
    LearnedRouter,
    PrototypeRouter,
    build_router,
    router_arrays,
    router_config,
)
from molora_jax.routing.linear import standardised
from molora_jax.routing.prototypes import arrow_keys
from molora_jax.routing.statistics import normalize
from tests.helpers import assert_close

L, D, C, N = 3, 8, 4, 20


def keys(seed=0):
    return np.random.default_rng(seed).standard_normal((L, D, C)).astype(np.float32)


@pytest.mark.parametrize("similarity", ["signed", "absolute"])
def test_logits_are_products_with_the_keys(similarity):
    router = PrototypeRouter(keys(), top_k=2, similarity=similarity)
    x = np.random.default_rng(1).standard_normal((N, D)).astype(np.float32)
    want = normalize(x) @ keys()[1]
    want = np.abs(want) if similarity == "absolute" else want
    assert_close(router.layer(1).logits(jnp.asarray(x)), want, terms=D)
    again = build_router(router_config(router), router_arrays(router))
    assert router_config(again) == router_config(router)
    assert again.similarity == similarity
    np.testing.assert_array_equal(again.weights[...], keys())


def test_a_shared_one_has_one_layer_of_keys():
    router = PrototypeRouter(keys()[0], top_k=1, after_layer=2)
    assert (router.decision, router.after_layer, router.num_columns) == ("shared", 2, C)
    with pytest.raises(ValueError, match="no layer to take"):
        router.layer(0)


def test_wrong_settings_are_refused(unchecked):
    with pytest.raises(ValueError, match="similarity 'cosine' is unknown"):
        PrototypeRouter(keys(), top_k=1, similarity="cosine")
    with pytest.raises(ValueError, match="num_layers is 3 and after_layer is 1"):
        PrototypeRouter(keys(), top_k=1, after_layer=1)
    with pytest.raises(ValueError, match="do not fit"):
        PrototypeRouter(keys(), np.zeros((L, C + 1), np.float32), top_k=1)


def low_rank(rng, name, direction):
    """An adapter whose updates of q, k and v all read `direction` most, layer by layer."""
    modules = {}
    for layer in range(L):
        for projection in ("q_proj", "k_proj", "v_proj", "down_proj"):
            noise = rng.standard_normal((2, D)).astype(np.float32)
            a = np.stack([direction[layer] if projection != "down_proj" else noise[0], noise[1]])
            b = rng.standard_normal((6, 2)).astype(np.float32) * np.array([5.0, 0.05], np.float32)
            modules[module_name(layer, projection)] = (a.astype(np.float32), b)
    return Adapter.from_arrays(name, modules, alpha=4, num_layers=L)


def test_arrow_finds_the_direction_that_an_adapter_reads():
    rng = np.random.default_rng(0)
    norm = rng.uniform(0.5, 2.0, (L, D))
    directions = rng.standard_normal((2, L, D))
    found = arrow_keys([low_rank(rng, f"a{i}", directions[i]) for i in range(2)], norm)
    for i in range(2):
        want = directions[i] * norm
        want /= np.linalg.norm(want, axis=1, keepdims=True)
        assert (np.abs((found[:, :, i] * want).sum(axis=1)) > 0.99).all()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)


def test_arrow_is_the_right_singular_vector_of_the_whole_update():
    rng = np.random.default_rng(1)
    adapter = low_rank(rng, "a", rng.standard_normal((L, D)))
    found = arrow_keys([adapter], np.ones((L, D)))
    pairs = [adapter.modules[module_name(2, p)] for p in ("q_proj", "k_proj", "v_proj")]
    whole = np.concatenate([pair.scale * pair.b @ pair.a for pair in pairs])
    want = np.linalg.svd(whole.astype(np.float64))[2][0]
    assert abs(want @ found[2, :, 0]) > 1 - 1e-6


def test_an_adapter_without_attention_has_no_key():
    a, b = np.ones((2, D), np.float32), np.ones((6, 2), np.float32)
    arrays = {module_name(layer, "down_proj"): (a, b) for layer in range(L)}
    adapter = Adapter.from_arrays("mlp", arrays, alpha=2, num_layers=L)
    with pytest.raises(ValueError, match="'mlp' does not change q, k or v in layer 0"):
        arrow_keys([adapter], np.ones((L, D)))


def test_standardised_keys_ignore_a_constant_and_a_scale():
    scaled = 3.0 * keys() + 7.0
    np.testing.assert_allclose(standardised(scaled), standardised(keys()), atol=1e-5)
    assert np.std(standardised(keys())) == pytest.approx(D**-0.5, rel=1e-5)


def test_a_grown_router_keeps_its_columns_and_has_the_new_one():
    rng = np.random.default_rng(2)
    router = LearnedRouter(D, C, top_k=2, width=7, num_layers=L, rngs=nnx.Rngs(3))
    for bias in (router.b_in, router.b_out):
        bias[...] = jnp.asarray(rng.standard_normal(bias[...].shape), jnp.float32)
    weights, bias = rng.standard_normal((L, D)), rng.standard_normal(L)
    grown = router.grown(weights.astype(np.float32), bias.astype(np.float32))
    assert (grown.num_columns, grown.width, grown.top_k) == (C + 1, 9, 2)
    x = rng.standard_normal((N, D)).astype(np.float32)
    for layer in range(L):
        got = grown.layer(layer).logits(jnp.asarray(x))
        assert_close(got[:, :C], router.layer(layer).logits(jnp.asarray(x)), terms=D)
        assert_close(got[:, C], normalize(x) @ weights[layer] + bias[layer], terms=D)
    with pytest.raises(ValueError, match=r"weights \(3, 7\)"):
        router.grown(np.zeros((L, D - 1), np.float32), np.zeros(L, np.float32))
