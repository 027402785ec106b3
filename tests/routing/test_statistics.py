"""Statistics that travel with an adapter: added up, they give the router of all the data."""

import itertools
import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import Adapter, load_adapter, save_adapter
from molora_jax.adapters.names import module_name
from molora_jax.routing import RouterStatistics, StatisticsRouter, load_statistics, save_statistics
from molora_jax.routing.closed_form import calibrate, solve_logits, solve_ridge
from molora_jax.routing.statistics import finite_tokens, normalize
from molora_jax.routing.statistics_file import STATISTICS_FILE
from tests.routing.test_closed_form import C, D, L, gathered, labelled, moments

M = 5
OF = {"base_digest": "b" * 64, "adapter_digest": "a" * 64}


def projected(batch, num_features=M):
    statistics = [RouterStatistics(L, D, num_features=num_features) for _ in range(C)]
    inputs, labels, mask = batch
    for column, each in enumerate(statistics):
        each.add(inputs, mask & (labels == column))
    return statistics


def test_moments_are_those_of_projected_normalised_tokens():
    inputs, labels, mask = labelled()
    (one, *_) = projected((inputs, labels, mask))
    x = normalize(inputs[2][mask & (labels == 0)]) @ one.projection
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    np.testing.assert_allclose(one.moments[2], x.T @ x, rtol=1e-5, atol=1e-4)
    assert one.count == (mask & (labels == 0)).sum() > 0
    assert one.projection.shape == (D, M)
    assert abs(one.projection.std() * np.sqrt(M) - 1) < 0.3


def test_the_order_of_adapters_changes_no_bit_and_removing_one_leaves_no_trace():
    statistics = projected(labelled())
    first = StatisticsRouter.solve(statistics)
    for order in itertools.permutations(range(C)):
        other = StatisticsRouter.solve([statistics[column] for column in order])
        for name in ("weights", "bias"):
            want = np.asarray(getattr(first, name)[...])[..., list(order)]
            np.testing.assert_array_equal(getattr(other, name)[...], want)
    two = StatisticsRouter.solve(statistics[:2], num_columns=C)
    again = StatisticsRouter.solve(
        [statistics[0], statistics[2], statistics[1]][::2], num_columns=C
    )
    np.testing.assert_array_equal(two.weights[...], again.weights[...])
    assert not np.asarray(two.weights[...])[..., 2:].any()
    assert not np.array_equal(two.weights[..., :2], np.asarray(first.weights[...])[..., :2])


def test_the_router_is_the_one_of_all_data_pooled():
    batch, more = labelled(1, batch=10), labelled(2, batch=10)
    pooled = gathered(batch, more)
    apart = [a + b for a, b in zip(gathered(batch), gathered(more), strict=True)]
    for got, want in zip(solve_ridge(apart), solve_ridge(pooled), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_solved_without_data_it_finds_the_labels_and_is_as_sharp_as_with_data():
    statistics = gathered(labelled(1, batch=20))
    weights, bias = solve_logits(statistics)
    plain, plain_bias = solve_ridge(statistics)
    inputs, labels, mask = labelled(2, batch=20)
    kept = mask & (labels >= 0)
    (features, _), targets = finite_tokens(inputs, kept), labels[kept]
    logits = features.astype(np.float64) @ weights + bias[:, None]
    assert (logits[-1].argmax(axis=1) == targets).mean() > 0.9
    _, _, temperature = calibrate(plain, plain_bias, features, targets)
    ratio = weights / plain
    np.testing.assert_allclose(ratio, ratio[:, :1, :1] * np.ones_like(ratio), rtol=1e-6)
    assert (np.abs(np.log(ratio[:, 0, 0] / temperature)) < np.log(2.5)).all()
    assert (ratio[:, 0, 0] > 2).all()  # plain ridge scores are far too flat


def test_it_routes_and_never_to_an_empty_column():
    statistics = gathered(labelled(1, batch=20))
    router = StatisticsRouter.solve(statistics, num_columns=C + 2, top_k=2)
    inputs, labels, mask = labelled(2)
    layer = router.layer(L - 1)
    slots = jnp.array([4, 0, 2, -1, -1])
    tokens = jnp.zeros(mask.shape, jnp.int32)
    routing, logits, _ = layer(tokens, jnp.asarray(inputs[-1]), jnp.asarray(mask), None, slots)
    assert logits.shape == (mask.size, C + 2)
    known = (mask & (labels >= 0)).ravel()
    want = np.asarray(slots)[labels.ravel()[known]]
    assert (np.asarray(routing.adapter_ids)[known, 0] == want).mean() > 0.9
    assert set(np.unique(routing.adapter_ids)) <= {-1, 0, 2, 4}
    np.testing.assert_allclose(np.asarray(routing.gates)[known].sum(axis=1), 1, rtol=1e-5)


def test_saved_in_half_precision_the_router_stays(tmp_path):
    statistics = projected(labelled(1, batch=20))
    loaded = []
    for each in statistics:
        path = save_statistics(each, tmp_path, **OF)
        assert path.stat().st_size < 2 * L * M * M // 2 + 8 * L * M + 600
        loaded.append(load_statistics(tmp_path, **OF))
    assert [each.count for each in loaded] == [each.count for each in statistics]
    np.testing.assert_allclose(moments(loaded), moments(statistics), rtol=2e-3, atol=0.1)
    (a, _), (b, _) = solve_ridge(statistics), solve_ridge(loaded)
    np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(a).max())
    # The draws that set the temperature go by content, so they are others.
    a, b = (StatisticsRouter.solve(each).weights[...] for each in (statistics, loaded))
    np.testing.assert_allclose(a, b, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("row", [np.ones(D), np.random.default_rng(3).normal(size=D)])
def test_tokens_that_are_all_alike_are_refused_when_they_are_saved(tmp_path, row):
    inputs = np.random.default_rng(0).normal(size=(L, 2, 9, D))
    inputs[1] = row
    statistics = RouterStatistics(L, D, num_features=M)
    statistics.add(inputs, np.ones((2, 9), bool))
    with pytest.raises(ValueError, match="18 tokens are not saved: in layer 1 features hardly"):
        save_statistics(statistics, tmp_path, **OF)
    assert not list(tmp_path.iterdir())


def test_statistics_of_another_adapter_or_base_and_damaged_ones_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="came without statistics"):
        load_statistics(tmp_path, **OF)
    with pytest.raises(ValueError, match="hold no token"):
        save_statistics(RouterStatistics(L, D), tmp_path, **OF)
    path = save_statistics(projected(labelled())[0], tmp_path, **OF)
    for name in ("base", "adapter"):
        with pytest.raises(ValueError, match=f"belong to another {name}"):
            load_statistics(tmp_path, **(OF | {f"{name}_digest": "c" * 64}))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=STATISTICS_FILE):
        load_statistics(tmp_path, **OF)
    # Another number of features in the header than the arrays have.
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["num_features"] = "4"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    with pytest.raises(ValueError, match="is damaged"):
        load_statistics(tmp_path, **OF)


def test_statistics_that_do_not_belong_together_are_refused():
    inputs, labels, mask = labelled()
    wide, narrow = gathered((inputs, labels, mask))[0], projected((inputs, labels, mask))[1]
    with pytest.raises(ValueError, match="num_features None and 5 do not add up"):
        StatisticsRouter.solve([wide, narrow])
    with pytest.raises(ValueError, match="4 and 3 layers"):
        wide + RouterStatistics(3, D)
    with pytest.raises(ValueError, match="num_features 8 is not"):
        RouterStatistics(L, D, num_features=D)
    with pytest.raises(ValueError, match="num_columns 1 is less than the 3 adapters"):
        StatisticsRouter.solve(gathered((inputs, labels, mask)), num_columns=1)


def test_an_adapter_saved_anew_takes_no_old_statistics_along(tmp_path):
    a, b = np.ones((2, D), np.float32), np.ones((D, 2), np.float32)
    arrays = {module_name(0, "q_proj"): (a, b)}
    adapter = Adapter.from_arrays("one", arrays, alpha=2, num_layers=1)
    folder = save_adapter(adapter, tmp_path / "one")
    save_statistics(projected(labelled())[0], folder, **OF)
    assert load_adapter(folder)[0].digest == adapter.digest  # which reads past them
    save_adapter(adapter, folder, overwrite=True)
    assert not (folder / STATISTICS_FILE).exists()


def test_numbers_that_make_no_regression_are_refused(unchecked):
    statistics = gathered(labelled())
    for ridge in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"ridge is .*: expected a positive number"):
            StatisticsRouter.solve(statistics, ridge=ridge)
    inputs, _, mask = labelled()
    with pytest.raises(ValueError, match=r"counted has shape \(30, 4\), expected \(B, S\)"):
        statistics[0].add(inputs, mask.T)
    weights, bias = solve_ridge(statistics)
    with pytest.raises(ValueError, match="no labelled token to set the temperature"):
        calibrate(weights, bias, np.zeros((L, 0, D), np.float32), np.zeros(0, np.int32))


def test_a_token_whose_square_overflows_is_left_out_as_the_routers_leave_it_out():
    inputs, _, mask = labelled()
    huge = inputs.copy()
    at = tuple(np.argwhere(mask)[0])
    huge[1, *at] = 1e25
    smaller = mask.copy()
    smaller[at] = False
    one, other = RouterStatistics(L, D), RouterStatistics(L, D)
    one.add(huge, mask)
    other.add(inputs, smaller)
    np.testing.assert_array_equal(one.moments, other.moments)
