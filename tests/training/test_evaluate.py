"""evaluate: the arms, padding of the last batch, one compilation for arms of one structure."""

import jax
import numpy as np
import pytest

from molora_jax.compilations import count_compilations
from molora_jax.training import (
    base_arm,
    evaluate,
    joined_windows,
    oracle_arm,
    single_arm,
    uniform_arm,
)
from molora_jax.training.data import Batch, concatenate
from molora_jax.training.losses import next_token_loss


def run(tiny, windows: Batch, router, **settings):
    return evaluate(
        tiny.base.decoder,
        windows,
        adapters=tiny.bank.stacks,
        router=router,
        column_to_slot=np.arange(tiny.bank.num_slots),
        **settings,
    )


def test_losses_are_those_of_the_model_whatever_the_batch(tiny):
    windows = tiny.held_out[0].rows(slice(0, 5))
    found = evaluate(tiny.base.decoder, windows)
    assert found.token_nll.shape == (5, 16)
    assert found.tokens == 75

    @jax.jit
    def directly(decoder, batch):
        return next_token_loss(decoder.logits(decoder(batch.tokens, batch.mask).hidden), batch)

    total, weight = directly(tiny.base.decoder, windows)
    assert found.nll == pytest.approx(float(total / weight), rel=1e-5)
    by_two = evaluate(tiny.base.decoder, windows, batch_size=2)
    np.testing.assert_allclose(by_two.token_nll, found.token_nll, rtol=1e-5, atol=1e-5)


def test_base_arm_is_exactly_the_base(tiny):
    windows = tiny.held_out[0]
    plain = evaluate(tiny.base.decoder, windows)
    np.testing.assert_array_equal(run(tiny, windows, base_arm).token_nll, plain.token_nll)
    assert run(tiny, windows, single_arm(0)).nll < plain.nll - 0.5


def test_oracle_and_uniform_route_as_they_say(tiny):
    own = [each.labelled(slot) for slot, each in enumerate(tiny.held_out)]
    joined = joined_windows(own, 10, seed=0)
    oracle = run(tiny, joined, oracle_arm, return_routing=True)
    assert oracle.routing.adapter_ids.shape == (4, 10, 16, 1)
    for layer in oracle.routing.adapter_ids[..., 0]:
        np.testing.assert_array_equal(layer, joined.labels)
    singles = [run(tiny, joined, single_arm(slot)) for slot in range(2)]
    assert oracle.nll < min(each.nll for each in singles) - 0.5
    # Up to the change of domain the oracle is the first domain's adapter alone.
    for row in range(10):
        first = singles[joined.labels[row, 0]]
        np.testing.assert_allclose(oracle.token_nll[row, :7], first.token_nll[row, :7], rtol=1e-4)
    uniform = run(tiny, joined, uniform_arm(2), return_routing=True)
    assert set(uniform.routing.gates.ravel().tolist()) == {0.5}
    assert oracle.nll < uniform.nll


def test_mean_over_chosen_positions(tiny):
    own = [each.labelled(slot) for slot, each in enumerate(tiny.held_out)]
    found = evaluate(tiny.base.decoder, concatenate(own))
    parts = [found.mean(concatenate(own).labels == slot) for slot in range(2)]
    assert found.nll == pytest.approx(np.mean(parts))
    assert parts[0] == pytest.approx(evaluate(tiny.base.decoder, own[0]).nll, rel=1e-5)
    assert np.isnan(found.mean(np.zeros((40, 16), bool)))


def test_base_singles_and_oracle_share_one_compilation(tiny):
    windows = tiny.held_out[0].labelled(0).rows(slice(0, 3))
    run(tiny, windows, base_arm)
    with count_compilations() as compiled:
        run(tiny, windows, single_arm(0))
        run(tiny, windows, single_arm(1))
        run(tiny, windows, oracle_arm)
    assert not [name for name in compiled if "evaluate" in name]


def test_padding_counts_nothing_and_uses_no_adapter(tiny):
    windows = tiny.held_out[0].rows(slice(0, 2))
    mask = windows.mask.copy()
    mask[1] = False
    padded = Batch(windows.tokens, mask, windows.weights * mask, windows.labels)
    found = run(tiny, padded, single_arm(0), return_routing=True)
    assert np.isfinite(found.token_nll).all()
    assert found.tokens == 15
    assert (found.routing.adapter_ids[:, 1] == -1).all()
    assert found.nll == pytest.approx(run(tiny, windows.rows(slice(0, 1)), single_arm(0)).nll)
