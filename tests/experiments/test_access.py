"""Access patterns, each by the property that it is named for."""

import collections

import numpy as np
import pytest

from experiments.access import MEAN_RUN, PATTERNS, pattern

LENGTH = 20_000


def trace(name, num_adapters=8, length=LENGTH, seed=0):
    return pattern(name, num_adapters=num_adapters, length=length, seed=seed)


def misses(accesses, room):
    """Of a cache of the least recently used."""
    kept, missed = collections.OrderedDict(), 0
    for each in accesses.tolist():
        if each not in kept:
            missed += 1
            if len(kept) == room:
                kept.popitem(last=False)
        kept[each] = None
        kept.move_to_end(each)
    return missed / len(accesses)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_its_seed_and_names_every_adapter(name):
    accesses = trace(name)
    np.testing.assert_array_equal(accesses, trace(name))
    assert (accesses != trace(name, seed=1)).any()
    assert sorted(set(accesses.tolist())) == list(range(8))
    assert accesses.shape == (LENGTH,)
    assert trace(name, num_adapters=1, length=3).tolist() == [0, 0, 0]
    assert trace(name, length=0).shape == (0,)


def test_bursts_have_their_mean_length():
    accesses = trace("bursty")
    runs = 1 + (np.diff(accesses) != 0).sum()
    assert LENGTH / runs == pytest.approx(MEAN_RUN, rel=0.1)
    # Every adapter follows every other about as often, and none follows itself.
    pairs = collections.Counter(zip(accesses[:-1].tolist(), accesses[1:].tolist(), strict=True))
    changes = [count for (one, other), count in pairs.items() if one != other]
    assert len(changes) == 56
    assert max(changes) < 4 * min(changes)


def test_uniform_forgets_and_shares_alike():
    accesses = trace("uniform")
    assert np.bincount(accesses) / LENGTH == pytest.approx(1 / 8, rel=0.1)
    assert np.mean(accesses[1:] == accesses[:-1]) == pytest.approx(1 / 8, rel=0.1)


def test_zipf_shares_fall_as_one_over_the_rank():
    shares = np.bincount(trace("zipf")) / LENGTH
    assert shares / shares[0] == pytest.approx(1 / np.arange(1, 9), rel=0.15)


def test_the_adversary_misses_every_time_and_the_others_less_and_less():
    rates = {name: misses(trace(name), 7) for name in PATTERNS}
    assert rates["adversarial"] == 1.0
    assert misses(trace("adversarial"), 8) == 8 / LENGTH
    rates = {name: misses(trace(name), 4) for name in PATTERNS}
    assert rates["bursty"] < 0.05 < rates["zipf"] < rates["uniform"] < rates["adversarial"] == 1.0


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match="'burst'; expected one of bursty, uniform, zipf"):
        trace("burst")
    with pytest.raises(ValueError, match="num_adapters is 0 and length 5"):
        trace("uniform", num_adapters=0, length=5)
