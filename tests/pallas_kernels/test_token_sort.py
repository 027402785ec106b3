"""The dispatch plan: what stands where, for every distribution of ids."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.shapes import WORKLOADS, ProblemSize, workload
from pallas_kernels.token_sort import num_tiles, token_sort
from pallas_kernels.token_sort.reference import token_sort_reference
from pallas_kernels.token_sort.xla import _sort_entries
from tests.helpers import strict_promotion
from tests.pallas_kernels.cases import jit

N, TOP_K, K = 23, 2, 5


@functools.cache
def compiled(num_slots: int, block: int):
    return jit(lambda ids: token_sort(ids, num_slots, block=block))


def check(ids: np.ndarray, num_slots: int, block: int) -> None:
    with strict_promotion():
        plan = compiled(num_slots, block)(jnp.asarray(ids, jnp.int32))
    assert plan.block == block
    assert plan.num_slots == num_slots
    for name, wanted in token_sort_reference(ids, num_slots, block=block).items():
        np.testing.assert_array_equal(getattr(plan, name), wanted, err_msg=name)


@pytest.mark.parametrize("block", [1, 4, 16])
@hypothesis.given(
    ids=st.lists(st.integers(-2, K + 1), min_size=N * TOP_K, max_size=N * TOP_K),
)
@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
def test_equals_the_definition_for_any_ids(block, ids):
    check(np.array(ids).reshape(N, TOP_K), K, block)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_distribution(name):
    size = ProblemSize(num_tokens=N, d_in=1, d_out=1, rank=1, num_slots=K, top_k=TOP_K)
    check(np.asarray(workload(name, size).adapter_ids), K, 4)


@pytest.mark.parametrize(
    ("ids", "num_slots", "block"),
    [
        (np.zeros((0, 2)), 3, 4),
        (np.zeros((1, 1)), 1, 128),
        (np.full((7, 2), -1), 3, 4),
        (np.full((40, 1), 2), 3, 8),  # one full group, its rows a multiple of the block
        (np.arange(40)[::-1, None] % 40, 40, 8),  # one each, in reverse
        (np.array([[1, 1], [0, 1], [1, 1]]), 2, 4),  # twice in one token
        (np.array([[2**31 - 1], [-(2**31)], [1]]), 2, 2),
    ],
)
def test_edges(ids, num_slots, block):
    check(ids.astype(np.int64), num_slots, block)


def test_the_order_is_stable_and_has_an_inverse():
    ids = np.random.default_rng(0).integers(-1, K, (N, TOP_K))
    plan = compiled(K, 4)(jnp.asarray(ids, jnp.int32))
    order, position = np.asarray(plan.order), np.asarray(plan.position)
    live = ids >= 0
    tokens = np.broadcast_to(np.arange(N)[:, None], ids.shape)
    assert (order[position[live]] == tokens[live]).all()
    assert len(set(position[live])) == live.sum() == plan.offsets[-1]
    assert (position[~live] == len(order)).all()
    assert (order == N).sum() == len(order) - live.sum()
    for slot in range(K):
        of_slot = order.reshape(-1, 4)[np.asarray(plan.tile_adapter) == slot].ravel()
        assert (np.diff(of_slot) >= 0).all()


@pytest.mark.parametrize(("num_entries", "num_slots"), [(1, 1), (5, 3), (16, 40), (37, 4), (64, 2)])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_tiles_suffice_for_every_distribution_and_no_fewer_do(num_entries, num_slots, block):
    tiles = num_tiles(num_entries, num_slots, block=block)

    @functools.cache
    def most(entries: int, slots: int) -> int:
        """Tiles that the worst distribution needs, by trying every size of the first group."""
        if slots == 0 or entries == 0:
            return -(-entries // block) if entries else 0
        return max(-(-c // block) + most(entries - c, slots - 1) for c in range(entries + 1))

    # The last group takes what is left.
    worst = most(num_entries, num_slots - 1)
    assert worst <= tiles
    # Where the bound is above, it is by what a remainder smaller than K − 1 leaves unused.
    assert tiles - worst <= 1


def test_ids_too_many_to_pack_into_one_key_sort_alike():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, K + 1, 64), jnp.int32)
    packed = _sort_entries(ids, K)
    pairs = _sort_entries(ids, 2**26)
    for a, b in zip(packed, pairs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_vmap_gives_one_plan_each():
    ids = np.random.default_rng(0).integers(-1, K, (3, N, TOP_K)).astype(np.int32)
    plans = jit(jax.vmap(lambda each: token_sort(each, K, block=4)))(jnp.asarray(ids))
    for i in range(3):
        for name, wanted in token_sort_reference(ids[i], K, block=4).items():
            np.testing.assert_array_equal(getattr(plans, name)[i], wanted)
