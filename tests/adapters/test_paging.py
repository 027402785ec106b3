"""Paging: the answers are the bank's, whatever lies where, and only what is missing is copied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import Adapter, AdapterBank
from molora_jax.adapters.paging import PagedAdapters, paged
from molora_jax.compilations import count_compilations
from molora_jax.models import load_base
from molora_jax.routing import FixedRouter
from pallas_kernels import Routing
from tests.adapters.make import BASE, arrays_for, make_adapter, modules_of
from tests.helpers import assert_close

RANKS = {"a": 2, "b": 5, "c": 8, "d": 1}


def make_paged(**changes):
    sizes = {"num_pages": 6, "page_rank": 2, "max_rank": 8, **changes}
    pool = PagedAdapters(BASE, **sizes)
    for seed, (name, rank) in enumerate(RANKS.items()):
        pool.add(make_adapter(name, rank=rank, seed=seed))
    return pool


def test_logits_are_those_of_the_bank():
    """Mixed ranks over a pool that cannot hold them all, so that pages are given up and scatter."""
    base = load_base("tiny-random")
    bank = AdapterBank(base.config, num_slots=4, max_rank=8)
    pool = PagedAdapters(base.config, num_pages=8, page_rank=2, max_rank=8)
    for seed, (name, rank) in enumerate(RANKS.items()):
        arrays = arrays_for(modules_of(base.config), rank, seed=seed, config=base.config)
        arrays = {module: (0.3 * a, 0.3 * b) for module, (a, b) in arrays.items()}
        adapter = Adapter.from_arrays(name, arrays, alpha=rank, num_layers=base.config.num_layers)
        bank.load(adapter)
        pool.add(adapter)
    tokens = np.random.default_rng(0).integers(0, 250, (2, 5)).astype(np.int32)

    @jax.jit
    def logits(decoder, stacks, ids, gates):
        router = FixedRouter(ids.reshape(*tokens.shape, -1), gates.reshape(*tokens.shape, -1))
        return decoder.logits(decoder(tokens, adapters=stacks, router=router).hidden)

    plain = logits(base.decoder, bank.stacks, jnp.full((10, 2), -1), jnp.zeros((10, 2)))
    scattered = 0
    rng = np.random.default_rng(1)
    batches = (("a", "b"), ("c", "d"), ("b", "d"), ("c", "a"), ("d", "b"), ("a", "c"), ("a", "a"))
    for names in batches:
        rows = rng.integers(-1, 2, (10, 2))
        gates = np.where(rows >= 0, rng.uniform(0.2, 1.0, rows.shape), 0).astype(np.float32)
        slots = np.where(rows >= 0, np.array([bank.slot_of(name) for name in names])[rows], -1)
        expected = logits(base.decoder, bank.stacks, slots.astype(np.int32), gates)
        table = pool.fetch(names)
        routing = paged(Routing(jnp.asarray(rows, jnp.int32), jnp.asarray(gates)), table)
        found = logits(base.decoder, pool.stacks, routing.adapter_ids, routing.gates)
        assert_close(found, expected, terms=64)
        assert np.abs(np.asarray(expected - plain)).max() > 0.1
        scattered += any((np.abs(np.diff(row[row >= 0])) > 1).any() for row in table)
    assert scattered


def test_an_adapter_takes_pages_by_its_rank():
    pool = make_paged()
    table = pool.fetch(["c", "d", "d"])
    assert table.shape == (3, 4)
    assert (table >= 0).sum(axis=1).tolist() == [4, 1, 1]
    assert sorted(table[:2][table[:2] >= 0].tolist()) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(table[1], table[2])
    assert pool.stacks["q_proj"].lora_a.shape == (3, 6, 2, 10)
    assert pool.stacks["q_proj"].ranks[0, table[1, 0]] == 1
    (row,) = pool.fetch(["b"])
    np.testing.assert_array_equal(pool.stacks["q_proj"].ranks[2, row[:3]], [2, 2, 1])


def test_only_what_is_missing_is_copied_and_the_least_recently_used_makes_room():
    pool = make_paged()
    pool.fetch(["a", "b"])  # 1 + 3 pages
    assert (pool.reads, pool.misses, pool.bytes_copied) == (2, 2, 4 * pool.page.num_bytes)
    pool.fetch(["d", "a"])  # one page more
    assert (pool.reads, pool.misses, pool.bytes_copied) == (4, 3, 5 * pool.page.num_bytes)
    pool.fetch(["c"])  # 4 pages, of which one is free: b is the oldest
    assert [pool.is_resident(name) for name in "abcd"] == [True, False, True, True]
    pool.fetch(["c", "a"])
    assert pool.misses == 4
    pool.fetch(["b", "a"])  # d was used before c and a, and one page is not enough
    assert [pool.is_resident(name) for name in "abcd"] == [True, True, False, False]


def test_copies_started_before_are_used_once_and_nothing_recompiles():
    pool = make_paged()
    pool.fetch(["a"])
    with count_compilations() as compiled:
        pool.prefetch(["b", "a", "b"])
        copied = pool.bytes_copied
        assert copied == 4 * pool.page.num_bytes
        table = pool.fetch(["b"])
        assert pool.bytes_copied == copied
        pool.fetch(["c", "d"])
        pool.fetch(["b", "a"])
    assert not compiled
    assert (table[0] >= 0).sum() == 3
    other = make_paged()
    other.prefetch(["b", "d"])
    other.prefetch(["c"])  # 3 + 1 + 4 pages are more than the pool has
    assert list(other._transfers) == ["d", "c"]


def test_rows_outside_the_table_are_no_adapter():
    table = np.array([[4, 2], [1, -1]], np.int32)
    ids = jnp.array([[0, -1], [1, 0], [2, 1]], jnp.int32)
    gates = jnp.array([[0.5, 0.0], [0.25, 0.75], [0.5, 1.0]])
    routing = jax.jit(paged)(Routing(ids, gates), table)
    expected = [[4, 2, -1, -1], [1, -1, 4, 2], [-1, -1, 1, -1]]
    np.testing.assert_array_equal(routing.adapter_ids, expected)
    shares = [[0.5, 0.5, 0, 0], [0.25, 0, 0.75, 0.75], [0, 0, 1, 0]]
    np.testing.assert_array_equal(routing.gates, shares)


def test_what_cannot_be_is_refused_and_leaves_the_pool_as_it_was():
    pool = make_paged()
    pool.fetch(["a", "b"])
    before = jax.tree.map(np.array, pool.stacks), pool.reads
    with pytest.raises(KeyError, match=r"no adapter 'aa' on the host\. Did you mean 'a'"):
        pool.fetch(["d", "aa"])
    with pytest.raises(ValueError, match=r"a, b, c need 8 pages together, more than the pool's 6"):
        pool.fetch(["a", "b", "c"])
    with pytest.raises(ValueError, match="'a' is there already"):
        pool.add(make_adapter("a"))
    with pytest.raises(ValueError, match="rank 9 exceeds max_rank 8"):
        pool.add(make_adapter("wide", rank=9))
    with pytest.raises(ValueError, match="max_rank is 8 and page_rank 3"):
        make_paged(page_rank=3)
    with pytest.raises(ValueError, match="num_pages is 3; an adapter of rank 8 takes 4"):
        make_paged(num_pages=3)
    jax.tree.map(np.testing.assert_array_equal, pool.stacks, before[0])
    assert pool.reads == before[1] and not pool.is_resident("d")
