"""train_adapter on the tiny model: it learns, it exports what it trained, the base stays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import (
    PROJECTIONS,
    AdapterBank,
    TrainableAdapter,
    load_adapter,
    save_adapter,
)
from molora_jax.compilations import count_compilations
from molora_jax.models import params_digest
from molora_jax.training import (
    AdapterTrainConfig,
    NonFiniteLossError,
    evaluate,
    single_arm,
    train_adapter,
)
from molora_jax.training.adapter import adapter_loss, kept_frozen
from molora_jax.training.checkpoint import read_checkpoint
from tests.training.conftest import SETTINGS


def test_each_adapter_lowers_the_loss_of_its_own_held_out_text(tiny):
    stacks = tiny.bank.stacks
    for own, windows in enumerate(tiny.held_out):
        base = evaluate(tiny.base.decoder, windows).nll
        by_adapter = [
            evaluate(tiny.base.decoder, windows, adapters=stacks, router=single_arm(slot)).nll
            for slot in range(2)
        ]
        assert by_adapter[own] < base - 1.0
        assert by_adapter[own] < by_adapter[1 - own] - 1.0


def test_the_exported_folder_computes_what_was_trained(tiny, tmp_path):
    """B is not zero, the folder holds it, the bank gives its loss."""
    windows = tiny.train[0]
    config = dataclasses.replace(
        SETTINGS, steps=6, use_rslora=True, rank=3, accumulate=2, projections=("v_proj", "up_proj")
    )
    adapter, records = train_adapter(tiny.base, windows, config, name="sql")
    assert adapter.projections == ("v_proj", "up_proj")
    assert all(pair.b.any() and np.isfinite(pair.b).all() for pair in adapter.modules.values())
    save_adapter(adapter, tmp_path / "sql")
    read, _ = load_adapter(tmp_path / "sql", config=tiny.base.config)
    assert read.digest == adapter.digest
    assert {pair.scale for pair in read.modules.values()} == {8 / 3**0.5}
    bank = AdapterBank(tiny.base.config, num_slots=3, max_rank=5)
    bank.load(read)
    served = evaluate(tiny.base.decoder, windows, adapters=bank.stacks, router=single_arm(0)).nll
    assert served < records[0]["loss"] - 0.05

    # The same numbers as the loss of training, which applies the scale by itself.
    def stacked(matrix: str) -> dict[str, np.ndarray]:
        parents = {"v_proj": "self_attn", "up_proj": "mlp"}
        return {
            name: np.stack(
                [getattr(read.modules[f"layers.{at}.{parent}.{name}"], matrix) for at in range(4)]
            )
            for name, parent in parents.items()
        }

    trained = TrainableAdapter(
        lora_a=jax.device_put(stacked("a")),
        lora_b={name: jnp.asarray(b.swapaxes(1, 2)) for name, b in stacked("b").items()},
        alpha=8.0,
        use_rslora=True,
    )
    total, weight, _ = jax.jit(adapter_loss)(trained, tiny.base.decoder, windows)
    assert served == pytest.approx(float(total / weight), rel=1e-5)


def test_base_is_untouched_and_not_in_the_optimiser(tiny, tmp_path, capsys):
    """A base that drifts, or sits in the optimiser, is no frozen base."""
    before = params_digest(tiny.base.decoder)
    config = dataclasses.replace(SETTINGS, steps=20, weight_decay=0.1, checkpoint_every=20)
    train_adapter(tiny.base, tiny.train[0], config, name="sql", run_dir=tmp_path)
    assert params_digest(tiny.base.decoder) == before
    names, meta = read_checkpoint(tmp_path / "checkpoints")
    assert meta["identity"] == {"base": tiny.base.digest}
    assert meta["about"]["base_name"] == "tiny-random"
    files = [path.read_bytes() for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    for leaf in map(np.asarray, jax.tree.leaves(tiny.base.decoder)):
        assert not any(np.array_equal(leaf, array) for array in names.values())
        assert not any(leaf.tobytes()[:64] in content for content in files if leaf.std() > 0)
    for part in ("['params']", "mu", "nu"):
        found = sorted(name for name in names if part in name)
        assert len(found) == 2 * len(PROJECTIONS), found
        assert all("lora_" in name and "_proj" in name for name in found)
    printed = capsys.readouterr().out
    sizes = tiny.base.config.projection_sizes().values()
    trained = 4 * 4 * sum(D + F for D, F in sizes)
    total = sum(leaf.size for leaf in jax.tree.leaves(tiny.base.decoder)) + trained
    share = 100 * trained / total
    assert (
        f"sql: trainable params: {trained:,} || all params: {total:,} || "
        f"trainable%: {share:.4f}" in printed
    )


def test_a_changed_base_is_noticed(tiny):
    norm = tiny.base.decoder.norm
    before = norm[...]
    try:
        with (
            pytest.raises(RuntimeError, match="base 'tiny-random' changed"),
            kept_frozen(tiny.base),
        ):
            norm[...] = before.at[0].add(1e-6)
    finally:
        norm[...] = before


def test_a_broken_base_stops_the_run_and_gives_no_adapter(tiny):
    norm = tiny.base.decoder.norm
    before = norm[...]
    try:
        norm[...] = before.at[0].set(np.nan)
        with pytest.raises(NonFiniteLossError, match=r"sql: loss nan .* at step 0"):
            train_adapter(tiny.base, tiny.train[0], SETTINGS, name="sql")
    finally:
        norm[...] = before


def test_the_next_adapter_reuses_the_compiled_step(tiny):
    config = dataclasses.replace(SETTINGS, steps=2, seed=9, lr=1e-3)
    with count_compilations() as compiled:
        train_adapter(tiny.base, tiny.train[1], config, name="fifth")
    assert not [name for name in compiled if "train_step" in name]


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"AdapterTrainConfig\.rank .* got 0"):
        AdapterTrainConfig(rank=0)
    with pytest.raises(ValueError, match=r"AdapterTrainConfig\.steps .* got 0"):
        AdapterTrainConfig(steps=0)
    with pytest.raises(ValueError, match=r"'q_pro'; did you mean 'q_proj'\?"):
        AdapterTrainConfig(projections=("v_proj", "q_pro"))
    for projections in ((), "q_proj"):
        with pytest.raises(ValueError, match="projections must be a list"):
            AdapterTrainConfig(projections=projections)
    with pytest.raises(TypeError, match="use_dora"):
        AdapterTrainConfig(use_dora=True)


def test_windows_of_another_tokenizer_are_refused(tiny):
    windows = tiny.train[0].rows(np.arange(4))  # a copy, where a slice would be a view
    windows.tokens[2, 3] = vocab_size = tiny.base.config.vocab_size
    with pytest.raises(ValueError, match=rf"'sql': tokens\[2, 3\] is token id {vocab_size}"):
        train_adapter(tiny.base, windows, SETTINGS, name="sql")


def test_projections_are_a_set():
    one, other = (
        AdapterTrainConfig(projections=names)
        for names in (["v_proj", "q_proj", "q_proj"], ("q_proj", "v_proj"))
    )
    assert one == other
