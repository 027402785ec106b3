"""Means and spreads over seeds."""

import pytest

from experiments.seeds import over_seeds, shown


def test_several_seeds_have_a_mean_and_a_spread():
    found = over_seeds([{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0}])
    assert found == {"loss": 2.0, "loss/spread": 1.0}
    assert shown(found, "loss", digits=2) == "2.00 ± 1.00"


def test_one_seed_has_no_spread():
    found = over_seeds([{"loss": 1.0}])
    assert found == {"loss": 1.0}
    assert shown(found, "loss") == "1.000"


def test_seeds_that_measured_other_things_are_refused():
    with pytest.raises(ValueError, match="differ in what they measured: ari, loss"):
        over_seeds([{"loss": 1.0}, {"ari": 1.0}])
