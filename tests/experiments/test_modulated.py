"""Marked rows, equal parameters, and a whole tiny run of the modulated scale."""

import json

import numpy as np
import pytest

from experiments import main as command_line
from experiments import modulated, modulated_task, results


def test_the_last_mark_says_how_a_question_is_answered():
    answers = modulated_task.tables(8, 2, base_seed=1)
    assert (answers[0] != answers[1]).all()
    rows, distance = modulated_task.marked_rows(answers, count=6, seq_len=40, seed=3)
    for tokens, labels, weights, away in zip(
        rows.tokens, rows.labels, rows.weights, distance, strict=True
    ):
        mark, since = -1, 0
        for at, token in enumerate(tokens[:-1]):
            if token >= 16:
                mark, since = token - 16, -1
            is_question = token < 8
            since += int(is_question)
            assert labels[at] == mark
            assert (weights[at] > 0) == is_question
            assert away[at] == (since if is_question else -1)
            if is_question:
                assert tokens[at + 1] == 8 + answers[mark][token]


def test_a_tiny_run_compares_three_arms_of_equal_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(modulated, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = modulated.Config(**tiny)

    def execute(**settings):
        status, path = results.execute(
            "modulated", modulated, config, {}, scale="tiny", workdir=tmp_path / "runs", **settings
        )
        result = json.loads((path / "result.json").read_text())
        assert status == "complete", result["error"]
        return path, result["metrics"]

    path, metrics = execute()
    for task in config.tasks:
        parameters = {
            arm: metrics[f"modulated/{task}/{arm}/parameters"]
            for arm in ("lora", "stateless", "recurrent")
        }
        assert parameters["lora"] >= parameters["stateless"] == parameters["recurrent"]
        losses = [metrics[f"modulated/{task}/{arm}/val_loss"] for arm in parameters]
        assert metrics[f"modulated/{task}/memory_gain"] == pytest.approx(losses[1] - losses[2])
    assert "our reading" in (path / "report.md").read_text().lower()
    pictures = ("curve_marks", "distance_marks", "scale_marks", "curve_text")
    assert all((path / f"{name}.png").stat().st_size > 0 for name in pictures)
    # Were anything trained again, this would fail.
    monkeypatch.setattr("experiments.modulated_training.fit", None)
    assert execute(rerun=True)[1] == metrics


def test_settings_that_make_no_task_are_refused():
    for wrong, message in (
        ({"tasks": ("mark",)}, r"Config\.tasks"),
        ({"questions": 128}, r"Config\.questions = 128: expected at most 127"),
        ({"width": 12}, r"Config\.width"),
    ):
        with pytest.raises(ValueError, match=message):
            modulated.Config(**wrong)


def test_windows_of_text_are_bytes():
    class Documents:
        train_docs = ("abc" * 20,)
        heldout_docs = ("né" * 9,)

    train, held_out = modulated_task.text_rows(Documents(), seq_len=8, most=3)
    assert train.tokens.shape == (3, 8)
    assert bytes(np.asarray(train.tokens[0]).tolist()) == b"abcabcab"
    assert held_out.tokens.max() > 127
