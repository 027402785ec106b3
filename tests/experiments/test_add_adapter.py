"""add_adapter at tiny scale: adapters arrive without a compilation, and the numbers add up."""

import json

import pytest

from experiments import add_adapter, results
from experiments import main as command_line


def test_at_tiny_scale(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(
        add_adapter, files=[command_line.CONFIGS / "tiny.gin"], shared=True
    )
    config = add_adapter.Config(**tiny)
    status, path = results.execute(
        "add_adapter", add_adapter, config, add_adapter.digests(config), scale="tiny",
        workdir=tmp_path,
    )  # fmt: skip
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    numbers = result["metrics"]
    assert numbers["compilations"] == 0
    assert numbers["in_any_order"] == numbers["unloads_exactly"] == 1
    # What the first router does not know it cannot lose, and cannot gain.
    assert numbers["trained/old_lose"] == 0
    assert numbers["oracle/new_gain_share"] == pytest.approx(1)
    assert numbers["base/new_gain_share"] == 0
    arms = {name.split("/")[0] for name in numbers if name.endswith("/joined")}
    assert arms == {
        "statistics_m_16", "statistics_all_channels", "trained", "Arrow", "PHATGOOSE", "grown",
        "trained_on_all", "base", "oracle", "uniform",
    }  # fmt: skip
    losses = [numbers[f"{arm}/technical"] for arm in arms]
    assert len(set(losses)) > 5  # the arms really differ
    assert (path / "over_oracle.png").stat().st_size > 5000
    assert "Adapters that arrive later" in (path / "report.md").read_text()


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="top_k = 4: expected 1 to 3"):
        add_adapter.Config(top_k=4)
    with pytest.raises(ValueError, match="features = 0"):
        add_adapter.Config(features=0)
