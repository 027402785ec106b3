"""Losses: equal to a float64 computation, zero and not NaN where there is no target."""

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.training import data, losses
from tests.helpers import assert_close, strict_promotion

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(3 * RNG.normal(size=(2, 5, 11)), jnp.float32)
TOKENS = RNG.integers(0, 11, size=(2, 5))


def on_device(batch: data.Batch) -> data.Batch:
    return jax.tree.map(jnp.asarray, batch)


def expected_nll() -> np.ndarray:
    wide = np.asarray(LOGITS, np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    nll = np.zeros(TOKENS.shape)
    for b in range(2):
        for i in range(4):
            nll[b, i] = -log_p[b, i, TOKENS[b, i + 1]]
    return nll


def test_nll_of_each_token():
    with strict_promotion():
        nll = jax.jit(losses.token_nll)(LOGITS, jnp.asarray(TOKENS))
    assert nll.dtype == jnp.float32
    assert_close(nll, expected_nll(), terms=11)
    half = jax.jit(losses.token_nll)(LOGITS.astype(jnp.bfloat16), jnp.asarray(TOKENS))
    assert half.dtype == jnp.float32


def test_loss_counts_targets_alone_and_its_gradient_is_softmax_minus_one_hot():
    mask = np.ones((2, 5), bool)
    mask[1, 3:] = False
    batch = on_device(data.make_batch(TOKENS, mask, np.ones_like(mask)))
    total, weight = losses.next_token_loss(LOGITS, batch)
    assert float(weight) == 6
    assert_close(total, (expected_nll() * batch.weights).sum(), terms=11)
    grad = jax.jit(jax.grad(lambda logits: losses.next_token_loss(logits, batch)[0]))(LOGITS)
    p = np.array(jax.nn.softmax(LOGITS))
    p[0, 1, TOKENS[0, 2]] -= 1
    assert_close(grad[0, 1], p[0, 1])
    assert not np.asarray(grad)[batch.weights == 0].any()


def test_no_target_gives_zero_and_zero_gradient():
    """An empty mask: 0/0 would be NaN."""
    batch = on_device(data.make_batch(TOKENS, np.zeros((2, 5), bool), np.ones((2, 5), bool)))

    def mean(logits):
        return losses.mean_or_zero(*losses.next_token_loss(logits, batch))

    value, grad = jax.jit(jax.value_and_grad(mean))(LOGITS)
    assert float(value) == 0.0
    assert not np.asarray(grad).any()


def test_broken_logits_of_padding_do_not_reach_the_sum():
    mask = np.ones((2, 5), bool)
    mask[1] = False
    batch = on_device(data.make_batch(TOKENS, mask, np.ones_like(mask)))
    whole, weight = losses.next_token_loss(LOGITS, batch)
    broken, _ = losses.next_token_loss(LOGITS.at[1].set(jnp.nan), batch)
    assert float(weight) == 4
    assert float(broken) == float(whole) > 0
