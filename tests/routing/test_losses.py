"""Router losses: their values, and that padding, NaN and empty batches cannot reach them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.routing import losses

pytestmark = pytest.mark.usefixtures("strict")

balance_loss = jax.jit(losses.balance_loss, static_argnames="top_k")
z_loss, label_loss = jax.jit(losses.z_loss), jax.jit(losses.label_loss)


def some_logits(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2


def numpy_balance(logits, top_k):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    f = np.bincount(chosen.ravel(), minlength=logits.shape[1]) / chosen.size
    return logits.shape[1] * (f * p.mean(axis=0)).sum()


@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_is_the_switch_form(top_k):
    logits = some_logits(33, 5)
    mask = np.ones(33, bool)
    got = balance_loss(logits, mask, top_k=top_k)
    np.testing.assert_allclose(got, numpy_balance(logits, top_k), rtol=1e-5)
    # 1 when even, K when collapsed.
    even = np.tile(50.0 * np.eye(5, dtype=np.float32), (3, 1))
    np.testing.assert_allclose(balance_loss(even, mask[:15], top_k=1), 1.0, rtol=1e-5)
    one = np.tile(np.array([50.0, 0, 0, 0, 0], np.float32), (15, 1))
    np.testing.assert_allclose(balance_loss(one, mask[:15], top_k=1), 5.0, rtol=1e-5)
    np.testing.assert_allclose(balance_loss(logits, mask, top_k=5), 1.0, rtol=1e-5)


def test_balance_counts_resident_columns_only():
    logits = some_logits(33, 5)
    slots = np.array([3, -1, 0, 1, -1], np.int32)
    got = balance_loss(logits, np.ones(33, bool), top_k=2, column_to_slot=slots)
    np.testing.assert_allclose(got, numpy_balance(logits[:, [0, 2, 3]], 2), rtol=1e-5)


def test_minimising_balance_spreads_the_tokens():
    logits = jnp.asarray(some_logits(64, 4) + np.array([3, 0, 0, 0], np.float32))
    mask = jnp.ones(64, bool)
    bias = jnp.zeros((1, 4))
    grad = jax.jit(jax.grad(lambda b: losses.balance_loss(logits + b, mask, top_k=1)))
    before = balance_loss(logits, mask, top_k=1)
    for _ in range(30):
        bias = bias - 2.0 * grad(bias)
    assert balance_loss(logits + bias, mask, top_k=1) < 1.1 < 1.8 < before


@jax.jit
def all_losses(logits, mask, labels):
    return jnp.stack(
        [
            losses.balance_loss(logits, mask, top_k=2),
            losses.z_loss(logits, mask),
            losses.label_loss(logits, mask, labels),
        ]
    )


def test_padding_and_nonfinite_tokens_do_not_count():
    # Two rows, one padded from 5 to 64 with tokens that all lean to column 0.
    logits = some_logits(128, 4)
    mask = np.arange(128) < 69
    logits[69:] = [99, 0, 0, 0]
    labels = np.random.default_rng(1).integers(0, 4, 128).astype(np.int32)
    want = all_losses(logits[:69], mask[:69], labels[:69])
    np.testing.assert_allclose(all_losses(logits, mask, labels), want, rtol=1e-5)
    logits[69:] = np.nan
    np.testing.assert_allclose(all_losses(logits, mask, labels), want, rtol=1e-5)
    logits[7], mask[69] = np.inf, True  # one non-finite token among the real, one more at the end
    kept = np.delete(np.arange(69), 7)
    want = all_losses(logits[kept], mask[kept], labels[kept])
    got = all_losses(logits, mask, labels)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_nothing_to_count_is_zero_and_its_gradient_too():
    logits, none = some_logits(6, 3), np.zeros(6, bool)
    labels = np.zeros(6, np.int32)
    assert (all_losses(logits, none, labels) == 0).all()
    assert all_losses(logits, ~none, labels - 1)[2] == 0  # no label known
    logits[2] = np.nan
    jacobian = jax.jit(jax.jacrev(all_losses))
    for mask in (none, ~none):
        grads = np.asarray(jacobian(logits, mask, labels))  # (loss, N, C)
        assert np.isfinite(grads).all()
        assert (grads[:, 2] == 0).all()
        assert ((np.abs(grads).max(axis=(1, 2)) > 0) == mask.any()).all()


def test_label_loss_is_cross_entropy_over_known_labels():
    logits, mask = some_logits(9, 3), np.ones(9, bool)
    labels = np.array([0, 1, 2, -1, 2, -1, 0, 1, 1], np.int32)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    want = -np.mean([log_p[n, c] for n, c in enumerate(labels) if c >= 0])
    np.testing.assert_allclose(label_loss(logits, mask, labels), want, rtol=1e-5)


def test_z_loss_value():
    logits = some_logits(9, 3)
    want = np.mean(np.log(np.exp(logits).sum(axis=1)) ** 2)
    np.testing.assert_allclose(z_loss(logits, np.ones(9, bool)), want, rtol=1e-5)


def test_stacked_logits_give_the_mean_over_layers():
    logits, mask = some_logits(3, 17, 4), np.arange(17) % 5 != 0
    labels = np.random.default_rng(1).integers(-1, 4, 17).astype(np.int32)
    each = [all_losses(layer, mask, labels) for layer in logits]
    np.testing.assert_allclose(all_losses(logits, mask, labels), np.mean(each, axis=0), rtol=1e-5)
