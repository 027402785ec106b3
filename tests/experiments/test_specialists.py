"""The map of specialists: conflicts, equal budgets, where curves cross, and a whole tiny run."""

import json
import types

import numpy as np
import pytest

from experiments import main as command_line
from experiments import results, specialists, specialists_task, specialists_training
from experiments.specialists_report import clear, crossing
from molora_jax.models.decoder import Decoder
from molora_jax.models.weights import random_arrays


def test_domains_differ_on_the_questions_in_conflict_and_on_no_other():
    few, many = (specialists_task.answers(8, 3, conflict=c, seed=1) for c in (0.25, 0.75))
    for table, count in ((few, 2), (many, 6)):
        assert all(len(set(answers)) in (1, 3) for answers in table.T)
        assert sum(len(set(answers)) == 3 for answers in table.T) == count
    differs = [np.ptp(table, axis=0) > 0 for table in (few, many)]
    assert (differs[0] <= differs[1]).all()


def test_rows_are_a_mark_and_questions_with_their_answers():
    table = specialists_task.answers(8, 2, conflict=1.0, seed=1)[1]
    rows = specialists_task.make_rows(table, 1, count=5, pairs=3, rng=np.random.default_rng(0))
    assert (rows[:, 0] == 17).all()
    np.testing.assert_array_equal(rows[:, 2::2], 8 + table[rows[:, 1::2]])
    targets = specialists_task.as_batch(rows).weights[0] > 0
    np.testing.assert_array_equal(targets, [False, True, False, True, False, True, False])


def piece(config: specialists.Config, *, marked: bool = True) -> specialists_training._Piece:
    model = specialists_task.sizes(
        questions=config.questions, marks=2, width=config.width, layers=2, pairs=config.pairs
    )
    decoder = Decoder(model, random_arrays(model, seed=1))
    return specialists_training._Piece(decoder, config, 2, marked=marked, seed=3)


def small() -> specialists.Config:
    return specialists.Config(
        questions=4, pairs=2, width=8, layers=2, conflicts=(0.0, 1.0), adapters=(2,), rank=2,
        steps=4, batch_rows=4, points=2, val_rows=3,
    )  # fmt: skip


def test_both_arms_train_on_the_same_rows_and_a_pooled_step_has_as_many_of_each_domain():
    config = small()
    made = piece(config)
    assert made.train.shape == (2, 2, 8, 5)
    pooled = made.train.swapaxes(1, 2).reshape(2, config.steps, config.batch_rows, -1)
    assert (np.sort(pooled[..., 0]) == [8, 8, 9, 9]).all()
    np.testing.assert_array_equal(
        np.sort(pooled.reshape(2, 16, 5), axis=1), np.sort(made.train.reshape(2, 16, 5), axis=1)
    )
    # Another conflict changes answers alone, and hidden domains change marks alone.
    np.testing.assert_array_equal(made.train[0, ..., 1::2], made.train[1, ..., 1::2])
    hidden = piece(config, marked=False).train
    assert (hidden[..., 0] == 8).all()
    np.testing.assert_array_equal(hidden[..., 1:], made.train[..., 1:])


def test_the_pooled_adapter_has_no_fewer_parameters_than_the_specialists_and_their_router():
    made = piece(small())
    sizes = made.decoder.config.projection_sizes()
    split = 2 * 2 * sum(map(sum, sizes.values())) + 2 * (8 + 1)
    pooled = sum(rank * sum(sizes[name]) for name, rank in made.pooled_ranks().items())
    assert split <= pooled < split + sum(sizes["down_proj"])


def test_curves_cross_where_the_gain_changes_sign_and_level_points_do_not_count():
    assert crossing([0.0, 1.0, 2.0], [-1.0, 3.0, 1.0]) == [0.25]
    assert crossing([0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]) == [1.0]
    assert crossing([0.0, 1.0, 2.0], [-1.0, -0.2, 0.0]) == []


def test_a_gain_within_a_hundredth_or_within_its_spread_is_level():
    gains = np.asarray([[0.5, 0.009, -0.1], [0.7, 0.009, 0.9]])
    np.testing.assert_allclose(clear(gains), [0.6, 0.0, 0.0])
    np.testing.assert_allclose(clear(gains[:1]), [0.5, 0.0, -0.1])


def test_a_tiny_run_gives_the_map_and_what_was_trained_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(
        specialists, files=[command_line.CONFIGS / "tiny.gin"], shared=True
    )
    config = specialists.Config(**tiny)

    def execute(**settings):
        status, path = results.execute(
            "specialists", specialists, config, {}, scale="tiny", workdir=tmp_path / "runs",
            **settings,
        )  # fmt: skip
        result = json.loads((path / "result.json").read_text())
        assert status == "complete", result["error"]
        return path, result["metrics"]

    path, metrics = execute()
    for setting in ("marked", "hidden"):
        name = f"specialists/{setting}/K2/conflict1"
        for arm in ("oracle", "router"):
            gain = metrics[f"{name}/pooled/val_loss"] - metrics[f"{name}/{arm}/val_loss"]
            assert metrics[f"{name}/steps4/{arm}_gain"] == pytest.approx(gain, abs=1e-5)
        assert 0 <= metrics[f"{name}/router/right"] <= 1
    assert "at any conflict" in (path / "report.md").read_text()
    pictures = ("map", "curves_marked", "curves_hidden", "steps_marked", "steps_hidden")
    assert all((path / f"{name}.png").stat().st_size > 0 for name in pictures)
    # Were anything trained again, this would fail.
    monkeypatch.setattr(specialists_training, "_Piece", types.SimpleNamespace)
    assert execute(rerun=True)[1] == metrics


def test_a_grid_that_does_not_divide_is_refused():
    for wrong, message in (
        ({"adapters": (3,)}, r"Config\.adapters has 3: expected a divisor of batch_rows"),
        ({"conflicts": (0.5, 0.2)}, r"Config\.conflicts"),
        ({"questions": 4}, r"more than the 4 questions"),
        ({"lrs": ()}, r"Config\.lrs"),
    ):
        with pytest.raises(ValueError, match=message):
            specialists.Config(**wrong)
