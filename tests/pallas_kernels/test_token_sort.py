"""The sorted tiles: what stands where, for every layout, backend and distribution of ids."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.shapes import WORKLOADS, ProblemSize, workload
from pallas_kernels.token_sort import LAYOUTS, adapter_order, num_tiles, token_sort, triton, xla
from pallas_kernels.token_sort.groups import members, num_sets, set_code
from pallas_kernels.token_sort.reference import token_sort_reference
from tests.helpers import strict_promotion
from tests.pallas_kernels.cases import jit

N, TOP_K, K = 23, 2, 5
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_backend = pytest.mark.parametrize("backend", ["xla", "interpret"])


@functools.cache
def compiled(num_slots: int, layout: str, block: int, backend: str):
    how = {"layout": layout, "block": block, "backend": backend}
    return jit(lambda ids: token_sort(ids, num_slots, **how))


def check(ids: np.ndarray, num_slots: int, layout: str, block: int, backend: str) -> None:
    with strict_promotion():
        tiles = compiled(num_slots, layout, block, backend)(jnp.asarray(ids, jnp.int32))
    assert (tiles.block, tiles.layout) == (block, layout)
    wanted = token_sort_reference(ids, num_slots, layout=layout, block=block)
    for name, each in wanted.items():
        np.testing.assert_array_equal(getattr(tiles, name), each, err_msg=name)


@every_backend
@every_layout
@pytest.mark.parametrize("block", [1, 4, 16])
@hypothesis.given(
    ids=st.lists(st.integers(-2, K + 1), min_size=N * TOP_K, max_size=N * TOP_K),
)
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
def test_equals_the_definition_for_any_ids(backend, layout, block, ids):
    check(np.array(ids).reshape(N, TOP_K), K, layout, block, backend)


@every_backend
@every_layout
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_distribution(backend, layout, name):
    size = ProblemSize(num_tokens=150, d_in=1, d_out=1, rank=1, num_slots=K, top_k=TOP_K)
    check(np.asarray(workload(name, size).adapter_ids), K, layout, 16, backend)


@every_backend
@every_layout
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
        (np.arange(60).reshape(20, 3) % 7 - 1, 6, 4),
        (np.arange(130)[:, None] % 130, 130, 2),  # more groups than one program counts
    ],
)
def test_edges(backend, layout, ids, num_slots, block):
    check(ids.astype(np.int64), num_slots, layout, block, backend)


@every_layout
def test_many_rows_are_counted_in_blocks_first(layout, monkeypatch):
    ids = np.random.default_rng(0).integers(-1, K, (300, TOP_K))
    monkeypatch.setattr(triton, "ONE_KERNEL_ROWS", 0)

    def sort(ids):
        how = {"layout": layout, "block": 16, "backend": "interpret"}
        return token_sort.__wrapped__(ids, K, **how)

    ids_on_device = jnp.asarray(ids, jnp.int32)
    assert "token_sort_count" in str(jax.make_jaxpr(sort)(ids_on_device))
    tiles = jit(sort)(ids_on_device)
    for name, each in token_sort_reference(ids, K, layout=layout, block=16).items():
        np.testing.assert_array_equal(getattr(tiles, name), each, err_msg=name)


@every_backend
def test_the_order_is_stable_and_complete(backend):
    ids = np.random.default_rng(0).integers(-1, K, (N, TOP_K))
    order, offsets = adapter_order(jnp.asarray(ids, jnp.int32), K, backend=backend)
    assert sorted(np.asarray(order)) == list(range(N * TOP_K))
    flat = ids.ravel()
    assert offsets[-1] == (flat >= 0).sum()
    for slot in range(K):
        own = np.asarray(order[offsets[slot] : offsets[slot + 1]])
        assert (own == np.flatnonzero(flat == slot)).all()


@every_layout
def test_tokens_in_another_order_get_the_same_sets(layout):
    ids = np.random.default_rng(0).integers(-1, K, (N, TOP_K)).astype(np.int32)
    shuffle = np.random.default_rng(1).permutation(N)
    before, after = (
        compiled(K, layout, 4, "xla")(jnp.asarray(each)) for each in (ids, ids[shuffle])
    )
    for name in ("start", "rows", "adapters"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


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


@pytest.mark.parametrize(("num_slots", "top_k"), [(3, 2), (1, 3), (8, 2), (4, 4), (64, 2)])
def test_sets_are_numbered_without_gaps(num_slots, top_k):
    table = members(num_slots, top_k)
    assert len(table) == num_sets(num_slots, top_k) == len({tuple(row) for row in table.tolist()})
    ascending = np.sort(np.where(table < 0, num_slots, table), axis=1)
    codes = set_code(jnp.asarray(ascending, jnp.int32), num_slots)
    np.testing.assert_array_equal(codes, np.arange(len(table)))
    none = jnp.full((1, top_k), num_slots, jnp.int32)
    assert set_code(none, num_slots)[0] == len(table)


def test_rows_too_many_to_pack_into_one_key_sort_alike():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 64)), jnp.int32)
    packed = xla.sort_rows(codes, 40)[0]
    # So many groups that code·rows + row would not fit 32 bits.
    program = jit(lambda codes: xla.sort_rows(codes, 2**26)[0])
    np.testing.assert_array_equal(packed, program(codes))


@every_backend
def test_vmap_gives_tiles_for_each(backend):
    ids = np.random.default_rng(0).integers(-1, K, (3, N, TOP_K)).astype(np.int32)
    how = {"layout": "sets", "block": 4, "backend": backend}
    tiles = jit(jax.vmap(lambda each: token_sort(each, K, **how)))(jnp.asarray(ids))
    for i in range(3):
        wanted = token_sort_reference(ids[i], K, layout="sets", block=4)
        for name, each in wanted.items():
            np.testing.assert_array_equal(getattr(tiles, name)[i], each)
