"""Routing metrics on cases small enough to count by hand."""

import numpy as np
import pytest

from molora_jax.routing import metrics


def routing_of(ids, gates=None):
    ids = np.asarray(ids)
    gates = np.where(ids >= 0, 1.0, 0.0) if gates is None else np.asarray(gates, np.float64)
    return ids, gates


def test_main_adapter_sums_top_1_gates_over_the_later_half():
    # One token, four layers, k = 2; only layers 2 and 3 count, and only the larger gate of each.
    ids = np.array([[[0, 1]], [[0, 1]], [[1, 0]], [[2, 0]]])
    gates = np.array([[[1.0, 0]], [[1.0, 0]], [[0.6, 0.4]], [[0.9, 0.1]]])
    np.testing.assert_array_equal(metrics.main_adapter(ids, gates), [2])
    # Summing all gates would give 0 here (0.45 + 0.45): the second choice does not count.
    gates = np.array([[[1.0, 0]], [[1.0, 0]], [[0.55, 0.45]], [[0.54, 0.46]]])
    np.testing.assert_array_equal(metrics.main_adapter(ids, gates), [1])
    # Unsorted columns, a tie (lowest slot), no adapter at all, and one layer only.
    ids = np.array([[[0, 3]], [[3, 1]]])
    np.testing.assert_array_equal(
        metrics.main_adapter(ids, np.array([[[1, 0]], [[0.2, 0.8]]])), [1]
    )
    tied = routing_of([[[2]], [[2]], [[1]], [[0]]])
    np.testing.assert_array_equal(metrics.main_adapter(*tied), [0])
    np.testing.assert_array_equal(metrics.main_adapter(*routing_of([[[0]], [[-1]]])), [-1])
    np.testing.assert_array_equal(metrics.main_adapter(*routing_of([[2], [-1], [0]])), [2, -1, 0])
    # Of three layers the later half is the last two.
    np.testing.assert_array_equal(
        metrics.main_adapter(
            np.array([[[5]], [[1]], [[2]]]), np.array([[[9.0]], [[1.0]], [[0.5]]])
        ),
        [1],
    )


def test_mean_gates_are_dense_over_slots():
    ids = np.array([[[0, 1]], [[2, -1]], [[1, 0]], [[1, 1]]])
    gates = np.array([[[1.0, 0]], [[1.0, 0]], [[0.6, 0.4]], [[0.5, 0.5]]])
    np.testing.assert_allclose(metrics.mean_gates(ids, gates, num_slots=3), [[0.2, 0.8, 0]])


def test_shares_by_layer_leave_out_unknown_domains():
    ids, gates = routing_of(np.array([[0, 0, 1, 1, -1, 2], [1, 0, 1, 1, 0, 2]])[:, :, None])
    domains = np.array([0, 0, 0, 1, 1, -1])
    shares = metrics.layer_shares(ids, gates, domains, num_domains=3, num_slots=3)
    assert shares.shape == (2, 3, 3)
    np.testing.assert_allclose(shares[0, :2], [[2 / 3, 1 / 3, 0], [0, 0.5, 0]])
    np.testing.assert_allclose(shares[1, :2], [[1 / 3, 2 / 3, 0], [0.5, 0.5, 0]])
    assert np.isnan(shares[:, 2]).all()  # a domain without tokens
    one = metrics.token_shares(ids[0].reshape(2, 3), domains.reshape(2, 3), 2, 3)
    np.testing.assert_array_equal(one, shares[0, :2])


def test_usage_and_collapse_warning():
    ids, gates = routing_of(np.array([[0] * 8 + [1] * 2, [0] * 10])[:, :, None])
    mask = np.arange(10) < 9
    usage = metrics.usage(ids, gates, mask, num_slots=2)
    np.testing.assert_allclose(usage, [[8 / 9, 1 / 9], [1, 0]])
    message = metrics.collapse_warning(usage, adapter_names=["code", "math"])
    assert "1 of 2 layers" in message
    assert "'code' with 100.0% in layer 1" in message
    assert metrics.collapse_warning(usage[:1]) is None
    assert "2 of 2 layers" in metrics.collapse_warning(usage, threshold=0.8)
    assert metrics.collapse_warning(np.ones((3, 1))) is None  # one adapter cannot collapse
    nothing = metrics.usage(ids, gates, mask & False, num_slots=2)
    assert metrics.collapse_warning(nothing) is None


def test_entropies():
    p = np.array([[[0.5, 0.5], [0.5, 0.5]], [[1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9]]])
    out = metrics.entropies(np.log(p), np.ones(2, bool))
    np.testing.assert_allclose(out["token"], [np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(out["usage"], [np.log(2), np.log(2)], atol=1e-6)
    # Padding and a non-finite token are left out, also of one layer alone.
    logits = np.array([[0.0, 0.0], [np.nan, 1], [9.0, 0.0]])
    out = metrics.entropies(logits, np.array([True, True, False]))
    np.testing.assert_allclose(out["token"], [np.log(2)])
    assert np.isnan(metrics.entropies(logits, np.zeros(3, bool))["usage"]).all()


def test_agreement():
    domains = np.array([0, 0, 1, 1, 2, 2, -1])
    renamed = np.array([4, 4, 0, 0, 1, 1, 3])
    assert metrics.agreement(renamed, domains) == pytest.approx({"ari": 1.0, "nmi": 1.0})
    one = metrics.agreement(np.zeros(7, int), domains)
    assert one == pytest.approx({"ari": 0.0, "nmi": 0.0})
    rows = metrics.agreement(renamed[:6].reshape(2, 3), domains[:6].reshape(2, 3))
    assert rows["ari"] == pytest.approx(1.0)
    half = metrics.agreement(np.array([4, 0, 0, 0, 1, 1, 9]), domains)
    assert 0 < half["ari"] < 1
    assert 0 < half["nmi"] < 1
    assert np.isnan(metrics.agreement(renamed, np.full(7, -1))["ari"])


def test_follow_lag_waits_for_four_in_a_row():
    domains = np.array([[0] * 6 + [1] * 10])
    adapters = domains.copy()
    assert metrics.follow_lag(adapters, domains)["lags"] == [0]
    adapters[0, 6:9] = 0  # three tokens late
    out = metrics.follow_lag(adapters, domains, within=(2, 3))
    assert out["lags"] == [3]
    assert out["within"] == {2: 0.0, 3: 1.0}
    adapters[0, 10] = 0  # a lapse within the run of four: tokens 11 to 14 are the first such run
    assert metrics.follow_lag(adapters, domains)["lags"] == [5]
    adapters[0, 14] = 0
    out = metrics.follow_lag(adapters, domains)
    assert (out["median"], out["within"][32]) == (np.inf, 0.0)


def test_follow_lag_judges_only_what_it_can():
    # The run must lie within the new domain: three tokens of it are too few, four enough.
    domains = np.array([[0, 0, 1, 1, 1, 0, 0, 0, 0], [-1, -1, 1, 1, 1, 1, 0, 0, -1]])
    out = metrics.follow_lag(domains, domains)
    assert (out["changes"], out["unjudged"], out["lags"]) == (1, 2, [0])
    # Padding is no change of domain, and a run does not reach past the next change.
    domains = np.array([[0, 0, 1, 1, 1, 1, 2, 2]])
    adapters = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert metrics.follow_lag(adapters, domains)["lags"] == [np.inf]
    none = metrics.follow_lag(np.zeros((1, 5), int), np.zeros((1, 5), int))
    assert none["changes"] == 0
    assert np.isnan(none["median"])
    # The median of a finite and an infinite lag is infinite; domains may own any adapter.
    domains = np.array([[0] * 4 + [1] * 4, [0] * 4 + [1] * 4])
    adapters = np.array([[7] * 4 + [5] * 4, [7] * 8])
    out = metrics.follow_lag(adapters, domains, domain_adapters=[7, 5])
    assert sorted(out["lags"]) == [0, np.inf]
    assert out["within"][8] == 0.5


def test_shapes_that_do_not_fit_are_refused(unchecked):
    ids = np.zeros((2, 8), int)
    with pytest.raises(ValueError, match=r"\(1, 8\) and domains \(2, 8\)"):
        metrics.follow_lag(ids[:1], ids)
    with pytest.raises(ValueError, match=r"adapter_ids has shape \(2, 8\) and gates \(2, 7\)"):
        metrics.main_adapter(ids, np.ones((2, 7)))
