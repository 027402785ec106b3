"""Composition: columns follow their adapters, and a saved folder gives back the same numbers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import (
    Adapter,
    AdapterBank,
    Composition,
    composition,
    load_adapter,
    save_adapter,
)
from molora_jax.models import load_base
from molora_jax.routing import LearnedRouter, VocabularyRouter
from tests.adapters.make import arrays_for, modules_of

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-random")


@pytest.fixture(scope="module")
def adapters(base):
    """Three of different ranks and targets."""
    made = []
    targets = [("q_proj", "up_proj"), ("down_proj",), ("v_proj", "o_proj", "k_proj")]
    for seed, (name, projections) in enumerate(zip(NAMES, targets, strict=True), start=1):
        modules = modules_of(base.config, projections)
        arrays = arrays_for(modules, seed, seed=seed, config=base.config)
        made.append(Adapter.from_arrays(name, arrays, alpha=1, num_layers=base.config.num_layers))
    return made


def learned_router(base, columns=3):
    return LearnedRouter(
        base.config.hidden_size, columns, top_k=2, num_layers=base.config.num_layers,
        rngs=nnx.Rngs(7),
    )  # fmt: skip


def compose(base, adapters, router, order=(2, 0, 1), **fields):
    """The adapters in an order of slots that is not that of the columns."""
    bank = AdapterBank(base.config, num_slots=4, max_rank=4)
    for slot, index in enumerate(order):
        bank.load(adapters[index], slot=slot)
    return Composition(
        base_name=base.name,
        base_digest=base.digest,
        bank=bank,
        router=router,
        column_digests=[adapter.digest for adapter in adapters],
        **fields,
    )


@pytest.fixture
def learned(base, adapters):
    metrics = {"nll": 2.5, "bad": float("nan")}
    return compose(base, adapters, learned_router(base), labels_used=True, metrics=metrics)


@jax.jit
def forward(decoder, stacks, router, column_to_slot):
    tokens = jnp.asarray([[1, 2, 3, 5, 8, 13, 21], [34, 55, 89, 144, 200, 201, 202]], jnp.int32)
    out = decoder(
        tokens, adapters=stacks, router=router, column_to_slot=column_to_slot, strategy="reference"
    )
    return decoder.logits(out.hidden), out.routing.adapter_ids


def logits(base, made, column_to_slot=None):
    """Logits and slots of a fixed batch; `column_to_slot` other than the composition's own."""
    columns = (
        made.column_to_slot if column_to_slot is None else np.asarray(column_to_slot, np.int32)
    )
    return map(np.asarray, forward(base.decoder, made.bank.stacks, made.router, columns))


def test_columns_are_found_where_their_adapters_lie(learned):
    np.testing.assert_array_equal(learned.column_to_slot, [1, 2, 0])
    assert learned.column_to_slot.dtype == np.int32
    assert learned.column_names == NAMES


def test_a_column_never_comes_to_mean_another_adapter(learned, adapters):
    learned.bank.unload("a")
    np.testing.assert_array_equal(learned.column_to_slot, [-1, 2, 0])
    stranger = Adapter("a", dict([*adapters[0].modules.items()][:1]), adapters[0].config)
    learned.bank.load(stranger, slot=1)  # the old name in the old slot, with other weights
    np.testing.assert_array_equal(learned.column_to_slot, [-1, 2, 0])
    assert learned.column_names == (None, "b", "c")
    learned.bank.load(adapters[0], name="again", slot=3)
    np.testing.assert_array_equal(learned.column_to_slot, [3, 2, 0])
    assert learned.column_names == ("again", "b", "c")


def test_absent_column_is_never_chosen(base, learned):
    _, present = logits(base, learned)
    assert (present == 1).any()
    learned.bank.unload("a")
    _, absent = logits(base, learned)
    assert not (absent == 1).any()
    assert set(np.unique(absent)) == {0, 2}


def test_saved_and_loaded_it_gives_the_same_numbers(tmp_path, base, learned):
    expected, choice = logits(base, learned)
    again = Composition.load(learned.save(tmp_path / "mix"), base)
    actual, same = logits(base, again)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(same, choice)
    jax.tree.map(np.testing.assert_array_equal, again.bank.stacks, learned.bank.stacks)
    plain, nowhere = logits(base, learned, [-1, -1, -1])
    assert (nowhere == -1).all()
    assert not np.allclose(expected, plain)
    assert [each.name for each in again.bank.list()] == ["c", "a", "b"]
    assert again.column_digests == learned.column_digests
    assert again.labels_used is True
    assert again.metrics == {"nll": 2.5, "bad": None}
    assert (again.base_name, again.base_digest) == (base.name, base.digest)
    assert again.bank.num_slots == 4
    assert again.bank.dtype == np.float32


def test_folder_holds_plain_peft_folders_beside_the_router(tmp_path, base, learned, adapters):
    path = learned.save(tmp_path / "mix")
    assert sorted(each.name for each in path.iterdir()) == [
        "adapters", "molora.json", "router.safetensors",
    ]  # fmt: skip
    for adapter in adapters:
        assert load_adapter(path / "adapters" / adapter.name)[0].digest == adapter.digest


def test_vocabulary_router_is_saved_with_its_table(tmp_path, base, adapters):
    router = VocabularyRouter.from_ranges(
        [(0, 50, 2), (100, 260, 0)], vocab_size=base.config.vocab_size, num_columns=3
    )
    made = compose(base, adapters, router)
    again = Composition.load(made.save(tmp_path / "mix"), base)
    np.testing.assert_array_equal(again.router.table[...], router.table[...])
    np.testing.assert_array_equal(again.column_to_slot, made.column_to_slot)
    assert again.router.num_columns == 3
    assert again.labels_used is None


def test_number_of_columns_is_checked(base, adapters):
    with pytest.raises(ValueError, match="router has 2 columns and column_digests 3"):
        compose(base, adapters, learned_router(base, columns=2))


def test_saving_without_a_column_s_adapter_is_refused(tmp_path, learned):
    learned.bank.unload("b")
    with pytest.raises(ValueError, match=r"adapter of column 1 \(sha256:"):
        learned.save(tmp_path / "mix")
    assert list(tmp_path.iterdir()) == []


def test_diverged_router_is_neither_saved_nor_loaded(tmp_path, base, learned, monkeypatch):
    learned.router.b_out[...] = learned.router.b_out[...].at[2, 1].set(jnp.nan)
    with pytest.raises(ValueError, match=r"router has NaN .* b_out \(1 values\)"):
        learned.save(tmp_path / "mix")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(composition, "_check_router", lambda arrays: None)
    learned.save(tmp_path / "mix")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="router has NaN"):
        Composition.load(tmp_path / "mix", base)


# An adapter that is gone or changed is an error, and never the base in silence.
@pytest.mark.parametrize("how", ["gone", "changed", "cut"])
def test_missing_adapter_is_an_error_unless_allowed(tmp_path, base, learned, adapters, how):
    path = learned.save(tmp_path / "mix")
    folder = path / "adapters" / "b"
    if how == "gone":
        folder.rename(tmp_path / "elsewhere")
    elif how == "changed":
        save_adapter(dataclasses.replace(adapters[2], name="b"), folder, overwrite=True)
    else:
        (folder / "adapter_model.safetensors").write_bytes(b"")
    message = {"gone": "no adapter at", "changed": "'b' is not the one", "cut": "cut short"}[how]
    with pytest.raises(ValueError, match=f"{message}.*column 1 .*allow_missing=True"):
        Composition.load(path, base)
    again = Composition.load(path, base, allow_missing=True)
    np.testing.assert_array_equal(again.column_to_slot, [1, -1, 0])


def edit(path, change):
    file = path / "molora.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    return path


def test_column_without_an_adapter_in_the_record_is_an_error(tmp_path, base, learned):
    path = edit(learned.save(tmp_path / "mix"), lambda r: r["columns"].__setitem__(0, "0" * 64))
    with pytest.raises(ValueError, match=r"column 0 .* has no adapter"):
        Composition.load(path, base)


def test_other_base_is_refused_unless_allowed(tmp_path, base, learned):
    path = learned.save(tmp_path / "mix")
    other = dataclasses.replace(base, name="other", digest="f" * 64)
    with pytest.raises(ValueError, match=r"made for the base 'tiny-random' .* not for 'other'"):
        Composition.load(path, other)
    assert Composition.load(path, other, allow_other_base=True).base_digest == "f" * 64


def test_private_path_of_the_base_is_not_saved(tmp_path, learned):
    learned.base_name = "/home/somebody/secret/model"
    assert "secret" not in (learned.save(tmp_path / "mix") / "molora.json").read_text()


def test_record_of_another_version_is_refused(tmp_path, base, learned):
    path = edit(learned.save(tmp_path / "mix"), lambda r: r.update(format_version=2))
    with pytest.raises(ValueError, match="format_version is 2; this version reads 1"):
        Composition.load(path, base)
    with pytest.raises(FileNotFoundError, match=r"with molora\.json"):
        Composition.load(tmp_path, base)


def test_record_cannot_lead_out_of_its_folder(tmp_path, base, learned, adapters, monkeypatch):
    save_adapter(adapters[0], tmp_path / "outside")
    path = learned.save(tmp_path / "mix")
    edit(path, lambda r: r.update(adapters=[{**r["adapters"][1], "name": "../../outside"}]))
    monkeypatch.setattr(composition, "load_adapter", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(ValueError, match="is not usable"):
        Composition.load(path, base)


def test_failed_save_leaves_the_old_folder(tmp_path, base, learned, monkeypatch):
    path = learned.save(tmp_path / "mix")

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(composition, "write_adapter", broken)
    with pytest.raises(OSError, match="disk full"):
        learned.save(path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["mix"]
    Composition.load(path, base)
