"""train_router on the tiny model: it beats the uniform mix, says what it read, and is watched."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import Adapter, AdapterBank, LoraPair
from molora_jax.models import params_digest
from molora_jax.routing import LearnedRouter
from molora_jax.training import (
    BatchOrder,
    RouterTrainConfig,
    base_arm,
    evaluate,
    fit,
    joined_windows,
    oracle_arm,
    train_router,
    uniform_arm,
)
from molora_jax.training.anneal import AnnealedBatch, AnnealedOrder
from molora_jax.training.router import RouterLoss, RouterMonitor, labelled_windows, routing_sums
from molora_jax.training.router_start import _drawn_rows
from tests.helpers import assert_close, unchecked_shapes

QUICK = RouterTrainConfig(steps=6, batch_size=8, start_rows=60, top_k=1, width=8)


def nll(tiny, arm) -> float:
    own = [each.labelled(slot) for slot, each in enumerate(tiny.held_out)]
    joined = joined_windows(own, 12, seed=3)
    stacks, slots = tiny.bank.stacks, np.arange(2)  # the third slot is empty
    decoder = tiny.base.decoder
    return evaluate(decoder, joined, adapters=stacks, router=arm, column_to_slot=slots).nll


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"start": "random", "feature_steps": 150, "steps": 0},
        {"start": "random", "steps": 80, "label_coef": 0.0, "lr": 2e-2},
        {"after_layer": 0, "steps": 20, "gate": "unit"},
    ],
    ids=str,
)
def test_router_comes_near_the_oracle_on_rows_that_change_domain(tiny, changed):
    config = dataclasses.replace(QUICK, **changed)
    before = params_digest((tiny.base.decoder, tiny.bank.stacks))
    router, training = train_router(tiny.base, tiny.bank, tiny.train, config)
    assert params_digest((tiny.base.decoder, tiny.bank.stacks)) == before
    assert (router.top_k, router.gate) == (1, config.gate)
    assert training.digests == tuple(adapter.digest for adapter in tiny.adapters)
    assert len(training.records) == config.steps

    oracle, uniform = nll(tiny, oracle_arm), nll(tiny, uniform_arm(2))
    assert oracle < uniform - 0.2, "the setting must have something to gain"
    if config.after_layer is None:
        assert nll(tiny, router) < oracle + 0.4 * (uniform - oracle)
    else:
        # Layer 0 has no adapter, so the oracle is out of reach.
        assert router.decision == "shared"
        assert nll(tiny, router) < nll(tiny, base_arm) - 0.3


@pytest.mark.parametrize("states", ["oracle", "base"])
def test_the_start_alone_beats_the_uniform_mix(tiny, states):
    config = dataclasses.replace(QUICK, steps=0, start_states=states)
    router, training = train_router(tiny.base, tiny.bank, tiny.train, config)
    assert training.records == []
    assert nll(tiny, router) < nll(tiny, uniform_arm(2)) - 0.2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "own-data label used: closed-form start, loss (0.1 × cross-entropy)"),
        ({"label_coef": 0.0}, "own-data label used: closed-form start"),
        ({"start": "random", "label_coef": 0.0}, "own-data label used: no"),
        (
            {"start": "random", "feature_steps": 7, "steps": 0},
            "own-data label used: 7 steps on stored layer inputs",
        ),
    ],
)
def test_it_is_said_where_the_label_was_read(changed, said):
    config = dataclasses.replace(QUICK, **changed)
    assert config.label_use() == said
    assert config.uses_labels() == (not said.endswith("used: no"))


def test_records_say_what_the_router_does(tiny, tmp_path, capsys):
    """Usage, entropy, largest share, gradient norm, broken tokens, every step."""
    _, training = train_router(tiny.base, tiny.bank, tiny.train, QUICK, run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == training.records
    for line in lines:
        assert line["grad_norm"] > 0
        assert sum(line["usage"]) == pytest.approx(1, abs=1e-3)
        assert len(line["usage"]) == 2
        assert 0.5 <= line["max_share"] <= 1
        assert 0 <= line["router_entropy"] <= np.log(2) + 1e-6
        assert line["nonfinite_tokens"] == 0
        assert line["balance_loss"] > 0.5
        extra = 0.1 * line["label_loss"]
        assert line["loss"] == pytest.approx(line["language_loss"] + extra, rel=1e-4)
    said = capsys.readouterr().out
    assert "router: low, high; own-data label used: closed-form start, loss" in said
    assert "trainable params" in said


def test_the_temperature_falls_and_is_folded(tiny):
    start, _ = train_router(tiny.base, tiny.bank, tiny.train, dataclasses.replace(QUICK, steps=0))
    falls = dataclasses.replace(QUICK, temperature=(4.0, 0.5), anneal=0.5, lr=1e-6)
    router, falling = train_router(tiny.base, tiny.bank, tiny.train, falls)
    np.testing.assert_allclose(router.w_out[...], start.w_out[...] * 2, atol=1e-3)
    entropy = [record["router_entropy"] for record in falling.records]
    assert entropy[-1] < entropy[0] / 2
    for wrong in ((1.0, 0.0), (1e-30, 1.0)):
        with pytest.raises(ValueError, match="temperature must be two numbers from"):
            dataclasses.replace(QUICK, temperature=wrong)


def test_collapse_is_reported_and_a_balance_loss_prevents_it(tiny, caplog):
    """Two hundred steps with coefficient 0, then with a balance loss."""
    # Both columns are shown the first domain, so one adapter is right for every token.
    data = [tiny.train[0].rows(slice(0, 30)), tiny.train[0].rows(slice(30, 60))]
    config = dataclasses.replace(
        QUICK, steps=200, start="random", label_coef=0.0, joined_share=0.0, lr=1e-2
    )
    _, training = train_router(tiny.base, tiny.bank, data, config)
    assert training.records[-1]["max_share"] > 0.95
    assert "the router collapses" in caplog.text
    assert "'low'" in caplog.text
    assert caplog.text.count("the router collapses") == 1
    caplog.clear()
    config = dataclasses.replace(config, balance_coef=20.0)
    _, balanced = train_router(tiny.base, tiny.bank, data, config)
    assert balanced.records[-1]["max_share"] < training.records[-1]["max_share"]
    assert "the router collapses" not in caplog.text


def test_monitor_warns_over_recent_steps_together(caplog):
    monitor = RouterMonitor(["a", "b"], 0.9, steps=2)
    ones = dict.fromkeys(["weight", "language", "label", "balance", "z", "entropy", "usable"], 1.0)
    steps = [np.array([[10.0, 0]]), np.array([[0.0, 10]]), np.array([[10.0, 0]])]
    for usage in steps:
        said = monitor(ones | {"usage": usage, "nonfinite": 0})
    assert said["max_share"] == 0.5
    assert not caplog.text, "each step is one-sided, but not the two together"
    monitor(ones | {"usage": steps[0], "nonfinite": 0})
    assert "the router collapses" in caplog.text


def bank_of(tiny, *, zero_b: bool) -> AdapterBank:
    rng = np.random.default_rng(0)
    bank = AdapterBank(tiny.base.config, num_slots=3, max_rank=5)
    for adapter in tiny.adapters:
        modules = {
            name: LoraPair(pair.a, 0 * pair.b if zero_b else rng.normal(size=pair.b.shape), 1.0)
            for name, pair in adapter.modules.items()
        }
        bank.load(Adapter(adapter.name, modules, adapter.config))
    return bank


def loss_inputs(tiny, bank: AdapterBank):
    """A router that has seen nothing, its loss, and what fit takes as frozen."""
    router = LearnedRouter(64, 2, top_k=2, width=8, num_layers=4, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(router, nnx.Param, ...)
    frozen = {
        "decoder": tiny.base.decoder,
        "stacks": bank.stacks,
        "column_to_slot": jnp.arange(2),
        "router_data": rest,
        "coefs": dict.fromkeys(["label", "balance", "z"], np.float32(0)),
    }
    return RouterLoss(graph=graph, top_k=1), params, frozen


def test_untrained_adapters_give_the_router_no_gradient_and_are_refused(tiny):
    """With B = 0 the adapters are alike, and the task says nothing to the router."""
    windows = labelled_windows(tiny.train, joined_share=0.0, split="half", seed=0)
    norms = {}
    for zero_b in (True, False):
        loss, params, frozen = loss_inputs(tiny, bank_of(tiny, zero_b=zero_b))
        _, records = fit(
            loss, params, AnnealedOrder(BatchOrder(windows, 8), QUICK), QUICK, frozen=frozen
        )
        norms[zero_b] = [record["grad_norm"] for record in records]
    assert set(norms[True]) == {0.0}
    assert min(norms[False]) > 0.01
    with pytest.raises(ValueError, match="every adapter has B = 0"):
        train_router(tiny.base, bank_of(tiny, zero_b=True), tiny.train, QUICK)


def test_padding_reaches_no_loss_and_no_statistic(tiny):
    """A mask that is missing or of the wrong shape lets padding in."""
    short = labelled_windows(
        [each.rows(slice(0, 2)) for each in tiny.held_out], joined_share=0.0, split="half", seed=0
    )
    tail = jax.tree.map(lambda leaf: np.zeros((4, 5), leaf.dtype), short)
    long = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), short, tail.labelled(-1))
    loss, params, frozen = loss_inputs(tiny, bank_of(tiny, zero_b=False))
    frozen["coefs"] = dict.fromkeys(["label", "balance", "z"], np.float32(1))
    alone, padded = (
        jax.jit(loss)(params, frozen, AnnealedBatch.of(batch)) for batch in (short, long.filled(6))
    )
    assert float(alone[2]["usable"]) == 4 * 16 * 4
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(padded), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_broken_tokens_are_counted_and_kept_out():
    logits = jnp.asarray([[[1.0, 2.0], [jnp.nan, 1.0], [3.0, 0.0], [jnp.inf, 0.0]]], jnp.float32)
    sums = jax.jit(routing_sums)(logits, jnp.asarray([True, True, True, False]))
    assert int(sums["nonfinite"]) == 1
    assert int(sums["usable"]) == 2
    np.testing.assert_array_equal(sums["usage"], [[1, 1]])
    p = jax.nn.softmax(logits[0, jnp.asarray([0, 2])])
    assert_close(sums["entropy"], -(p * jnp.log(p)).sum())


def test_what_needs_no_router_or_does_not_fit_is_refused_before_anything_runs(tiny):
    """One adapter makes no router; k is checked before anything is compiled."""
    one = AdapterBank(tiny.base.config, num_slots=2, max_rank=4)
    one.load(tiny.adapters[0])
    with pytest.raises(ValueError, match="two or more"):
        train_router(tiny.base, one, tiny.train[:1], QUICK)
    with pytest.raises(ValueError, match="1 data sets for 2 adapters"):
        train_router(tiny.base, tiny.bank, tiny.train[:1], QUICK)
    with pytest.raises(ValueError, match="top_k 3"):
        train_router(tiny.base, tiny.bank, tiny.train, dataclasses.replace(QUICK, top_k=3))
    for layer in (3, -2):
        config = dataclasses.replace(QUICK, after_layer=layer)
        with pytest.raises(
            ValueError, match=rf"after_layer {layer} leaves .* 4 layers.*-1 .* to 2"
        ):
            train_router(tiny.base, tiny.bank, tiny.train, config)
    wrong = tiny.train[1].rows(np.arange(3))
    wrong.tokens[0, 1] = tiny.base.config.vocab_size
    with pytest.raises(ValueError, match=r"data of adapter 'high': tokens\[0, 1\] is token id"):
        train_router(tiny.base, tiny.bank, [tiny.train[0], wrong], QUICK)
    for field, value in {
        "top_k": 0,
        "start": "arrow",
        "joined_share": 1.0,
        "ridge": -1.0,
        "gate": "softmx",
        "width": 3,
        "collapse_share": 0.0,
    }.items():
        with unchecked_shapes(), pytest.raises(ValueError, match=field):
            dataclasses.replace(QUICK, **{field: value})


@pytest.mark.parametrize("joined_share", [0.0, 0.5])
def test_the_start_reads_equal_data_evenly_and_sees_an_adapter_with_little(tiny, joined_share):
    config = dataclasses.replace(QUICK, start_rows=24, joined_share=joined_share)

    def drawn(data):
        windows = labelled_windows(data, joined_share=joined_share, split="half", seed=0)
        rows, seen = _drawn_rows(windows, config, 2)
        assert len(rows) == len(set(rows.tolist())) == 24
        assert seen == 20
        return windows, rows, windows.labels[rows[:seen]]

    windows, rows, _ = drawn(tiny.train)
    even = np.random.default_rng(config.seed).permutation(windows.num_rows)[:24]
    np.testing.assert_array_equal(rows, even)
    for little in (1, 5):
        _, _, labels = drawn([tiny.train[0], tiny.train[1].rows(slice(0, little))])
        assert (labels == 1).any(axis=1).sum() >= little
        assert (labels == 0).any(axis=1).sum() >= 5


def test_a_router_is_trained_where_one_adapter_has_a_single_row(tiny):
    data = [tiny.train[0], tiny.train[1].rows(slice(0, 1))]
    config = dataclasses.replace(QUICK, joined_share=0.0, steps=0, start_rows=12)
    router, _ = train_router(tiny.base, tiny.bank, data, config)
    assert nll(tiny, router) < nll(tiny, uniform_arm(2))
    few = [each.rows(slice(0, 1)) for each in tiny.train]
    with pytest.raises(ValueError, match="2 rows for 2 adapters leave none"):
        train_router(tiny.base, tiny.bank, few, config)
