"""Our logits against the numbers that make_reference.py stored of a greedy continuation."""

import numpy as np

from tests.parity.random_models import NEW, PROMPT, padded

TOLERANCE = 2e-4


def greedy_batch(prompts, expected) -> tuple[np.ndarray, np.ndarray]:
    """The prompts padded on the left with their continuation behind them, and the mask.

    Each token of a greedy answer is the best behind those before it, so one pass over the whole
    says the same as 32 steps; the steps themselves are compared in the parity tests.
    """
    tokens, mask = padded(prompts, "left")
    answer = np.array(expected["ids"], np.int32)
    return np.concatenate([tokens, answer], axis=1), np.pad(
        mask, ((0, 0), (0, NEW)), constant_values=True
    )


def check_numbers(logits, tokens, mask, expected) -> None:
    """Logits (B, PROMPT + NEW, V) against the stored ones: greedy ids, losses, a few logits."""
    steps = slice(PROMPT - 1, PROMPT + NEW - 1)
    np.testing.assert_array_equal(logits[:, steps].argmax(-1), tokens[:, PROMPT:])
    for name, at in (("prompt_logits", PROMPT - 1), ("last_logits", PROMPT + NEW - 2)):
        np.testing.assert_allclose(logits[:, at, :5], expected[name], rtol=0, atol=TOLERANCE)
    last_sum = logits[:, PROMPT + NEW - 2].astype(np.float64).sum(-1)
    np.testing.assert_allclose(last_sum, expected["last_sum"], rtol=0, atol=50 * TOLERANCE)
    wide = logits.astype(np.float64)
    logp = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    for row, mean_nll in enumerate(expected["mean_nll"]):
        at = np.flatnonzero(mask[row, :PROMPT])
        losses = -logp[row, at[:-1], tokens[row, at[1:]]]
        np.testing.assert_allclose(losses.mean(), mean_nll, rtol=0, atol=TOLERANCE)
