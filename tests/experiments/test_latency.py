"""Latency with a hot set and with paging, and swaps: what is written, and what the numbers mean."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import latency, registry, results, swap
from experiments import main as command_line
from experiments.latency_steps import Cell, Latencies, Layer, Trace

# By registry name: claims, and the picture.
WRITES = {
    "fig7": (
        {"fig7.least_paging_over_hot_set", "fig7.greatest_paging_over_hot_set",
         "fig7.hot_set_p99_over_p50"},
        "p99",
    ),
    "fig8": (
        {"fig8.paging_worst_over_best", "fig8.hot_set_p99_over_p50", "fig8.hot_set_bursty",
         "fig8.hot_set_uniform", "fig8.hot_set_adversarial"},
        "patterns",
    ),
    "table11": ({"table11.hot_set_32"}, "variation"),
    "swap": (
        {"swap.load_over_copy_r2", "swap.load_both_over_copy_r2", "swap.compilations"}, "swap"
    ),
}  # fmt: skip


def tiny_config(name, **values):
    module = registry.EXPERIMENTS[name].load()
    files = [command_line.CONFIGS / "tiny.gin"]
    found = command_line.bindings(module, files=files, shared=True)
    return module, module.Config(**{**found, **values})


@pytest.mark.parametrize("name", WRITES)
def test_an_experiment_writes_claims_metrics_and_a_picture(name, tmp_path):
    module, config = tiny_config(name)
    status, path = results.execute(
        name, module, config, module.digests(config), scale="tiny", workdir=tmp_path
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    ids, picture = WRITES[name]
    claims = {claim["id"]: claim for claim in result["claims"]}
    assert set(claims) == ids
    for claim in claims.values():
        assert claim["note"].startswith("tiny sizes; CPU")
        assert claim["holds"] is None
    assert all(v > 0 for key, v in result["metrics"].items() if not key.startswith("held_up"))
    assert (path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
    assert "nan" not in (path / "report.md").read_text()
    if name == "swap":
        assert claims["swap.compilations"]["ours"] == 0
        assert "Compiled over all loads and steps: 0." in (path / "report.md").read_text()
    elif name == "fig8":
        lines = [json.loads(each) for each in (path / "metrics.jsonl").read_text().splitlines()]
        assert {line["pattern"] for line in lines} == {"bursty", "uniform", "zipf", "adversarial"}
        assert len(lines) == 4 * 4 * config.rounds


def test_a_step_serves_the_accesses_of_its_trace_in_every_arm():
    _, config = tiny_config("fig8", active=3)
    layer = Layer(config)
    trace = Trace(layer, Cell(8, "uniform"))
    assert trace.token_access.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    arms = {arm: layer.runner(arm, trace) for arm in ("hot_set", "eager", "paging", "paging_ahead")}
    for step in range(8):
        assert trace.names[step] == [f"adapter{i}" for i in trace.accesses[step]]
        expected = np.asarray(arms["hot_set"](step))
        for arm in arms.values():
            np.testing.assert_allclose(arm(step), expected, rtol=1e-5, atol=1e-5)
    assert trace.pool.reads > trace.pool.misses > 0
    with pytest.raises(RuntimeError, match="hot_set differs from the update by"):
        layer.check(trace, {"hot_set": jnp.asarray(expected)})  # of another step
    few = Trace(layer, Cell(2, "adversarial"))  # fewer tokens than accesses
    assert few.accesses.shape[1] == 2


def spread(*values):
    """100 steps in rounds of 10, the last of each of another length."""
    return np.tile([1.0] * 9 + [values[-1]], (10, 1)) * np.linspace(1, values[0], 10)[:, None]


def test_percentiles_ratios_and_bands():
    cell = Cell(8, "uniform")
    found = Latencies(
        {cell: {"hot_set": spread(1.0, 2.0), "paging": spread(1.0, 6.0), "base": spread(1.0, 1.0)}},
        seed=0,
    )
    assert found.p99_over_p50(cell, "hot_set") == pytest.approx(2)
    assert found.ratio(cell, 99, "paging", over="hot_set") == pytest.approx(3)
    assert found.variation(cell, "hot_set") == pytest.approx(0.3 / 1.1)
    assert found.variation(cell, "base") == 0
    assert found.p99_band(cell, "hot_set") == pytest.approx((2000, 2000, 2000))
    uneven = Latencies({cell: {"hot_set": spread(3.0, 1.0)}}, seed=0)
    value, low, high = uneven.p99_band(cell, "hot_set")
    assert low < high <= value == pytest.approx(3000)


@pytest.mark.parametrize(
    ("hot", "base", "holds"), [(1.4, 9.0, True), (2.0, 1.4, False), (2.0, 1.7, None)]
)
def test_a_step_as_uneven_without_adapters_leaves_no_verdict(hot, base, holds):
    cells = [Cell(8, "uniform"), Cell(8, "zipf")]
    calm = {"hot_set": spread(1.0, 1.0), "base": spread(1.0, 1.0)}
    seconds = {cells[0]: calm, cells[1]: {"hot_set": spread(1.0, hot), "base": spread(1.0, base)}}
    claim = latency._steady_claim(latency.Config(), "fig8", Latencies(seconds, seed=0), cells)
    assert claim.ours == pytest.approx(hot)
    assert claim.holds is holds
    assert "the worst is B = 8, zipf" in claim.note
    assert ("not idle" in claim.note) == (holds is None)


@pytest.mark.parametrize(
    ("module", "values", "said"),
    [
        (latency, {"resident": 16}, "active <= resident < num_adapters"),
        (latency, {"active": 9}, "active <= resident < num_adapters"),
        (latency, {"page_rank": 3}, "page_rank = 3: expected a divisor of rank 16"),
        (latency, {"steps": 0}, "steps = 0: expected more than 0"),
        (latency, {"batches": (8, 4)}, "expected growing numbers"),
        (latency, {"strategy": "groupd"}, "strategy = 'groupd'"),
        (swap, {"ranks": ()}, r"ranks = \(\): expected"),
        (swap, {"beside": 0}, "beside = 0: expected more than 0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(module, values, said):
    with pytest.raises(ValueError, match=said):
        module.Config(**values)


def test_the_paper_scale_has_the_papers_sizes():
    module = registry.EXPERIMENTS["fig7"].load()
    files = [command_line.CONFIGS / "paper.gin"]
    config = module.Config(**command_line.bindings(module, files=files, shared=True))
    assert (config.dtype, config.width, config.rank) == ("bfloat16", 4096, 64)
    assert set(config.batches) == set(latency.PAPER_CV)
