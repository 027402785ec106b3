"""The routing decision against a plain numpy definition, and its corner cases one by one."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax import routing
from molora_jax.routing import count_nonfinite, rms_normalize

pytestmark = pytest.mark.usefixtures("strict")
# One program instead of one for every operation.
select = jax.jit(routing.select, static_argnames=("top_k", "gate"))


def numpy_select(logits, mask, top_k, column_to_slot):
    """The definition, token by token."""
    ids = np.full((len(logits), top_k), -1)
    gates = np.zeros((len(logits), top_k))
    for n, row in enumerate(np.asarray(logits, np.float64)):
        if not mask[n] or not np.isfinite(row).all():
            continue
        allowed = [c for c in range(len(row)) if column_to_slot[c] >= 0]
        best = sorted(allowed, key=lambda c: (-row[c], c))[:top_k]
        weight = np.exp(row[best] - row[best].max()) if best else np.zeros(0)
        ids[n, : len(best)] = [column_to_slot[c] for c in best]
        gates[n, : len(best)] = weight / weight.sum() if best else 0.0
    return ids, gates


@pytest.mark.parametrize(
    ("top_k", "C", "gate"),
    [(1, 1, "softmax"), (1, 5, "unit"), (2, 5, "softmax"), (3, 7, "unit"), (4, 4, "softmax")],
)
def test_equals_the_definition(top_k, C, gate):
    rng = np.random.default_rng(C + top_k)
    # Few different values, so that rows are full of ties.
    logits = rng.integers(-2, 3, (41, C)).astype(np.float32)
    logits[3, 0], logits[7, C - 1] = np.nan, np.inf
    mask = rng.random(41) > 0.2
    slots = rng.permutation(C + 3)[:C].astype(np.int32)
    if C > 4:
        slots[1] = -1
    out = select(logits, mask, top_k=top_k, gate=gate, column_to_slot=slots)
    ids, gates = numpy_select(logits, mask, top_k, slots)
    np.testing.assert_array_equal(out.adapter_ids, ids)
    np.testing.assert_allclose(out.gates, gates, rtol=1e-6)
    assert out.adapter_ids.dtype == jnp.int32
    assert out.gates.dtype == jnp.float32


def test_weights_are_normalised_for_each_token():
    logits = np.array([[3.0, 1, 0, 0], [0, 0, 5, 5], [1, 2, 3, 4]])
    out = select(logits, np.ones(3, bool), top_k=2)
    np.testing.assert_array_equal(out.adapter_ids, [[0, 1], [2, 3], [3, 2]])
    np.testing.assert_allclose(out.gates.sum(1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(out.gates[0], np.exp([3, 1]) / np.exp([3, 1]).sum(), rtol=1e-6)
    for n in range(3):
        alone = select(logits[n : n + 1], np.ones(1, bool), top_k=2)
        np.testing.assert_array_equal(alone.adapter_ids, out.adapter_ids[n : n + 1])
        np.testing.assert_array_equal(alone.gates, out.gates[n : n + 1])


def test_lowest_column_wins_a_tie():
    zeros = [0.0, -0.0, 0.0, -0.0]
    rows = np.array([[7.0, 7, 7, 7], zeros, zeros[::-1], [1, 2, 2, 2], [-1e38] * 4])
    out = select(rows, np.ones(5, bool), top_k=3)
    np.testing.assert_array_equal(
        out.adapter_ids, [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2]]
    )
    # Among many columns too, where backends take another algorithm.
    wide = jnp.asarray(np.random.default_rng(0).integers(0, 3, (16, 300)), jnp.float32)
    out = select(wide, np.ones(16, bool), top_k=9)
    ids, _ = numpy_select(wide, np.ones(16, bool), 9, np.arange(300))
    np.testing.assert_array_equal(out.adapter_ids, ids)


def test_nonfinite_rows_use_the_base_and_are_counted():
    inf, nan = np.inf, np.nan
    rows = jnp.array([[nan, 1, 2, 3], [-inf] * 4, [0, inf, 0, 0], [1, 2, 3, 4], [nan] * 4])
    mask = jnp.array([True, True, True, True, False])
    out = select(rows, mask, top_k=2)
    np.testing.assert_array_equal(out.adapter_ids, [[-1, -1]] * 3 + [[3, 2]] + [[-1, -1]])
    assert (np.asarray(out.gates)[[0, 1, 2, 4]] == 0).all()
    assert count_nonfinite(rows, mask) == 3  # padding is not counted
    stacked = jnp.stack([rows, jnp.zeros_like(rows)])
    np.testing.assert_array_equal(count_nonfinite(stacked, mask), [3, 0])


def test_finiteness_is_tested_before_absent_columns_are_masked():
    rows = np.array([[1.0, 2, 3], [np.nan, 2, 3]])
    slots = np.array([-1, 4, 0], np.int32)
    out = select(rows, np.ones(2, bool), top_k=1, column_to_slot=slots)
    # The mask alone makes no token non-finite; a NaN in an absent column does.
    np.testing.assert_array_equal(out.adapter_ids, [[0], [-1]])


def test_too_few_resident_columns_leave_the_rest_empty():
    rows = np.array([[1.0, 2, 3, 0]])
    one = select(rows, np.ones(1, bool), top_k=3, column_to_slot=np.array([-1, 6, -1, -1]))
    np.testing.assert_array_equal(one.adapter_ids, [[6, -1, -1]])
    np.testing.assert_array_equal(one.gates, [[1, 0, 0]])
    none = select(rows, np.ones(1, bool), top_k=2, column_to_slot=np.full(4, -1, np.int32))
    np.testing.assert_array_equal(none.adapter_ids, [[-1, -1]])
    np.testing.assert_array_equal(none.gates, [[0, 0]])


def test_padding_has_no_adapter():
    out = select(np.ones((3, 2)), np.array([False, True, False]), top_k=1)
    np.testing.assert_array_equal(out.adapter_ids, [[-1], [0], [-1]])
    np.testing.assert_array_equal(out.gates, [[0], [1], [0]])


def test_eviction_and_moves_do_not_recompile_and_never_swap_columns():
    traces = []

    @jax.jit
    def step(logits, mask, slots):
        traces.append(1)
        return select(logits, mask, top_k=1, column_to_slot=slots).adapter_ids[:, 0]

    logits, mask = np.array([[5.0, 1, 0], [0, 5, 1]]), np.ones(2, bool)
    for slots, want in (([0, 1, 2], [0, 1]), ([7, -1, 2], [7, 2]), ([-1, 3, -1], [3, 3])):
        np.testing.assert_array_equal(step(logits, mask, np.array(slots, np.int32)), want)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("top_k", "gate"), [(1, "unit"), (2, "softmax"), (3, "unit"), (4, "softmax")]
)
def test_gradient_is_finite_with_absent_columns_padding_and_nan(top_k, gate):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 4)).astype(np.float32)
    logits[1, 2] = np.nan
    logits[2] = [1e38, -1e38, 0, 0]
    mask = np.array([True, True, True, False, True, True])
    weight = jnp.asarray(rng.standard_normal((6, top_k)), jnp.float32)

    @jax.jit
    @jax.grad
    def gradient(x, slots):
        return jnp.sum(weight * select(x, mask, top_k=top_k, gate=gate, column_to_slot=slots).gates)

    for slots in ([0, 1, 2, 3], [-1, 1, -1, 0], [-1] * 4):
        grad = gradient(logits, np.array(slots, np.int32))
        assert np.isfinite(grad).all()
        assert (np.asarray(grad)[[1, 3]] == 0).all()  # non-finite and padding
        assert (np.asarray(grad)[:, np.array(slots) < 0] == 0).all()


def test_unit_gate_is_exactly_one_with_the_gradient_of_the_dense_probability():
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((50, 5)) * 3, jnp.float32)
    mask = jnp.ones(50, bool)

    @jax.jit
    def everything(x):
        def gates(x, top_k, gate):
            return routing.select(x, mask, top_k=top_k, gate=gate).gates

        def slope(f):
            return jax.grad(lambda x: f(x).sum())(x)

        return {
            "unit": gates(x, 1, "unit"),
            "unit slope": slope(lambda x: gates(x, 1, "unit")),
            "softmax slope": slope(lambda x: gates(x, 1, "softmax")),
            "dense slope": slope(lambda x: jax.nn.softmax(x, axis=-1).max(axis=-1)),
            "two": (gates(x, 2, "unit"), gates(x, 2, "softmax")),
        }

    out = everything(logits)
    assert (out["unit"] == 1.0).all()
    np.testing.assert_allclose(out["unit slope"], out["dense slope"], atol=1e-6)
    assert (out["softmax slope"] == 0).all()
    np.testing.assert_array_equal(*out["two"])  # the values are those of the softmax gate


def test_softmax_gate_gradient_equals_finite_differences():
    logits = np.array([[0.3, -0.2, 1.0], [2.0, 1.5, -1.0]], np.float32)
    weight = np.array([[1.0, -2.0], [0.5, 3.0]])

    @jax.jit
    def f(x):
        return jnp.sum(weight * select(x, np.ones(2, bool), top_k=2).gates)

    eps = 1e-2
    numeric = np.zeros_like(logits)
    for n, c in itertools.product(range(2), range(3)):
        step = np.zeros_like(logits)
        step[n, c] = eps
        numeric[n, c] = (f(logits + step) - f(logits - step)) / (2 * eps)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(logits), numeric, atol=1e-3)


def test_all_columns_is_the_dense_mixture():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((9, 5)), jnp.float32)
    out = select(logits, np.ones(9, bool), top_k=5)
    dense = np.zeros((9, 5))
    np.put_along_axis(dense, np.asarray(out.adapter_ids), np.asarray(out.gates), axis=1)
    np.testing.assert_allclose(dense, jax.nn.softmax(logits, axis=-1), rtol=1e-6)


def test_vmap_over_layers_equals_each_layer():
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((3, 7, 4)), jnp.float32)
    mask = np.arange(7) != 2
    out = jax.vmap(lambda x: select(x, mask, top_k=2))(logits)
    for layer in range(3):
        one = select(logits[layer], mask, top_k=2)
        np.testing.assert_array_equal(out.adapter_ids[layer], one.adapter_ids)
        np.testing.assert_array_equal(out.gates[layer], one.gates)


def test_misuse_is_refused_with_the_value(unchecked):
    logits, mask = np.zeros((2, 3)), np.ones(2, bool)
    for bad in (0, -1, 4):
        with pytest.raises(ValueError, match=rf"top_k {bad} .*1 to 3"):
            select(logits, mask, top_k=bad)
    with pytest.raises(ValueError, match=r"gate 'hard' is unknown.*softmax, unit"):
        select(logits, mask, top_k=1, gate="hard")
    with pytest.raises(ValueError, match=r"column_to_slot has shape \(2,\).*3 columns"):
        select(logits, mask, top_k=1, column_to_slot=np.zeros(2, np.int32))


def test_rms_normalize_is_scale_free_and_float32():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((3, 8)), jnp.float32)
    y = rms_normalize(x)
    np.testing.assert_allclose(jnp.mean(y * y, axis=-1), 1.0, rtol=1e-4)
    np.testing.assert_allclose(rms_normalize(x * 100.0), y, rtol=1e-4, atol=1e-5)
    assert rms_normalize(x.astype(jnp.bfloat16)).dtype == jnp.float32
    assert (rms_normalize(jnp.zeros((1, 8))) == 0).all()
