"""The bank: right content in every slot, nothing stale, nothing half done, nothing recompiled."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from molora_jax.adapters import PROJECTIONS, Adapter, AdapterBank, LoraPair, load_adapter
from molora_jax.adapters.lora_describe import new_config
from molora_jax.compilations import count_compilations
from tests.adapters.make import (
    BASE,
    arrays_for,
    bank_delta,
    dense_delta,
    make_adapter,
    modules_of,
    peft_tensors,
    write_peft,
)


def make_bank(**changes):
    return AdapterBank(BASE, **{"num_slots": 3, "max_rank": 5, **changes})


def snapshot(bank):
    return jax.tree.map(np.array, bank.stacks), bank.list(), str(bank)


def assert_unchanged(bank, before):
    stacks, occupants, text = before
    jax.tree.map(np.testing.assert_array_equal, bank.stacks, stacks)
    assert bank.list() == occupants
    assert str(bank) == text


def assert_slot_is(bank, slot, adapter):
    """Each module's update is the adapter's own, and all else in the slot is exactly zero."""
    for module in modules_of():
        _, layer, _, projection = module.split(".")
        pair = adapter.modules.get(module) if adapter else None
        stack = jax.tree.map(
            lambda leaf, i=int(layer): np.asarray(leaf[i]), bank.stacks[projection]
        )
        rank = pair.rank if pair else 0
        assert stack.ranks[slot] == rank
        assert not stack.lora_a[slot, rank:].any()
        assert not stack.lora_b[slot, rank:].any()
        if pair:
            expected = dense_delta(pair.a, pair.b, pair.scale)
            np.testing.assert_allclose(
                bank_delta(bank, slot, module), expected, rtol=1e-4, atol=1e-5
            )
            assert np.abs(expected).max() > 0.1


def test_stacks_have_the_promised_shapes():
    bank = make_bank()
    assert tuple(bank.stacks) == PROJECTIONS
    stack = bank.stacks["o_proj"]
    assert stack.lora_a.shape == (3, 3, 5, 12)
    assert stack.lora_b.shape == (3, 3, 5, 10)
    assert stack.ranks.shape == (3, 3)
    assert stack.ranks.dtype == jnp.int32


def test_mixed_ranks_projections_and_scales_share_a_bank():
    bank = make_bank()
    adapters = [
        make_adapter("all", rank=5, alpha=10, seed=1),
        make_adapter(
            "attention", projections=("q_proj", "o_proj"), rank=2, use_rslora=True, seed=2
        ),
        Adapter.from_arrays(
            "ragged",
            arrays_for(
                ["layers.0.self_attn.v_proj", "layers.2.mlp.down_proj"],
                {"layers.0.self_attn.v_proj": 1, "layers.2.mlp.down_proj": 4},
                seed=3,
            ),
            alpha=3,
        ),
    ]
    reports = [bank.load(adapter) for adapter in adapters]
    assert [report.slot for report in reports] == [0, 1, 2]
    for slot, adapter in enumerate(adapters):
        assert_slot_is(bank, slot, adapter)


# One scale, whichever way the adapter is used.
def test_rslora_scale_survives_the_bank(tmp_path):
    tensors = peft_tensors(arrays_for(modules_of(projections=("q_proj",)), 16))
    path = write_peft(
        tmp_path / "rs", tensors, r=16, lora_alpha=32, target_modules=("q_proj",), use_rslora=True,
        alpha_pattern={"layers.1.self_attn.q_proj": 8},
    )  # fmt: skip
    bank = make_bank(max_rank=16)
    bank.load(path)
    for layer, scale in enumerate((8.0, 2.0, 8.0)):
        module = f"layers.{layer}.self_attn.q_proj"
        a = tensors[f"base_model.model.model.{module}.lora_A.weight"]
        b = tensors[f"base_model.model.model.{module}.lora_B.weight"]
        np.testing.assert_allclose(
            bank_delta(bank, 0, module), dense_delta(a, b, scale), rtol=1e-4, atol=1e-5
        )


def test_folding_happens_once_and_leaves_the_adapter_alone():
    adapter = make_adapter(alpha=30.0)
    module = "layers.1.mlp.up_proj"
    b = adapter.modules[module].b.copy()
    for name in ("one", "two"):
        bank = make_bank()
        bank.load(adapter, name=name)
        stored = np.asarray(bank.stacks["up_proj"].lora_b[1, 0, :3])
        np.testing.assert_array_equal(stored, (b * np.float32(10)).T)
    np.testing.assert_array_equal(adapter.modules[module].b, b)


# A slot keeps nothing of its last tenant.
@pytest.mark.parametrize("way", ["unload and load", "replace"])
def test_reused_slot_equals_a_fresh_one(way):
    wide = make_adapter("wide", rank=5, seed=1)
    narrow = make_adapter("narrow", projections=("q_proj",), rank=2, seed=2)
    bank, fresh = make_bank(), make_bank()
    bank.load(wide)
    if way == "replace":
        bank.replace("wide", narrow, name="narrow")
    else:
        bank.unload("wide")
        bank.load(narrow)
    fresh.load(narrow)
    jax.tree.map(np.testing.assert_array_equal, bank.stacks, fresh.stacks)
    assert_slot_is(bank, 0, narrow)


def test_unload_empties_the_slot_and_only_that():
    bank = make_bank()
    first, second = make_adapter("first", seed=1), make_adapter("second", seed=2)
    bank.load(first)
    bank.load(second)
    assert bank.unload("first") == 0
    assert_slot_is(bank, 0, None)
    assert_slot_is(bank, 1, second)
    assert bank.load(make_adapter("third", seed=3)).slot == 0


# Identity is the content, a name is a label.
def test_same_name_with_new_weights_is_served_at_once(tmp_path):
    bank = make_bank()
    path = tmp_path / "x"
    old = bank.load(write_peft(path, peft_tensors(arrays_for(modules_of(), seed=1))))
    bank.unload("x")
    new = bank.load(write_peft(path, peft_tensors(arrays_for(modules_of(), seed=2))))
    assert_slot_is(bank, 0, load_adapter(path)[0])
    assert old.digest != new.digest
    with pytest.raises(KeyError):
        bank.slot_of(old.digest)


def test_ids_are_never_used_twice():
    bank = make_bank()
    seen = []
    for seed in range(4):
        bank.load(make_adapter("x", seed=seed))
        seen.append(bank.occupant("x").id)
        bank.replace("x", make_adapter("y", seed=10 + seed))
        seen.append(bank.occupant("x").id)
        bank.unload("x")
    assert len(set(seen)) == 8


def test_replace_updates_under_the_same_name_or_another():
    bank = make_bank()
    bank.load(make_adapter("a", seed=1))
    bank.load(make_adapter("b", seed=2))
    assert bank.replace("b", make_adapter("other", seed=3)).name == "b"
    assert bank.replace("b", make_adapter(seed=4), name="c").slot == 1
    assert [each.name for each in bank.list()] == ["a", "c"]
    assert_slot_is(bank, 1, make_adapter(seed=4))
    bank.replace("c", make_adapter(seed=4))  # the same content again is no conflict with itself


def test_lookup_by_name_or_digest_with_near_names():
    bank = make_bank()
    report = bank.load(make_adapter("physics"))
    assert bank.slot_of("physics") == bank.slot_of(report.digest) == 0
    assert bank.inspect("physics") == report
    with pytest.raises(KeyError, match="Did you mean 'physics'"):
        bank.slot_of("phisics")
    with pytest.raises(KeyError, match="no adapter 'zzz'"):
        bank.unload("zzz")


def test_columns_follow_digests():
    bank = make_bank()
    adapters = [make_adapter(name, seed=seed) for seed, name in enumerate("abc")]
    digests = [adapter.digest for adapter in adapters]
    bank.load(adapters[2])
    bank.load(adapters[0])
    columns = bank.column_to_slot(digests)
    assert columns.dtype == np.int32
    np.testing.assert_array_equal(columns, [1, -1, 0])


# A load that fails leaves the bank bit for bit as it was.
def failing_loads():
    other = {"layers.0.mlp.up_proj": (np.ones((2, 11), np.float32), np.ones((7, 2), np.float32))}
    broken = arrays_for(modules_of())
    broken["layers.0.mlp.up_proj"][0][1, 1] = np.inf
    return {
        "rank": (make_adapter("new", rank=6), r"rank 6 exceeds max_rank 5 .*max_rank=6 \(\+.* KiB"),
        "layer": (
            Adapter.from_arrays(
                "new", {"layers.3.mlp.up_proj": other["layers.0.mlp.up_proj"]}, alpha=1
            ),
            "layer 3",
        ),
        "size": (Adapter.from_arrays("new", other, alpha=1), r"needs \(r, 10\)"),
        "nonfinite": (Adapter.from_arrays("new", broken, alpha=1), r"up_proj\.lora_A \(1 values\)"),
        "name": (make_adapter("here", seed=5), r"in slot 1. Use replace\('here'"),
        "content": (make_adapter("new", seed=1), "same content as 'here' in slot 1"),
    }


@pytest.mark.parametrize("case", ["rank", "layer", "size", "nonfinite", "name", "content"])
def test_failed_load_changes_nothing(case):
    adapter, message = failing_loads()[case]
    bank = make_bank()
    bank.load(make_adapter("here", seed=1), slot=1)
    before = snapshot(bank)
    with pytest.raises(ValueError, match=message):
        bank.load(adapter)
    assert_unchanged(bank, before)
    if case not in ("name", "content"):
        with pytest.raises(ValueError, match=message):
            bank.replace("here", adapter)
        assert_unchanged(bank, before)


def test_projection_that_the_bank_lacks_is_refused():
    bank = make_bank(projections=["v_proj", "q_proj"])
    assert bank.projections == ("q_proj", "v_proj")
    before = snapshot(bank)
    with pytest.raises(ValueError, match=r"adapts up_proj, which .*'q_proj', 'v_proj', 'up_proj'"):
        bank.load(make_adapter(projections=("q_proj", "up_proj")))
    assert_unchanged(bank, before)


def test_full_bank_lists_who_is_in_it():
    bank = make_bank(num_slots=2)
    bank.load(make_adapter("a", seed=1))
    bank.load(make_adapter("b", seed=2))
    before = snapshot(bank)
    with pytest.raises(ValueError, match=r"full \(2 slots: 0: 'a', 1: 'b'\)"):
        bank.load(make_adapter("c", seed=3))
    with pytest.raises(ValueError, match=r"slot 1 holds 'b'. Use replace\('b'"):
        bank.load(make_adapter("c", seed=3), slot=1)
    with pytest.raises(ValueError, match=r"slots 0\.\.1"):
        bank.load(make_adapter("c", seed=3), slot=2)
    assert_unchanged(bank, before)


@pytest.mark.parametrize(
    "wrong",
    [{"num_slots": 0}, {"max_rank": True}, {"projections": []}, {"projections": "q_proj"},
     {"projections": ["qproj"]}, {"dtype": jnp.int32}],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
        make_bank(**wrong)


def test_bytes_per_slot_is_what_the_device_holds():
    bank = make_bank(dtype=jnp.bfloat16)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(bank.stacks))
    assert held == bank.num_slots * bank.bytes_per_slot
    assert "KiB a slot" in str(bank)


# One dtype for the bank, whatever the files hold and in whichever order they come.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtype_does_not_depend_on_the_order_of_loading(dtype):
    arrays = {"half": ml_dtypes.bfloat16, "full": np.float32}
    adapters = {
        name: Adapter.from_arrays(name, arrays_for(modules_of(), seed=1, dtype=kind), alpha=6)
        for name, kind in arrays.items()
    }
    banks = []
    for order in (("half", "full"), ("full", "half")):
        bank = make_bank(dtype=dtype)
        for name in order:
            report = bank.load(adapters[name], slot=list(arrays).index(name))
            assert report.bank_dtype == jnp.dtype(dtype).name
        banks.append(bank)
    jax.tree.map(np.testing.assert_array_equal, banks[0].stacks, banks[1].stacks)
    stack = banks[0].stacks["up_proj"]
    assert stack.lora_a.dtype == stack.lora_b.dtype == dtype
    pair = adapters["full"].modules["layers.0.mlp.up_proj"]
    folded = (pair.b * np.float32(pair.scale)).astype(dtype).T
    np.testing.assert_array_equal(np.asarray(stack.lora_b[0, 1, :3]), folded)


def test_overflow_of_the_bank_dtype_is_refused():
    module = "layers.0.mlp.up_proj"
    arrays = {module: (np.ones((1, 10), np.float32), np.full((7, 1), 6e4, np.float32))}
    bank = make_bank(dtype=jnp.float16)
    before = snapshot(bank)
    with pytest.raises(ValueError, match="overflows float16"):
        bank.load(Adapter.from_arrays("big", arrays, alpha=2))
    assert_unchanged(bank, before)


# One trace of the step, and one program that writes slots, for any sequence of loads.
def test_loading_unloading_and_swapping_recompile_nothing():
    bank = make_bank(num_slots=4, max_rank=5)
    traces = []

    @jax.jit
    def step(stacks, slot):
        traces.append(slot)
        per_layer = [
            jnp.einsum("lrd,lrf->l", stack.lora_a[:, slot], stack.lora_b[:, slot])
            for stack in stacks.values()
        ]
        return sum(per_layer)

    def expected(adapter):
        sums = [0.0] * BASE.num_layers
        for module, pair in adapter.modules.items():
            layer = int(module.split(".")[1])
            sums[layer] += pair.scale * float((pair.a.sum(axis=1) * pair.b.sum(axis=0)).sum())
        return sums

    def check(adapter, slot):
        np.testing.assert_allclose(step(bank.stacks, slot), expected(adapter), rtol=1e-3, atol=1e-3)

    targets = [PROJECTIONS, ("q_proj",), ("down_proj", "k_proj"), PROJECTIONS[:4], PROJECTIONS[4:]]
    adapters = [
        make_adapter(f"a{rank}", projections=names, rank=rank, seed=rank)
        for rank, names in enumerate(targets, start=1)
    ]
    bank.load(adapters[0])
    check(adapters[0], 0)
    with count_compilations() as compiled:
        for slot, adapter in enumerate(adapters[1:4], start=1):
            bank.load(adapter)
            check(adapter, slot)
        bank.unload("a2")
        bank.load(adapters[4])
        check(adapters[4], 1)
        bank.replace("a1", adapters[1], name="a2")
        check(adapters[1], 0)
        check(adapters[3], 3)
    assert compiled == []
    assert len(traces) == 1


def test_folders_of_every_rank_and_spelling_are_loaded_without_compiling(tmp_path):
    folders = []
    for number, projections in enumerate([("q_proj",), ("k_proj", "down_proj"), PROJECTIONS]):
        tensors = peft_tensors(arrays_for(modules_of(projections=projections), number + 1))
        if number == 1:
            tensors = {k.replace("model.model.", "model."): v for k, v in tensors.items()}
        folders.append(
            write_peft(
                tmp_path / str(number), tensors, r=number + 1, target_modules=projections,
                use_rslora=number == 2, alpha_pattern={"layers.1": 3, "q_proj": 5},
            )
        )  # fmt: skip
    make_bank().load(make_adapter("first"))  # compiles what writes a slot of this shape
    bank = make_bank()
    with count_compilations() as compiled:
        for folder in folders:
            bank.load(folder)
        bank.replace("0", folders[0], name="again")
        bank.unload("1")
        jax.block_until_ready(bank.stacks)
    assert compiled == []


def test_slots_are_written_in_place():
    bank = make_bank()
    bank.load(make_adapter("a", seed=1))
    stale = bank.stacks
    places = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), stale)
    bank.load(make_adapter("b", seed=2))
    assert jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), bank.stacks) == places
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(stale))


def test_scale_is_the_pair_s_own_and_never_recomputed():
    adapter = make_adapter(projections=("q_proj",), rank=2)
    pairs = {m: LoraPair(pair.a, pair.b, 0.125) for m, pair in adapter.modules.items()}
    config = new_config(
        dict.fromkeys(pairs, 2), alpha=99, use_rslora=False, base_name=None, num_layers=3
    )
    bank = make_bank()
    bank.load(Adapter("odd", pairs, config))
    assert bank.inspect("odd").scales == {"q_proj": (0.125,)}
    assert_slot_is(bank, 0, Adapter("odd", pairs, config))


def test_report_of_a_resident_is_kept(tmp_path):
    bank = make_bank()
    path = write_peft(tmp_path / "sql", peft_tensors(arrays_for(modules_of())), lora_dropout=0.1)
    report = bank.load(path, name="mine", slot=2)
    assert (report.slot, report.name) == (2, "mine")
    assert bank.inspect("mine") is report
    assert report.notes == ("without effect on the result: lora_dropout",)
    assert "in slot 2" in str(report)
    assert (
        dataclasses.replace(report, slot=None, bank_dtype=None)
        == load_adapter(path, name="mine")[1]
    )


@pytest.mark.parametrize(("dtype", "tiny"), [(jnp.float16, 1e-9), (jnp.bfloat16, 1e-41)])
def test_a_module_that_would_vanish_in_the_banks_dtype_is_refused(dtype, tiny):
    arrays = arrays_for(modules_of(projections=("q_proj", "up_proj")), seed=4)
    module = "layers.1.mlp.up_proj"
    arrays[module] = (arrays[module][0], np.full_like(arrays[module][1], tiny))
    adapter = Adapter.from_arrays("faint", arrays, alpha=3)
    bank = make_bank(dtype=dtype)
    before = snapshot(bank)
    said = rf"'faint': lora_B of {module}.* all zero in {jnp.dtype(dtype).name}.*dtype=float32"
    with pytest.raises(ValueError, match=said):
        bank.load(adapter)
    assert_unchanged(bank, before)
    make_bank().load(adapter)
    arrays[module] = (arrays[module][0], 0 * arrays[module][1])  # meant to change nothing
    bank.load(Adapter.from_arrays("zero", arrays, alpha=3))


def test_a_bank_that_knows_its_base_warns_of_an_adapter_of_another(tmp_path, caplog):
    tensors = peft_tensors(arrays_for(modules_of()))
    path = write_peft(tmp_path / "sql", tensors, base_model_name_or_path="org/one")
    for name in ("one", "org/one@v2"):
        assert make_bank(base_name=name).load(path).warnings == ()
    report = make_bank(base_name="org/two").load(path)
    assert report.warnings == ("trained on org/one, used with org/two",)
    assert "trained on org/one, used with org/two" in caplog.text
