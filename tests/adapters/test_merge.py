"""Merging and truncation against dense matrices in float64."""

import numpy as np
import pytest

from molora_jax.adapters import Adapter, load_adapter, save_adapter
from molora_jax.adapters.lowrank import total_error, update_norm
from molora_jax.adapters.merge import (
    common_base_name,
    layers_of_base,
    merge_adapters,
    merge_into,
    truncate_adapter,
)
from molora_jax.models.weights import random_arrays
from tests.adapters.make import BASE, arrays_for, dense_delta, make_adapter, modules_of

A = make_adapter("a", seed=1)
B = make_adapter("b", projections=("q_proj", "down_proj"), rank=2, seed=2, use_rslora=True)
WEIGHTS = {"a": 0.7, "b": -0.3}


def deltas(adapter: Adapter) -> dict[str, np.ndarray]:
    return {m: dense_delta(p.a, p.b, p.scale) for m, p in adapter.modules.items()}


def weighted() -> dict[str, np.ndarray]:
    """Σ w·ΔW of A and B, by module."""
    one, other = deltas(A), deltas(B)
    return {m: 0.7 * one[m] - 0.3 * other.get(m, 0.0) for m in one}


def test_merged_is_the_weighted_sum_whatever_ranks_and_scales_were(tmp_path):
    merged, errors = merge_adapters([A, B], weights=WEIGHTS, name="both", base_name="org/x")
    assert set(errors.values()) == {0.0}
    for module, expected in weighted().items():
        pair = merged.modules[module]
        assert pair.rank == (5 if module in B.modules else 3)
        assert pair.scale == 1.0
        np.testing.assert_allclose(deltas(merged)[module], expected, atol=1e-5)
        assert np.abs(expected).max() > 1
    read, _ = load_adapter(save_adapter(merged, tmp_path / "both"), config=BASE)
    assert read.digest == merged.digest
    assert read.config["base_model_name_or_path"] == "org/x"


def test_without_weights_each_counts_once():
    merged, _ = merge_adapters([A, B], name="both")
    expected = deltas(A)["layers.1.mlp.down_proj"] + deltas(B)["layers.1.mlp.down_proj"]
    np.testing.assert_allclose(deltas(merged)["layers.1.mlp.down_proj"], expected, atol=1e-5)


def test_truncation_is_the_best_of_its_rank_and_states_what_is_lost():
    merged, errors = merge_adapters([A, B], weights=WEIGHTS, name="both", rank=4)
    lost = whole = 0.0
    for module, expected in weighted().items():
        s = np.linalg.svd(expected, compute_uv=False)
        best = np.sqrt((s[4:] ** 2).sum() / (s**2).sum()) if module in B.modules else 0.0
        error = np.linalg.norm(deltas(merged)[module] - expected)
        assert merged.modules[module].rank == (4 if module in B.modules else 3)
        assert errors[module] == pytest.approx(best, abs=1e-12)
        assert error / np.linalg.norm(expected) == pytest.approx(best, abs=1e-6)
        lost, whole = lost + error**2, whole + np.linalg.norm(expected) ** 2
    assert total_error(merged, errors) == pytest.approx((lost / whole) ** 0.5, rel=1e-5)
    assert 0.01 < max(errors.values()) < 1


def test_truncating_one_adapter_keeps_its_name_and_base():
    adapter = make_adapter("sql", seed=3, base_name="org/x")
    smaller, errors = truncate_adapter(adapter, 2, num_layers=3)
    assert (smaller.name, smaller.rank) == ("sql", 2)
    assert smaller.config["base_model_name_or_path"] == "org/x"
    assert smaller.config["target_modules"] == adapter.config["target_modules"]
    assert min(errors.values()) > 0


def test_a_rank_beyond_the_widths_of_a_module_is_exact():
    """q is 10 wide: of rank 24 in name, of rank 10 in fact."""
    wide = Adapter.from_arrays("w", arrays_for(modules_of(projections=("k_proj",)), 24), alpha=24)
    smaller, errors = truncate_adapter(wide, 6)
    assert smaller.rank == 6
    assert max(errors.values()) < 1e-7
    for module, expected in deltas(wide).items():
        np.testing.assert_allclose(deltas(smaller)[module], expected, atol=1e-4)


def test_update_norm_is_that_of_the_product():
    for module, pair in A.modules.items():
        assert update_norm(pair) == pytest.approx(np.linalg.norm(deltas(A)[module]), rel=1e-12)


def test_merged_into_a_base_every_projection_moves_by_its_sum_and_nothing_else_does():
    arrays = random_arrays(BASE)
    merged, changes = merge_into(arrays, BASE, [A, B], weights=WEIGHTS)
    expected = weighted()
    for name, array in arrays.items():
        projection = name.split(".")[-2]
        if not name.endswith("proj.weight"):
            assert merged[name] is array
            continue
        for layer, old in enumerate(array):
            (module,) = (m for m in expected if m.startswith(f"layers.{layer}.")
                         and m.endswith(projection))  # fmt: skip
            np.testing.assert_allclose(merged[name][layer], old + expected[module], atol=2e-5)
    assert {c.projection for c in changes} == set(A.projections)
    q = next(c for c in changes if c.projection == "q_proj")
    whole = np.stack([d for m, d in expected.items() if m.endswith("q_proj")])
    assert q.modules == 3
    base_norm = np.linalg.norm(arrays["layers.self_attn.q_proj.weight"].astype(np.float64))
    assert q.relative == pytest.approx(np.linalg.norm(whole) / base_norm, rel=1e-5)
    assert q.rounding < 1e-6


def test_what_a_narrow_dtype_loses_is_stated():
    faint = make_adapter("faint", alpha=1e-3)
    _, changes = merge_into(random_arrays(BASE), BASE, [faint], dtype="bfloat16")
    assert all(change.rounding > 0.3 for change in changes)


def broken(adapter, value):
    modules = dict(adapter.modules)
    name, pair = next(iter(modules.items()))
    b = pair.b.copy()
    b[0, 0] = value
    return Adapter("broken", modules | {name: type(pair)(pair.a, b, pair.scale)}, adapter.config)


def test_what_cannot_be_merged_is_refused():
    arrays = random_arrays(BASE)
    for adapters, weights, words in (
        ([], {}, "no adapter"),
        ([A, A], {}, "two adapters are called 'a'"),
        ([A, B], {"c": 1.0}, "'c', which is none of the adapters.*a, b"),
        ([A, B], {"a": 0.0}, "leave the adapter out"),
        ([A, B], {"a": float("nan")}, r"weights\['a'\] is nan"),
        ([A, broken(B, np.nan)], {}, "'broken' has NaN"),
    ):
        with pytest.raises(ValueError, match=words):
            merge_adapters(adapters, weights=weights, name="m")
        with pytest.raises(ValueError, match=words):
            merge_into(arrays, BASE, adapters, weights=weights)
    large = {"a": 1e39}
    with pytest.raises(ValueError, match="overflows float32"):
        merge_adapters([A], weights=large, name="m")
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj: \d+ weights overflow float32"):
        merge_into(arrays, BASE, [A], weights=large)
    with pytest.raises(ValueError, match="overflow float16"):
        merge_into(arrays, BASE, [A], weights={"a": 1e5}, dtype="float16")
    with pytest.raises(ValueError, match="all zero in float32"):
        merge_adapters([A], weights={"a": 1e-60}, name="m")


def test_a_broken_base_is_refused():
    arrays = random_arrays(BASE)
    arrays["layers.mlp.up_proj.weight"][1, 0, 0] = np.inf
    with pytest.raises(ValueError, match=r"the base has NaN .* layers\.1\.mlp\.up_proj"):
        merge_into(arrays, BASE, [A])


def test_adapters_of_different_bases_are_refused():
    module = "layers.0.self_attn.q_proj"
    other = Adapter.from_arrays("c", {module: (np.ones((2, 9)), np.ones((12, 2)))}, alpha=2)
    with pytest.raises(ValueError, match="'a' and 'c' are of different bases: q_proj is 10 to 12"):
        merge_adapters([A, other], name="m")
    with pytest.raises(ValueError, match="needs"):
        merge_into(random_arrays(BASE), BASE, [A, other])
    named = [make_adapter("a", base_name="org/x"), make_adapter("b", base_name="org/y", seed=1)]
    with pytest.raises(ValueError, match="different bases: a 'org/x', b 'org/y'"):
        common_base_name(named)
    paths = [make_adapter("a", base_name="/home/me/X"), make_adapter("b", base_name="org/x")]
    assert common_base_name([*paths, make_adapter("c")]) == "org/x"
    assert common_base_name([make_adapter("c")]) is None


def test_the_number_of_layers_is_known_where_a_config_means_every_layer():
    assert layers_of_base([A]) == BASE.num_layers
    some = {m: a for m, a in arrays_for(modules_of()).items() if ".1." in m}
    assert layers_of_base([Adapter.from_arrays("c", some, alpha=1)]) is None
    assert layers_of_base([Adapter.from_arrays("c", some, alpha=1), A]) == BASE.num_layers
