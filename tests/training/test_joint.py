"""Adapters and router trained together: what is read, what the router is at the end."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.models import load_base
from molora_jax.training import evaluate
from molora_jax.training.data import make_batch
from molora_jax.training.joint import (
    JointTrainConfig,
    moved_router,
    neighbour_loss,
    start_router,
    train_jointly,
)

CONFIG = JointTrainConfig(
    num_adapters=2, top_k=1, rank=2, steps=3, batch_size=4, width=8, temperature=(2.0, 0.5)
)


def windows():
    tokens = np.random.default_rng(0).integers(0, 40, (8, 16))
    every = np.ones_like(tokens, bool)
    return make_batch(tokens, every, every, labels=tokens % 2)


def test_training_reads_no_label_and_measures_what_it_returns():
    base, rows, seen = load_base("tiny-random"), windows(), []

    def measure(steps, stacks, router):
        seen.append(steps)
        return {
            "held_out": evaluate(
                base.decoder,
                rows,
                adapters=stacks,
                router=router,
                column_to_slot=np.arange(router.num_columns),
            ).nll
        }

    made = train_jointly(base.config, base.decoder, rows, CONFIG, measure=measure, measure_every=2)
    assert seen == [0, 2, 3]
    last = evaluate(
        base.decoder,
        rows,
        adapters=made.stacks(),
        router=made.router,
        column_to_slot=np.arange(made.router.num_columns),
    ).nll
    assert made.records[-1]["held_out"] == pytest.approx(last, rel=1e-6)
    assert last < made.records[0]["held_out/start"]
    other = dataclasses.replace(rows, labels=1 - rows.labels)
    again = train_jointly(base.config, base.decoder, other, CONFIG)
    assert again.records[-1]["loss"] == made.records[-1]["loss"]


def test_the_temperature_is_folded_into_the_routers_weights():
    model = load_base("tiny-random").config
    router = start_router(model, CONFIG)
    still = {name: jnp.zeros(1) for name in ("w_in", "b_in", "w_out", "b_out")}
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(5, model.hidden_size)), jnp.float32)
    sharp = moved_router(router, still, 1.0, 0.5)
    np.testing.assert_allclose(sharp.logits(hidden), 2 * router.logits(hidden), rtol=1e-5)


def test_neighbours_tell_most_where_kinds_have_a_column_each_and_padding_tells_nothing():
    kinds = np.repeat([[0, 1, 2, 0]], 8, axis=1)
    mask = jnp.asarray(np.arange(32) < 24)[None]

    def loss(columns):
        return float(neighbour_loss(10.0 * jnp.eye(4)[jnp.asarray(columns)], mask))

    apart, merged = loss(kinds), loss(np.minimum(kinds, 1))
    assert apart < merged - 0.2
    padded = kinds.copy()
    padded[0, 24:] = 3
    assert loss(padded) == pytest.approx(apart, abs=1e-6)
    assert float(neighbour_loss(jnp.zeros((1, 32, 4)), jnp.zeros((1, 32), bool))) == 0.0
