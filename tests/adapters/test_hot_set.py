"""The hot set: names mean versions, leases keep slots as they are, the idle make room."""

import threading

import jax
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.bank import BankFull, SlotInUse
from molora_jax.adapters.hot_set import HotSet
from molora_jax.compilations import count_compilations
from tests.adapters.make import BASE, make_adapter
from tests.adapters.test_bank import assert_slot_is


@pytest.fixture
def hot():
    return HotSet(AdapterBank(BASE, num_slots=2, max_rank=4))


def add(hot, *names):
    """An adapter of its own weights for each name."""
    made = {name: make_adapter(name, seed=sum(map(ord, name))) for name in names}
    for name, adapter in made.items():
        hot.add(adapter, name=name)
    return made


def slot(hot, name):
    """The slot that a lease of the name gets; the lease is ended at once."""
    lease = hot.acquire([name])
    hot.release(lease)
    return lease.slots[name]


def test_the_least_recently_used_idle_adapter_makes_room(hot):
    made = add(hot, "a", "b", "c")
    assert (slot(hot, "a"), slot(hot, "b"), slot(hot, "a")) == (0, 1, 0)
    assert slot(hot, "c") == 1
    assert [hot.is_resident(name) for name in "abc"] == [True, False, True]
    assert_slot_is(hot.bank, 0, made["a"])
    assert_slot_is(hot.bank, 1, made["c"])


def test_a_held_slot_is_never_rewritten_and_the_request_waits(hot):
    made = add(hot, "a", "b", "c")
    both = hot.acquire(["a", "b"])
    before = jax.tree.map(np.array, hot.bank.stacks)
    assert hot.acquire(["c"]) is None
    assert hot.acquire(["a", "c"]) is None
    jax.tree.map(np.testing.assert_array_equal, hot.bank.stacks, before)
    again = hot.acquire(["b"])  # one more on the same slot
    hot.release(both)
    assert hot.acquire(["c"]).slots == {"c": 0}
    assert_slot_is(hot.bank, 1, made["b"])
    assert hot.acquire(["a"]) is None  # b is still held by `again`
    hot.release(again)
    assert hot.acquire(["a"]).slots == {"a": 1}


def test_a_lease_is_of_all_its_adapters_or_of_none(hot):
    add(hot, "a", "b", "c")
    held = hot.acquire(["a"])
    assert hot.acquire(["b", "c"]) is None
    assert not hot.is_resident("b") and not hot.is_resident("c")
    hot.release(held)
    assert set(hot.acquire(["b", "c"]).slots.values()) == {0, 1}
    with pytest.raises(ValueError, match=r"3 adapters \(a, b, c\) does not fit .* 2 slots"):
        hot.acquire(["a", "b", "c"])
    with pytest.raises(KeyError, match=r"no adapter 'aa' is loaded\. Did you mean 'a'"):
        hot.acquire(["aa"])
    assert hot.acquire([]).slots == {}


def test_a_lease_ends_once(hot):
    add(hot, "a")
    lease = hot.acquire(["a", "a"])
    hot.release(lease)
    with pytest.raises(ValueError, match=r"'a@0' .* is not held"):
        hot.release(lease)


def test_replacing_an_adapter_in_use_leaves_the_old_version_to_its_requests(hot):
    old = add(hot, "x")["x"]
    running = hot.acquire(["x"])
    new = make_adapter("x", seed=99)
    version = hot.replace("x", new)
    assert version.id > running.versions["x"].id and version.digest == new.digest
    later = hot.acquire(["x"])
    assert later.slots != running.slots
    assert_slot_is(hot.bank, running.slots["x"], old)
    assert_slot_is(hot.bank, later.slots["x"], new)
    hot.remove("x")
    with pytest.raises(KeyError, match="Loaded are: none"):
        hot.acquire(["x"])
    assert_slot_is(hot.bank, later.slots["x"], new)


def test_a_name_that_was_removed_and_loaded_anew_means_the_new_weights(hot):
    add(hot, "x")
    assert slot(hot, "x") == 0
    first = hot.remove("x")
    second = hot.add(make_adapter("x", seed=7))
    assert second.id != first.id
    assert_slot_is(hot.bank, slot(hot, "x"), make_adapter("x", seed=7))


def test_the_same_content_under_two_names_lies_in_one_slot(hot):
    hot.add(make_adapter("x", seed=1))
    hot.add(make_adapter("x", seed=1), name="alias")
    lease = hot.acquire(["x", "alias"])
    assert lease.slots == {"x": 0, "alias": 0}
    hot.release(lease)
    hot.remove("x")
    assert slot(hot, "alias") == 0


def test_a_pinned_adapter_is_not_evicted(hot):
    add(hot, "a", "b", "c")
    hot.pin("a")  # before it is in a slot
    for name in ("a", "b", "c", "b", "c"):
        slot(hot, name)
        assert hot.is_resident("a")
    with pytest.raises(ValueError, match="'b' is not pinned: 1 of 2 slots are"):
        hot.pin("b")
    with pytest.raises(ValueError, match="of which 1 are pinned"):
        hot.acquire(["b", "c"])
    hot.replace("a", make_adapter("a", seed=50))  # the pin is the name's, not the old version's
    slot(hot, "a")
    slot(hot, "b")
    assert hot.is_resident("a")
    hot.unpin("a")
    assert set(hot.acquire(["b", "c"]).slots.values()) == {0, 1}


def test_what_cannot_be_served_is_refused_by_add_and_leaves_everything_as_it_was(hot, tmp_path):
    add(hot, "a")
    slot(hot, "a")
    before = str(hot), jax.tree.map(np.array, hot.bank.stacks)
    for wrong, message in (
        (make_adapter("wide", rank=5), "rank 5 exceeds max_rank 4"),
        (make_adapter("a", seed=3), "'a' is loaded already"),
        (tmp_path / "nowhere", "no adapter at"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            hot.add(wrong)
    with pytest.raises(ValueError, match="rank 5"):
        hot.replace("a", make_adapter("wide", rank=5))
    with pytest.raises(KeyError):
        hot.replace("zz", make_adapter("zz"))
    assert str(hot) == before[0]
    jax.tree.map(np.testing.assert_array_equal, hot.bank.stacks, before[1])


def test_the_host_budget_bounds_what_is_kept():
    bank = AdapterBank(BASE, num_slots=1, max_rank=3)
    hot = HotSet(bank, host_budget=2 * bank.bytes_per_slot)
    add(hot, "a", "b")
    with pytest.raises(ValueError, match=r"3 adapters need .* more than host_budget"):
        hot.add(make_adapter("c", seed=3))
    hot.remove("a")
    hot.add(make_adapter("c", seed=3))


def test_prefetched_copies_are_used_and_nothing_recompiles(hot):
    made = add(hot, "a", "b", "c", "d")
    slot(hot, "a")
    found = []
    with count_compilations() as compiled:
        for name in ("b", "c", "d", "a"):
            hot.prefetch([name])
            assert list(hot._transfers) == [made[name].digest]
            found.append((name, slot(hot, name)))
            assert not hot._transfers
    assert not compiled
    for name, place in found[-2:]:
        assert_slot_is(hot.bank, place, made[name])
    hot.prefetch(["b"])
    hot.replace("b", made["a"])  # the copy of the old version is not what b means now
    assert_slot_is(hot.bank, slot(hot, "b"), made["a"])


def test_copies_that_nobody_came_for_are_given_up():
    hot = HotSet(AdapterBank(BASE, num_slots=2, max_rank=4))
    made = add(hot, "a", "b", "c")
    hot.prefetch(["a", "b", "c"])  # each takes a slot's bytes beside the bank
    assert list(hot._transfers) == [made["b"].digest, made["c"].digest]
    assert_slot_is(hot.bank, slot(hot, "a"), made["a"])


def test_names_change_in_other_threads_while_leases_come_and_go(hot):
    made = [make_adapter("x", seed=seed) for seed in range(6)]
    hot.add(made[0])
    digests, stop, failed = {each.digest: each for each in made}, threading.Event(), []

    def swap():
        try:
            at = 0
            while not stop.is_set():
                at = (at + 1) % 6
                hot.replace("x", made[at])
                hot.prefetch(["x"])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=swap) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            lease = hot.acquire(["x"])
            assert_slot_is(hot.bank, lease.slots["x"], digests[lease.versions["x"].digest])
            hot.release(lease)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


# The bank below it.


def test_a_full_bank_is_warmed_up_too_and_stays_as_it_is():
    bank = AdapterBank(BASE, num_slots=2, max_rank=2)  # of a size that no other test compiles
    first, second = (make_adapter(name, rank=2, seed=at) for at, name in enumerate("ab"))
    bank.load(first)
    bank.load(second)
    assert len(bank.layers) == BASE.num_layers
    bank.warm_up()
    third = bank.stage(make_adapter("c", rank=2, seed=9))
    with count_compilations() as compiled:
        bank.load(third, evict=True)
    assert not compiled
    assert_slot_is(bank, 0, make_adapter("c", rank=2, seed=9))
    bank.warm_up()
    assert_slot_is(bank, 0, make_adapter("c", rank=2, seed=9))
    assert_slot_is(bank, 1, second)


def test_slots_in_use_refuse_unload_and_replace():
    bank = AdapterBank(BASE, num_slots=1, max_rank=4)
    bank.load(make_adapter("a", seed=1))
    held = bank.hold("a")
    bank.hold("a")
    for change in (lambda: bank.unload("a"), lambda: bank.replace("a", make_adapter(seed=2))):
        with pytest.raises(SlotInUse, match="'a' in slot 0 is in use by 2 requests"):
            change()
    with pytest.raises(BankFull, match="each is held by a request or pinned"):
        bank.load(make_adapter("b", seed=2), evict=True)
    assert_slot_is(bank, 0, make_adapter("a", seed=1))
    bank.release(held)
    bank.release(held)
    assert bank.holds("a") == 0
    bank.pin("a")
    with pytest.raises(BankFull):
        bank.load(make_adapter("b", seed=2), evict=True)
    bank.unpin("a")
    with pytest.raises(BankFull, match="Unload or replace one"):
        bank.load(make_adapter("b", seed=2))
    bank.load(make_adapter("b", seed=2), evict=True)
    assert_slot_is(bank, 0, make_adapter("b", seed=2))
    with pytest.raises(ValueError, match="is not held"):
        bank.release(held)


def test_capacity_by_memory_budget():
    one = AdapterBank(BASE, num_slots=1, max_rank=3).bytes_per_slot
    bank = AdapterBank(BASE, memory_budget=3 * one + one // 2, max_rank=3)
    assert bank.num_slots == 3
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(bank.stacks)) == 3 * one
    with pytest.raises(ValueError, match="one slot of rank 3 in float32 takes"):
        AdapterBank(BASE, memory_budget=one - 1, max_rank=3)
    for wrong in ({}, {"num_slots": 1, "memory_budget": one}):
        with pytest.raises(ValueError, match="give one of them"):
            AdapterBank(BASE, max_rank=3, **wrong)


def test_a_staged_adapter_fits_the_bank_it_was_staged_for():
    bank, other = (AdapterBank(BASE, num_slots=1, max_rank=rank) for rank in (3, 4))
    staged = bank.stage(make_adapter("a"))
    with pytest.raises(ValueError, match="staged for a bank of other sizes"):
        other.load(staged)
    assert bank.load(staged, name="b", transferred=staged.transfer()).name == "b"
    assert_slot_is(bank, 0, make_adapter("a"))


def test_the_arrays_of_each_layer_are_written_along():
    bank = AdapterBank(BASE, num_slots=2, max_rank=4)
    bank.load(make_adapter("before", seed=1))

    def in_step():
        stacked = jax.tree.map(lambda *parts: np.stack(parts), *bank.layers)
        jax.tree.map(np.testing.assert_array_equal, stacked, bank.stacks)

    assert len(bank.layers) == BASE.num_layers
    in_step()
    bank.load(make_adapter("wide", rank=4, seed=2))
    in_step()
    bank.replace("before", make_adapter("narrow", projections=("q_proj",), rank=1, seed=3))
    in_step()
    bank.unload("wide")
    in_step()
