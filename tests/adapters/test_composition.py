"""Composition: columns follow their adapters, and a saved folder gives back the same numbers."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from molora_jax.adapters import (
    Adapter,
    AdapterBank,
    Composition,
    composition,
    load_adapter,
    save_adapter,
)
from molora_jax.adapters.composition_record import seal
from molora_jax.models import load_base
from molora_jax.routing import LearnedRouter, VocabularyRouter
from tests.adapters.make import arrays_for, modules_of
from tests.helpers import unchecked_shapes

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


def test_a_column_may_wait_for_an_adapter(tmp_path, base, adapters, learned):
    digests = [*(each.digest for each in adapters), ""]
    router = learned_router(base, columns=4)
    roomy = dataclasses.replace(learned, router=router, column_digests=digests)
    again = Composition.load(roomy.save(tmp_path / "c"), base)
    assert again.column_digests == tuple(digests)
    assert list(again.column_to_slot) == [*learned.column_to_slot, -1]


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
    monkeypatch.setattr(composition, "check_router", lambda arrays: None)
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
    message = {"gone": "no adapter at", "changed": "'b' is not the one", "cut": "is empty"}[how]
    with pytest.raises(ValueError, match=f"{message}.*column 1 .*allow_missing=True"):
        Composition.load(path, base)
    again = Composition.load(path, base, allow_missing=True)
    np.testing.assert_array_equal(again.column_to_slot, [1, -1, 0])


def edit(path, change, *, sealed=False):
    """Changes the record; `sealed` as if it had been saved so."""
    file = path / "molora.json"
    record = json.loads(file.read_text())
    change(record)
    if sealed:
        record["sha256"] = seal(record, load_file(path / "router.safetensors"))
    file.write_text(json.dumps(record))
    return path


def test_column_without_an_adapter_in_the_record_is_an_error(tmp_path, base, learned):
    path = learned.save(tmp_path / "mix")
    edit(path, lambda r: r["columns"].__setitem__(0, "0" * 64), sealed=True)
    with pytest.raises(ValueError, match=r"column 0 .* has no adapter"):
        Composition.load(path, base)


def test_other_base_is_refused_unless_allowed(tmp_path, base, learned):
    path = learned.save(tmp_path / "mix")
    other = dataclasses.replace(base, name="other", digest="f" * 64)
    with pytest.raises(ValueError, match=r"made for the base 'tiny-random' .* not for 'other'"):
        Composition.load(path, other)
    assert Composition.load(path, other, allow_other_base=True).base_digest == "f" * 64


def test_without_a_base_the_one_of_the_record_is_loaded(tmp_path, base, learned):
    expected, _ = logits(base, learned)
    again = Composition.load(learned.save(tmp_path / "mix"))
    assert (again.base_name, again.base_digest) == ("tiny-random", base.digest)
    assert again.bank.base_name == "tiny-random"
    np.testing.assert_array_equal(next(logits(base, again)), expected)


def test_private_path_of_the_base_is_not_saved(tmp_path, base, learned):
    learned.base_name = "/home/somebody/secret/model"
    path = learned.save(tmp_path / "mix")
    record = (path / "molora.json").read_text()
    assert "secret" not in record
    assert json.loads(record)["base"]["name"] is None
    with pytest.raises(ValueError, match=r"which is not saved .* Pass base=load_base\(PATH\)"):
        Composition.load(path)
    assert Composition.load(path, base).base_name == base.name
    # Nor is a path followed that somebody wrote into the record.
    edit(path, lambda r: r["base"].update(name="../elsewhere/model"), sealed=True)
    with pytest.raises(ValueError, match="which is not saved"):
        Composition.load(path)


def test_the_base_of_another_size_is_refused_before_the_first_step(tmp_path, base, learned):
    path = learned.save(tmp_path / "mix")
    config = dataclasses.replace(base.config, num_layers=base.config.num_layers - 1)
    other = dataclasses.replace(base, config=config, digest="f" * 64)
    with pytest.raises(ValueError, match=r"router's num_layers is .*trained for another base"):
        Composition.load(path, other, allow_other_base=True)


def test_an_adapter_of_another_base_is_warned_of(tmp_path, base, adapters, caplog):
    config = {**adapters[0].config, "base_model_name_or_path": "org/other"}
    stranger = dataclasses.replace(adapters[0], config=config)
    made = compose(base, [stranger, *adapters[1:]], learned_router(base))
    path = made.save(tmp_path / "mix")
    caplog.clear()
    Composition.load(path, base)
    assert "trained on org/other, used with tiny-random" in caplog.text


def test_record_of_another_version_is_refused(tmp_path, base, learned):
    path = edit(learned.save(tmp_path / "mix"), lambda r: r.update(format_version=1))
    with pytest.raises(ValueError, match="format_version is 1; this version reads 2"):
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


# An edited or damaged record: one line that names the field and what stood there.
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r.pop("columns"), "lacks columns"),
        (lambda r: r.update(format_version=True), "format_version is True"),
        (lambda r: r.update(colums=[]), r"unknown field 'colums' \(did you mean 'columns'"),
        (lambda r: r.update(base=None), "base is None; expected an object"),
        (lambda r: r["base"].pop("sha256"), "base lacks sha256"),
        (lambda r: r["base"].update(sha256="0" * 63), "base.'sha256'. is '000.*64 hexadecimal"),
        (lambda r: r["base"].update(name=7), "base.'name'. is 7; expected a text or null"),
        (lambda r: r.update(bank=[]), "bank is .*; expected an object"),
        (
            lambda r: r["bank"].update(num_slots="4"),
            "bank.'num_slots'. is '4'; expected",
        ),
        (lambda r: r["bank"].update(num_slots=0), "bank.'num_slots'. is 0; expected an integer"),
        (lambda r: r["bank"].update(num_slots=10**9), "bank.'num_slots'. is 1000000000"),
        (lambda r: r["bank"].update(max_rank=True), "bank.'max_rank'. is True"),
        (lambda r: r["bank"].update(max_rank=4.0), r"bank.'max_rank'. is 4\.0"),
        (lambda r: r["bank"].update(dtype="int8"), "bank.'dtype'. is 'int8'; expected one of"),
        (lambda r: r["bank"].update(projections=["q"]), "bank.'projections'. is .*'q'"),
        (lambda r: r["bank"].update(projections=[]), "bank.'projections'. is "),
        (lambda r: r["bank"].update(device="gpu"), "bank: unknown field 'device'"),
        (lambda r: r.update(adapters={}), "adapters is {}; expected a list"),
        (lambda r: r["adapters"].append("d"), "adapters.3. is 'd'; expected an object"),
        (lambda r: r["adapters"][0].pop("slot"), "adapters.0. lacks slot"),
        (lambda r: r["adapters"][0].update(slot=4), r"adapters.0..'slot'. is 4; .* from 0 to 3"),
        (lambda r: r["adapters"][0].update(slot=-1), "adapters.0..'slot'. is -1"),
        (lambda r: r["adapters"][0].update(slot="0"), "adapters.0..'slot'. is '0'"),
        (lambda r: r["adapters"][1].update(slot=0), "adapters.1. has the slot 0 of an adapter"),
        (lambda r: r["adapters"][1].update(name="c"), "adapters.1. has the name 'c' of an"),
        (
            lambda r: r["adapters"][1].update(sha256=r["adapters"][0]["sha256"]),
            "adapters.1. has the sha256 '",
        ),
        (lambda r: r["adapters"][0].update(name="a/b"), "adapters.0.: adapter name 'a/b'"),
        (lambda r: r["adapters"][0].update(sha256=None), "adapters.0..'sha256'. is None"),
        (lambda r: r.update(columns="abc"), "columns is 'abc'; expected a list"),
        (lambda r: r["columns"].append("xyz"), "columns.3. is 'xyz'; expected a sha256"),
        (lambda r: r["columns"].pop(), "router has 3 columns and column_digests 2"),
        (lambda r: r.update(labels_used=1), "labels_used is 1; expected true, false or null"),
        (lambda r: r.update(metrics=[1]), "metrics is .1.; expected an object"),
        (lambda r: r["metrics"].update(nll="low"), "metrics.'nll'. is 'low'; expected a number"),
        (lambda r: r.update(router="learned"), "router is 'learned'; expected an object"),
        (lambda r: r["router"].pop("kind"), "router.'kind'. is None"),
        (
            lambda r: r["router"].update(kind="lerned"),
            "'lerned' is unknown.* 'learned'",
        ),
        (lambda r: r["router"].pop("width"), "router 'learned'.*width|settings .*understood was"),
        (lambda r: r["router"].update(depth=2), "router 'learned' cannot be built.*'depth'"),
        (lambda r: r["router"].update(top_k=9), "router 'learned': .*top_k"),
        (lambda r: r["router"].update(gate="max"), "router 'learned': .*gate"),
        (lambda r: r["router"].update(width=32), "router 'learned': .*shape"),
        (lambda r: r["router"].update(width="64"), "router 'learned'"),
        (lambda r: r["router"].update(d_model=None), "router 'learned'"),
        (lambda r: r["router"].update(d_model=-1), "d_model is -1: expected a positive integer"),
        (lambda r: r["router"].update(width=0), "width is 0: expected a positive integer"),
        (lambda r: r["router"].update(num_layers=0), "num_layers is 0: expected a positive"),
        (lambda r: r["router"].update(num_layers=2**30), "w_in has shape .* 1073741824"),
        (lambda r: r["router"].update(num_columns=2**63), "top_k 2 is not a number from 1 to 92"),
        (lambda r: r["router"].update(top_k=True), "top_k True is not a number"),
        (lambda r: r["router"].update(top_k=1.5), r"top_k 1\.5 is not a number"),
        (lambda r: r["router"].update({"a\nb": 1}), r"cannot be built"),
    ],
)
def test_an_edited_record_is_refused_by_field(tmp_path, base, learned, change, said):
    path = edit(learned.save(tmp_path / "mix"), change, sealed="columns" in said)
    with unchecked_shapes(), pytest.raises(ValueError, match=said) as error:
        Composition.load(path, base)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.pop("b_in"), "needs the array 'b_in'.* router.safetensors"),
        (lambda a: a.update(extra=np.ones(2)), "has no place for 'extra'"),
        (lambda a: a.update(w_in=a["w_in"][:, :-1]), "w_in has shape"),
        (lambda a: a.update(w_in=a["w_in"][0]), "w_in has shape"),
        (lambda a: a.update(w_in=a["w_in"].astype(np.float64)), "is float64 .*expected float32"),
        (lambda a: a.update(b_out=a["b_out"].astype(np.int32)), "is int32 .*expected float32"),
        (lambda a: a.update(w_out=np.full_like(a["w_out"], np.inf)), "router has NaN or infinite"),
        (lambda a: a.clear(), "needs the array"),
    ],
)
def test_a_damaged_router_is_refused_by_array(tmp_path, base, learned, change, said):
    path = learned.save(tmp_path / "mix")
    arrays = load_file(path / "router.safetensors")
    change(arrays)
    save_file(arrays, path / "router.safetensors")
    with unchecked_shapes(), pytest.raises(ValueError, match=said):
        Composition.load(path, base)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"version https://git-lfs.github.com/spec/"]
)
@pytest.mark.parametrize("name", ["molora.json", "router.safetensors"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, base, learned, name, content):
    path = learned.save(tmp_path / "mix")
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} (is|cannot)") as error:
        Composition.load(path, base)
    assert "\n" not in str(error.value)
    (path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}"):
        Composition.load(path, base)


@pytest.mark.parametrize("name", ["molora.json", "router.safetensors", "adapters/b"])
def test_links_that_leave_the_folder_are_not_followed(tmp_path, base, learned, name):
    path = learned.save(tmp_path / "mix")
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="leads out of"):
        Composition.load(path, base)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["columns"].reverse(),
        lambda r: r["router"].update(gate="unit"),
        lambda r: r["router"].update(top_k=1),
        lambda r: r["bank"].update(dtype="bfloat16"),
        lambda r: r["base"].update(name="another"),
    ],
)
def test_a_record_edited_to_other_good_values_is_refused(tmp_path, base, learned, change):
    path = edit(learned.save(tmp_path / "mix"), change)
    with pytest.raises(ValueError, match="not those that were saved together"):
        Composition.load(path, base)


def test_the_router_of_another_composition_is_refused(tmp_path, base, adapters, learned):
    other = compose(base, adapters, learned_router(base))
    other.router.b_out[...] = other.router.b_out[...] + 1.0
    path, theirs = learned.save(tmp_path / "mix"), other.save(tmp_path / "other")
    shutil.copy(theirs / "router.safetensors", path / "router.safetensors")
    with pytest.raises(ValueError, match="not those that were saved together"):
        Composition.load(path, base)
    shutil.copy(theirs / "molora.json", path / "molora.json")  # both, and the same adapters
    Composition.load(path, base)


def test_metrics_may_be_added_to_a_record(tmp_path, base, learned):
    path = edit(learned.save(tmp_path / "mix"), lambda r: r["metrics"].update(mine=1.5))
    assert Composition.load(path, base).metrics["mine"] == 1.5
