"""The loop: accumulation, schedule, freezing, non-finite losses, compilations. On a toy loss."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.compilations import count_compilations
from molora_jax.display.progress import Progress
from molora_jax.training import NonFiniteLossError, TrainConfig, fit
from molora_jax.training.data import Batch, BatchOrder, make_batch

V = 7


def toy_loss(params, frozen, batch):
    """Bigram logits: a frozen table plus a trained low-rank one."""
    table = frozen["table"] + params["a"] @ params["b"]
    nll = -jnp.take_along_axis(
        jax.nn.log_softmax(table[batch.tokens]), jnp.roll(batch.tokens, -1, 1)[..., None], axis=-1
    )[..., 0]
    return (nll * batch.weights).sum(), batch.weights.sum(), {"rows": batch.mask.sum()}


def toy(seed: int = 0):
    rng = np.random.default_rng(seed)
    params = {
        "a": jnp.asarray(rng.normal(size=(V, 2)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=(2, V)), jnp.float32),
    }
    return params, {"table": jnp.asarray(rng.normal(size=(V, V)), jnp.float32)}


def windows(rows: int = 12, *, uneven: bool = False) -> Batch:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, V, size=(rows, 6))
    mask = np.ones_like(tokens, bool)
    if uneven:
        mask[::2, 3:] = False
    return make_batch(tokens, mask, np.ones_like(mask))


def test_accumulation_equals_the_big_batch_though_rows_differ_in_targets():
    params, frozen = toy()
    data = windows(uneven=True)
    settings = {"steps": 4, "lr": 0.05, "clip": 0.5}
    big, big_records = fit(
        toy_loss, params, BatchOrder(data, 6), TrainConfig(batch_size=6, **settings), frozen=frozen
    )
    small, small_records = fit(
        toy_loss,
        params,
        BatchOrder(data, 6),
        TrainConfig(batch_size=2, accumulate=3, **settings),
        frozen=frozen,
    )
    for key in params:
        np.testing.assert_allclose(big[key], small[key], rtol=2e-5, atol=2e-6)
        assert np.abs(big[key] - params[key]).max() > 0.01
    for one, other in zip(big_records, small_records, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_first_step_is_adamw_with_clipping_and_decoupled_decay():
    params, frozen = toy()
    config = TrainConfig(
        steps=1, lr=0.1, warmup_steps=0, weight_decay=0.5, clip=1e-3, batch_size=12
    )
    after, records = fit(toy_loss, params, BatchOrder(windows(), 12), config, frozen=frozen)

    def mean(params):
        total, weight, _ = toy_loss(params, frozen, windows())
        return total / weight

    grads = jax.grad(mean)(params)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values()))
    assert norm > 1e-3, "the gradient must be clipped for this test to say anything"
    assert records[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for key in params:
        g = np.asarray(grads[key], np.float64) * 1e-3 / norm
        expected = params[key] - 0.1 * (g / (np.abs(g) + 1e-8) + 0.5 * params[key])
        np.testing.assert_allclose(after[key], expected, rtol=1e-4, atol=1e-5)


def test_schedule_warms_up_and_decays():
    config = TrainConfig(steps=10, lr=1.0, warmup_steps=4)
    lrs = [config.lr_at(step) for step in range(10)]
    np.testing.assert_allclose(lrs[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    assert lrs[4:] == sorted(lrs[4:], reverse=True)
    assert 0 < lrs[-1] < 0.1
    assert TrainConfig(steps=3, lr=1.0, warmup_steps=0).lr_at(0) == 1.0
    assert TrainConfig(steps=2, lr=1.0, warmup_steps=4).lr_at(1) == 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", -1), ("lr", -1.0), ("lr", float("nan")), ("clip", 0.0), ("accumulate", 0)],
)
def test_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"TrainConfig\.{field}.*{value}"):
        TrainConfig(**{field: value})
    with pytest.raises(TypeError, match="learning_rate"):
        TrainConfig(learning_rate=1e-3)


def test_frozen_and_initial_values_stay_the_callers(tmp_path):
    """Twenty steps with weight decay leave the frozen tree as it was."""
    params, frozen = toy()
    before = jax.tree.map(np.array, (params, frozen))
    config = TrainConfig(steps=20, lr=0.1, weight_decay=0.1, checkpoint_every=20)
    after, _ = fit(
        toy_loss, params, BatchOrder(windows(), 2), config, frozen=frozen, run_dir=tmp_path
    )
    jax.tree.map(np.testing.assert_array_equal, (params, frozen), before)
    assert np.abs(after["b"] - params["b"]).max() > 0.05
    from molora_jax.training.checkpoint import describe_checkpoint

    arrays = describe_checkpoint(tmp_path / "checkpoints")["arrays"]
    trained = {"['a']", "['b']"}
    assert {name for name in arrays if name.startswith("['params']")} == {
        f"['params']{leaf}" for leaf in trained
    }
    moments = [name for name, (shape, _) in arrays.items() if "optimiser" in name and shape]
    assert len(moments) == 2 * len(trained), "Adam's two moments of the trained leaves, no more"


def test_metrics_have_one_object_a_step(tmp_path, capsys):
    params, frozen = toy()
    _, records = fit(
        toy_loss,
        params,
        BatchOrder(windows(), 2),
        TrainConfig(steps=5),
        frozen=frozen,
        name="toy",
        run_dir=tmp_path,
        summarise=lambda sums: {"rows": float(sums["rows"])},
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == records
    assert [line["step"] for line in lines] == list(range(5))
    assert lines[2].keys() == {
        "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "rows"
    }  # fmt: skip
    assert lines[0]["tokens"] == 10
    assert lines[0]["rows"] == 12
    printed = capsys.readouterr().out
    assert "toy  1/5  loss" in printed
    assert "toy  5/5  loss" in printed
    assert "tokens/s" in printed


def test_batches_of_another_size_are_refused():
    params, frozen = toy()
    with pytest.raises(ValueError, match="gave 3 rows for a step, expected batch_size 2 × acc"):
        fit(toy_loss, params, BatchOrder(windows(), 3), TrainConfig(steps=1), frozen=frozen)


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    for tty in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda tty=tty: tty)
        with Progress("toy", 4, start=1, lasting=True, seconds_between=0.0) as progress:
            for loss in ("loss 3", "loss 2", "loss 1"):
                time.sleep(0.01)
                progress.update(loss)
        printed = capsys.readouterr().out
        assert "4/4" in printed
        assert "loss 1" in printed
        assert ("━" in printed) == tty
        if not tty:
            lines = printed.splitlines()
            assert lines[0] == "toy  2/4  loss 3"
            assert lines[1] == "toy  3/4  loss 2  0:00 left"


def breaking_loss(params, frozen, batch):
    total, weight, sums = toy_loss(params, frozen, batch)
    return jnp.where(batch.tokens[0, 0] == frozen["bad"], jnp.nan, total), weight, sums


def test_non_finite_loss_stops_and_says_between_which_steps(tmp_path):
    params, frozen = toy()
    data = windows()
    data.tokens[:, 0] = 1

    def batches(step):
        batch = data.rows(np.arange(2))
        batch.tokens[0, 0] = 3 if step == 4 else 1
        return batch

    with pytest.raises(NonFiniteLossError, match="between steps 3 and 4") as caught:
        fit(
            breaking_loss,
            params,
            batches,
            TrainConfig(steps=9, checkpoint_every=5),
            frozen=frozen | {"bad": jnp.asarray(3)},
            run_dir=tmp_path,
        )
    assert "Nothing was exported" in str(caught.value)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 4
    assert last["loss"] is None
    assert not (tmp_path / "checkpoints").exists(), "broken parameters were saved"


def sqrt_loss(params, frozen, batch):
    """Finite at 0, where its gradient is not."""
    return jnp.sqrt(jnp.abs(params["x"])).sum(), batch.weights.sum(), {}


def test_non_finite_gradient_of_a_finite_loss_stops_at_the_first_step():
    with pytest.raises(NonFiniteLossError, match="first step"):
        fit(
            sqrt_loss,
            {"x": jnp.zeros(2)},
            BatchOrder(windows(), 2),
            TrainConfig(steps=3),
            frozen=None,
        )


def test_a_batch_without_targets_changes_nothing_and_counts_zero():
    """Rows without any target give loss 0, never NaN."""
    params, frozen = toy()
    data = windows()
    data.weights[:] = 0
    after, records = fit(toy_loss, params, BatchOrder(data, 2), TrainConfig(steps=2), frozen=frozen)
    jax.tree.map(np.testing.assert_array_equal, after, params)
    assert [record["loss"] for record in records] == [0.0, 0.0]


def test_other_seeds_schedules_and_values_reuse_one_compiled_step():
    params, frozen = toy()
    fit(toy_loss, params, BatchOrder(windows(), 2), TrainConfig(steps=2), frozen=frozen)
    other_params, other_frozen = toy(seed=5)
    with count_compilations() as compiled:
        fit(
            toy_loss,
            other_params,
            BatchOrder(windows(), 2, seed=3),
            TrainConfig(steps=7, lr=0.5, warmup_steps=1, seed=3, clip=2.0, weight_decay=0.1),
            frozen=other_frozen,
        )
    assert "_train_step" not in " ".join(compiled)
