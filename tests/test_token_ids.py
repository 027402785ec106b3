"""Token ids outside a vocabulary are named with their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.token_ids import check_token_ids

IDS = np.array([[0, 4, 5, 9], [10, -1, 2**31 - 1, 3]])


def test_the_first_bad_id_its_place_and_the_count_are_named():
    said = r"rows\[1, 0\] is token id 10, outside the table of 10 ids \(3 such.*< 10; build anew"
    with pytest.raises(ValueError, match=said):
        check_token_ids(IDS, 10, name="rows", of="the table", remedy="build anew")
    check_token_ids(IDS[:1], 10)
    check_token_ids([], 10)


def test_padding_may_hold_anything():
    check_token_ids(IDS, 10, mask=np.array([[True] * 4, [False, False, False, True]]))
    with pytest.raises(ValueError, match=r"tokens\[1, 1\] is token id -1, .*\(1 such"):
        check_token_ids(IDS, 10, mask=np.array([[True] * 4, [False, True, False, True]]))


def test_other_numbers_are_no_ids():
    with pytest.raises(ValueError, match="tokens holds float64; expected integer token ids"):
        check_token_ids([1.0, 2.0], 10)
    with pytest.raises(ValueError, match="tokens holds bool"):
        check_token_ids(np.array([True]), 10)


def test_nothing_is_read_inside_jit():
    @jax.jit
    def traced(ids):
        check_token_ids(ids, 10)
        return ids

    assert (traced(jnp.asarray([99])) == 99).all()
