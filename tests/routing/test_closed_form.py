"""Routers without a pass through the model: ridge statistics, calibration, embedding, Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.routing import LearnedRouter, select
from molora_jax.routing.closed_form import calibrate, select_tokens, solve_logits, solve_ridge
from molora_jax.routing.fit import calibrate_column, fit_on_features
from molora_jax.routing.statistics import RouterStatistics, normalize
from tests.helpers import assert_close

L, B, S, D, C = 4, 4, 30, 8, 3
WIDTH = 7
# One size of data and one program for all fits.
FIT = {"steps": 100, "batch_size": 64, "learning_rate": 2e-2}


def labelled(seed=0, *, distance=1.0, batch=B):
    """Layer inputs whose mean depends on the label, more so in later layers."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(-1, C, (batch, S))
    means = np.random.default_rng(99).standard_normal((C + 1, D))
    inputs = rng.standard_normal((L, batch, S, D))
    inputs += distance * np.arange(1, L + 1)[:, None, None, None] * means[labels][None]
    mask = rng.random((batch, S)) > 0.2
    return inputs.astype(np.float32), labels, mask


def gathered(*batches):
    """The statistics of each column."""
    statistics = [RouterStatistics(L, D) for _ in range(C)]
    for inputs, labels, mask in batches:
        for column in range(C):
            statistics[column].add(inputs, mask & (labels == column))
    return statistics


def moments(statistics):
    return np.stack([each.moments for each in statistics])


def direct_ridge(inputs, labels, mask, ridge, balance):
    """Weighted least squares on the rows themselves, layer by layer."""
    keep = mask.ravel() & (labels.ravel() >= 0)
    y = np.eye(C)[labels.ravel()[keep]]
    counts = y.sum(axis=0)
    w = (y / (C * counts)).sum(axis=1) if balance else np.full(len(y), 1 / len(y))
    solutions = []
    for layer in inputs:
        x = normalize(layer.reshape(-1, D)[keep]).astype(np.float64)
        mean_square = (w[:, None] * x**2).sum(axis=0).mean()
        rows = np.concatenate([x, np.ones((len(x), 1))], axis=1) * np.sqrt(w)[:, None]
        extra = np.sqrt(ridge * mean_square) * np.eye(D, D + 1)
        target = np.concatenate([y * np.sqrt(w)[:, None], np.zeros((D, C))])
        solutions.append(np.linalg.lstsq(np.concatenate([rows, extra]), target, rcond=None)[0])
    return np.stack(solutions)


@pytest.mark.parametrize("balance", [True, False])
def test_solution_equals_least_squares_on_the_rows(balance):
    inputs, labels, mask = labelled()
    weights, bias = solve_ridge(gathered((inputs, labels, mask)), ridge=0.3, balance=balance)
    want = direct_ridge(inputs, labels, mask, 0.3, balance)
    np.testing.assert_allclose(weights, want[:, :-1], atol=1e-5)
    np.testing.assert_allclose(bias, want[:, -1], atol=1e-5)
    assert np.abs(weights).max() > 0.1


def test_statistics_add_over_batches():
    first, second = labelled(1), labelled(2)
    both = gathered(first, second)
    summed = [a + b for a, b in zip(gathered(first), gathered(second), strict=True)]
    np.testing.assert_allclose(moments(summed), moments(both), rtol=1e-6)
    want = sum(np.bincount(y[m & (y >= 0)], minlength=C) for _, y, m in (first, second))
    assert [each.count for each in both] == list(want)


def test_padding_unknown_labels_and_nonfinite_tokens_are_left_out():
    inputs, labels, mask = labelled()
    want = moments(gathered((inputs, labels, mask)))
    spoiled = inputs.copy()
    spoiled[:, ~mask] = np.nan
    spoiled[:, labels < 0] = 1e30
    np.testing.assert_array_equal(moments(gathered((spoiled, labels, mask))), want)
    at = tuple(np.argwhere(mask & (labels >= 0))[0])
    spoiled[(1, *at, 0)] = np.nan  # in one layer: out of all, so that layers see the same tokens
    smaller = mask.copy()
    smaller[at] = False
    want = moments(gathered((inputs, labels, smaller)))
    np.testing.assert_array_equal(moments(gathered((spoiled, labels, mask))), want)


def test_a_column_without_data_and_wrong_shapes_are_refused(unchecked):
    inputs, labels, mask = labelled()
    with pytest.raises(ValueError, match="column 1 has no token"):
        solve_ridge(gathered((inputs, np.where(labels == 1, 0, labels), mask)))
    with pytest.raises(ValueError, match="no statistics"):
        solve_ridge([])
    with pytest.raises(ValueError, match="4 layers and width 8"):
        gathered((inputs[:2], labels, mask))


def test_temperature_has_the_least_cross_entropy_and_keeps_every_order():
    features, labels = select_tokens(*labelled(distance=0.4, batch=20))
    weights, bias = solve_ridge(gathered(labelled(1, distance=0.4)))
    hot_weights, hot_bias, temperature = calibrate(weights, bias, features, labels)
    scores = features.astype(np.float64) @ weights + bias[:, None]

    def cross_entropy(t):
        z = t * scores
        at_label = np.take_along_axis(z, labels[None, :, None], axis=2)[..., 0]
        return (np.log(np.exp(z).sum(axis=2)) - at_label).mean(axis=1)

    best = cross_entropy(temperature[:, None, None])
    for factor in (0.7, 0.95, 1.05, 1.4):
        assert (best <= cross_entropy(factor * temperature[:, None, None]) + 1e-9).all()
    assert (best < cross_entropy(1.0) - 0.03).all()  # plain ridge scores are far too flat
    assert ((temperature > 2) & (temperature < 50)).all()
    np.testing.assert_allclose(hot_weights, weights * temperature[:, None, None])
    np.testing.assert_allclose(hot_bias, bias * temperature[:, None])


def test_perfectly_separated_labels_give_the_largest_temperature():
    features = np.eye(3, dtype=np.float32)[None]
    weights = np.eye(3)[None] / np.sqrt(3)
    _, _, temperature = calibrate(weights, np.zeros((1, 3)), features, np.arange(3))
    assert temperature == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize("width", [2 * C, WIDTH])
def test_linear_map_is_embedded_exactly(width):
    rng = np.random.default_rng(0)
    weights, bias = rng.standard_normal((L, D, C)) * 5, rng.standard_normal((L, C))
    router = LearnedRouter.from_linear(weights, bias, top_k=2, width=width, rngs=nnx.Rngs(0))
    assert (router.decision, router.top_k, router.width) == ("per_layer", 2, width)
    x = rng.standard_normal((L, 40, D)).astype(np.float32)
    logits = jax.jit(jax.vmap(lambda one, x: one.logits(x)))(router, x)
    want = normalize(x).astype(np.float64) @ weights + bias[:, None]
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=3e-5)


def test_shared_router_from_a_linear_map():
    rng = np.random.default_rng(0)
    weights, bias = rng.standard_normal((D, C)) * 5, rng.standard_normal(C)
    router = LearnedRouter.from_linear(
        weights, bias, top_k=1, width=WIDTH, after_layer=3, rngs=nnx.Rngs(0)
    )
    assert (router.decision, router.after_layer) == ("shared", 3)
    x = rng.standard_normal((40, D)).astype(np.float32)
    want = normalize(x).astype(np.float64) @ weights + bias
    np.testing.assert_allclose(router.logits(jnp.asarray(x)), want, rtol=1e-5, atol=3e-5)


def test_embedding_can_be_trained_further():
    weights, bias = solve_ridge(gathered(labelled()))
    router = LearnedRouter.from_linear(weights, bias, top_k=2, width=WIDTH, rngs=nnx.Rngs(0))
    features, labels = (jnp.asarray(a) for a in select_tokens(*labelled(batch=20)))
    assert (np.asarray(router.w_out[...])[:, 2 * C :] == 0).all()
    trained, losses = fit_on_features(router, features, labels, **FIT)
    assert (losses[-10:].mean(axis=0) < losses[:10].mean(axis=0)).all()
    assert (
        np.abs(trained.w_out[...])[:, 2 * C :].max(axis=(1, 2)) > 0
    ).all()  # spare units woke up


def test_embedding_refuses_what_does_not_fit(unchecked):
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"width 5 is too small to embed 3 columns.*at least 6"):
        LearnedRouter.from_linear(
            np.zeros((L, D, C)), np.zeros((L, C)), top_k=1, width=5, rngs=rngs
        )
    with pytest.raises(ValueError, match=r"weights \(4, 8, 3\) and bias \(3,\) do not fit"):
        LearnedRouter.from_linear(np.zeros((L, D, C)), np.zeros(C), top_k=1, rngs=rngs)


def test_closed_form_router_finds_the_labels():
    weights, bias = solve_ridge(gathered(labelled(1, batch=20)))
    features, labels = select_tokens(*labelled(2, batch=20))
    weights, bias, _ = calibrate(weights, bias, features, labels)
    router = LearnedRouter.from_linear(weights, bias, top_k=1, width=WIDTH, rngs=nnx.Rngs(0))
    logits = router.layer(L - 1).logits(jnp.asarray(features[-1]))
    found = select(logits, jnp.ones(len(labels), bool), top_k=1).adapter_ids[:, 0]
    assert (np.asarray(found) == labels).mean() > 0.9


def test_fit_on_features_learns_every_layer_and_repeats_itself():
    features, labels = (jnp.asarray(a) for a in select_tokens(*labelled(batch=20)))
    router = LearnedRouter(D, C, top_k=1, width=WIDTH, num_layers=L, rngs=nnx.Rngs(0))
    before = np.asarray(router.w_in[...])
    trained, losses = fit_on_features(router, features, labels, **FIT)
    assert losses.shape == (100, L)
    assert (losses[:10].mean(axis=0) > 1.5 * losses[-10:].mean(axis=0)).all()
    test, want = select_tokens(*labelled(5))
    found = trained.layer(L - 1).logits(jnp.asarray(test[-1])).argmax(axis=1)
    assert (np.asarray(found) == want).mean() > 0.9
    np.testing.assert_array_equal(router.w_in[...], before)  # the one given is left as it was
    again, _ = fit_on_features(router, features, labels, **FIT)
    np.testing.assert_array_equal(again.w_in[...], trained.w_in[...])
    # A layer learns the same whatever the other layers are: they share no loss.
    changed = features.at[0].set(0.0)
    other, _ = fit_on_features(router, changed, labels, **FIT)
    assert_close(other.w_in[...][1:], trained.w_in[...][1:], terms=10_000)


def test_fit_on_features_of_a_shared_router_and_its_refusals(unchecked):
    features, labels = (jnp.asarray(a) for a in select_tokens(*labelled()))
    router = LearnedRouter(D, C, top_k=1, width=WIDTH, after_layer=1, rngs=nnx.Rngs(0))
    trained, losses = fit_on_features(router, features[2], labels, steps=20, learning_rate=2e-2)
    assert losses.shape == (20,)
    assert losses[-1] < losses[0]
    assert trained.decision == "shared"
    with pytest.raises(ValueError, match="features has shape"):
        fit_on_features(router, features, labels)
    with pytest.raises(ValueError, match=r"labels go from -1 to 2.*columns 0 to 2"):
        fit_on_features(router, features[0], labels.at[0].set(-1))


@pytest.mark.parametrize("shared", [False, True])
def test_a_grown_column_is_set_by_a_few_tokens_and_the_others_stay(shared):
    """Columns 0 and 1 are known; the third comes far too flat and far too low."""
    statistics = gathered(labelled(1, batch=20))
    weights, bias = (each.astype(np.float32) for each in solve_logits(statistics))
    features, labels = select_tokens(*labelled(2, batch=4))
    where = {}
    if shared:
        weights, bias, features, where = weights[-1], bias[-1], features[-1], {"after_layer": 1}
    known = LearnedRouter.from_linear(
        weights[..., :2], bias[..., :2], top_k=1, width=4, rngs=nnx.Rngs(0), **where
    )
    grown = known.grown(0.05 * weights[..., 2], 0.05 * bias[..., 2] - 2.0)
    router = calibrate_column(grown, jnp.asarray(features), jnp.asarray(labels))
    rows = jnp.asarray(features if shared else features[-1])
    last = [each if shared else each.layer(L - 1) for each in (grown, router)]
    old, new = (np.asarray(each.logits(rows)) for each in last)
    np.testing.assert_array_equal(old[:, :2], new[:, :2])
    third = labels == 2
    assert (old.argmax(axis=1) == labels)[third].mean() < 0.3
    assert (new.argmax(axis=1) == labels)[third].mean() > 0.9
    assert (new.argmax(axis=1) == labels)[~third].mean() > 0.9
