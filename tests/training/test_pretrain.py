"""A base from random weights: it learns, the same way each time, and goes on from given arrays."""

import numpy as np

from molora_jax.models.tiny import tiny_config
from molora_jax.training import BatchOrder, TrainConfig
from molora_jax.training.data import make_batch
from molora_jax.training.pretrain import pretrain

CONFIG = TrainConfig(steps=30, lr=3e-3, batch_size=16)


def doubled_tokens(rows=64, length=16):
    tokens = np.random.default_rng(0).integers(0, 20, (rows, length))
    tokens[:, 1::2] = tokens[:, ::2]
    return make_batch(tokens, np.ones_like(tokens, bool), np.ones_like(tokens, bool))


def test_a_base_learns_its_text_and_can_be_trained_on():
    order = BatchOrder(doubled_tokens(), CONFIG.batch_size)
    arrays, records = pretrain(tiny_config(), order, CONFIG)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    again, _ = pretrain(tiny_config(), order, CONFIG)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, again[name])
    _, more = pretrain(tiny_config(), order, CONFIG, start=arrays)
    assert more[0]["loss"] < records[0]["loss"] - 1
