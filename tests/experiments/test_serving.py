"""The experiment `serving` at tiny, and what its tables are made of."""

import dataclasses
import json

import pytest

from experiments import main as command_line
from experiments import results, serving, serving_report
from molora_jax.generation.simulate import Simulation


def tiny_config(**values):
    files = [command_line.CONFIGS / "tiny.gin"]
    return serving.Config(**command_line.bindings(serving, files=files, shared=True) | values)


def test_every_policy_serves_every_trace(tmp_path):
    config = tiny_config()
    status, path = results.execute("serving", serving, config, {}, scale="tiny", workdir=tmp_path)
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    served = {(line["policy"], line["rate"], line["adapters"], line["repeat"]) for line in lines}
    assert len(served) == len(lines) == 3 * 3 * config.repeats  # two rates, and one adapter
    for line in lines:
        assert line["compilations"] == 0 and line["tokens_per_second"] > 0
        first, last = line["time_to_first_token_p50_p99_s"], line["latency_p50_p99_s"]
        assert 0 < line["queueing_p50_p99_s"][0] < first[0] <= last[0] <= last[1]
    assert result["metrics"]["answers_that_differ"] == 0
    claims = {claim["id"]: claim for claim in result["claims"]}
    assert len(claims) == 4
    assert all(claim["kind"] == "order" and claim["paper"] is None for claim in claims.values())
    report = (path / "report.md").read_text()
    assert "0 programs were compiled" in report and "nan" not in report
    for axis in ("rate", "adapters"):
        for name in ("throughput", "latency", "first_token"):
            assert (path / f"{name}_over_{axis}.png").read_bytes().startswith(b"\x89PNG")


def simulations(*seconds: float) -> list[Simulation]:
    """Of ten tokens each."""

    @dataclasses.dataclass(frozen=True)
    class Known(Simulation):
        tokens: int = 10

    return [Known((), each) for each in seconds]


def test_ratios_are_of_the_same_traces():
    cell = (1.0, 2)
    # Trace by trace 2, 1 and 5 times as fast; the medians alone would say 4/3.
    found = serving_report.Found(
        {cell: {"mixed": simulations(1, 4, 3), "one_adapter": simulations(2, 4, 15)}}, differ=0
    )
    over = found.ratio(cell, serving_report.throughput, "mixed", over="one_adapter")
    assert over == pytest.approx(2)
    band = found.band(cell, "mixed", serving_report.throughput)
    assert band == pytest.approx((10 / 3, 2.5, 10))


def test_traces_of_two_repeats_differ_and_those_of_one_do_not():
    config = tiny_config()
    first, again, other = (serving.trace(config, (20.0, 3), repeat, 50) for repeat in (0, 0, 1))
    assert first == again != other
    names = {each.request.adapter for each in first + other}
    assert names <= {"adapter-0", "adapter-1", "adapter-2"}
    bursts = serving.trace(tiny_config(arrivals="bursty"), (20.0, 3), 0, 50)
    assert [each.request for each in bursts] == [each.request for each in first]


def test_sweeps_name_what_the_config_takes():
    for points in serving.SWEEPS.values():
        made = [serving.Config(**command_line.bindings(serving, texts=[p])) for p in points()]
        assert len(set(made)) == len(made) > 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pattern": "bursts"}, "pattern = 'bursts': expected one of bursty"),
        ({"rates": ()}, "rates is empty"),
        ({"rate": 0.0}, "rates above 0"),
        ({"answer_tokens": (5, 2)}, r"answer_tokens = \(5, 2\)"),
    ],
)
def test_a_config_that_cannot_be_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        tiny_config(**values)
