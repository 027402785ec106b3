"""The synthetic multimodal task: rows follow their grammars, equal parameters, both tables."""

import json

import numpy as np
import pytest

from experiments import main as command_line
from experiments import results, synthetic, synthetic_task
from experiments.synthetic_training import arm_config


def test_rows_follow_the_grammar_of_their_modality():
    grammar = synthetic_task.tables(8, 3)
    rows = synthetic_task.make_rows(grammar, count=4, seq_len=48, noise=0.0, seed=1)
    assert (rows.labels == rows.tokens // 8).all()
    symbols = rows.tokens % 8
    for row, kinds in zip(symbols, rows.labels, strict=True):
        starts = [0, *(1 + np.flatnonzero(np.diff(kinds)))]
        for begin, end in zip(starts, [*starts[1:], len(row)], strict=True):
            for at in range(begin + 4, end):
                allowed = {
                    0: {grammar["often"][row[at - 1]], grammar["seldom"][row[at - 1]]},
                    1: {grammar["line"][row[at - 4]]},
                    2: {grammar["low" if row[at - 2] < 4 else "high"][row[at - 1]]},
                }[kinds[at]]
                assert row[at] in allowed


def test_the_single_adapter_of_equal_parameters_has_no_fewer_than_molora():
    config = synthetic.Config()
    model = synthetic_task.sizes(symbols=32, width=64, layers=3, seq_len=96)
    of_rank_1 = 3 * sum(sum(each) for each in model.projection_sizes().values())
    single = arm_config(model, config, "single_equal", 0).rank * of_rank_1
    router = 64 * 64 + 64 + 64 * 4 + 4
    routed = 4 * config.rank * of_rank_1 + router
    assert routed <= single < routed + of_rank_1


def test_both_tables_share_their_arms_and_say_what_the_routed_ones_were_trained_by(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(synthetic, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = synthetic.Config(**tiny)

    def execute(table):
        status, path = results.execute(
            table, synthetic, config, {}, scale="tiny", workdir=tmp_path / "runs"
        )
        result = json.loads((path / "result.json").read_text())
        assert status == "complete", result["error"]
        return path, result["metrics"], (path / "report.md").read_text()

    path, metrics, report = execute("table13")
    losses = [metrics[f"table13/{arm}/val_loss"] for arm in ("single_equal", "molora")]
    gain = metrics["table13/molora_gain_over_single_equal"]
    assert gain == pytest.approx(losses[0] - losses[1])
    assert "overfits there" in report
    assert (path / "validation.png").stat().st_size > 0
    # Were the arm trained again, this would fail.
    monkeypatch.setattr("experiments.synthetic_training.train_jointly", None)
    path, metrics, report = execute("table14")
    assert metrics["table14/molora/seeds"] == 1
    assert 0 <= metrics["table14/molora/nmi/end"] <= 1
    assert "auxiliary loss" in report
    for name in ("shares", "entropy", "ari", "sample"):
        assert (path / f"{name}.png").stat().st_size > 0


def test_arms_are_some_of_the_tables_and_molora_among_them():
    for arms in (("single",), ("molora", "none")):
        with pytest.raises(ValueError, match=r"Config\.arms"):
            synthetic.Config(arms=arms)
