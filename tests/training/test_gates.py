"""Routers that no one trains on others' data: gates of one adapter alone, and statistics."""

import jax.numpy as jnp
import numpy as np

from molora_jax.models import params_digest
from molora_jax.routing import PrototypeRouter, StatisticsRouter
from molora_jax.routing.linear import standardised
from molora_jax.training import (
    TrainConfig,
    evaluate,
    gather_statistics,
    joined_windows,
    oracle_arm,
    uniform_arm,
)
from molora_jax.training.gates import AdapterGate, train_gate


def nll(tiny, arm) -> float:
    own = [each.labelled(slot) for slot, each in enumerate(tiny.held_out)]
    joined = joined_windows(own, 12, seed=3)
    stacks, slots = tiny.bank.stacks, np.arange(2)  # the third slot is empty
    decoder = tiny.base.decoder
    return evaluate(decoder, joined, adapters=stacks, router=arm, column_to_slot=slots).nll


def test_a_gate_opens_for_its_own_data_and_its_direction_is_a_key(tiny):
    config = TrainConfig(steps=12, lr=3e-2, warmup_steps=2, batch_size=8)
    keys = []
    for adapter, own in zip(tiny.adapters, tiny.train, strict=True):
        digest = adapter.digest
        key, records = train_gate(tiny.base, adapter, own, config)
        assert records[-1]["loss"] < records[0]["loss"]
        assert adapter.digest == digest
        keys.append(key)
    assert np.isfinite(keys).all()
    assert np.abs(keys).max() > 0.01
    router = PrototypeRouter(standardised(np.stack(keys, axis=-1)), top_k=1)
    oracle, uniform = nll(tiny, oracle_arm), nll(tiny, uniform_arm(2))
    assert nll(tiny, router) < uniform
    assert nll(tiny, router) > oracle


def test_a_new_gate_is_a_half_and_padding_has_no_adapter():
    gate = AdapterGate(jnp.zeros(8))
    mask = jnp.array([[True, True, False]])
    routing, _, _ = gate(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3, 8)), mask)
    np.testing.assert_array_equal(routing.adapter_ids[:, 0], [0, 0, -1])
    np.testing.assert_array_equal(routing.gates[:, 0], [0.5, 0.5, 0.0])


def test_statistics_of_each_alone_come_near_the_oracle(tiny):
    before = params_digest(tiny.base.decoder)
    statistics = [gather_statistics(tiny.base, own, num_features=None) for own in tiny.train]
    assert params_digest(tiny.base.decoder) == before
    router = StatisticsRouter.solve(statistics)
    oracle, uniform = nll(tiny, oracle_arm), nll(tiny, uniform_arm(2))
    assert nll(tiny, router) - oracle < 0.6 * (uniform - oracle)
    swapped = StatisticsRouter.solve(statistics[::-1])  # columns of the wrong adapters
    assert nll(tiny, swapped) > uniform
