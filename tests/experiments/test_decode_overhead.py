"""The decode step beside the base's at tiny, and that an arm decodes what it says."""

import json

import numpy as np
import pytest

from experiments import decode_overhead, results
from experiments import main as command_line
from molora_jax.generation import Generation, Request
from pallas_kernels import Routing


def tiny_config(**values):
    files = [command_line.CONFIGS / "tiny.gin"]
    bound = command_line.bindings(decode_overhead, files=files, shared=True)
    return decode_overhead.Config(**bound | values)


def test_every_arm_is_timed_beside_the_base(tmp_path):
    status, path = results.execute(
        "decode_overhead", decode_overhead, tiny_config(), {}, scale="tiny", workdir=tmp_path
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    arms = {"mixed", "vocabulary"}  # the learned one takes an engine more
    assert {f"{name}_over_base" for name in arms} < set(result["metrics"])
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [set(line) - {"phase", "step"} for line in lines] == [
        {"what", "base_s", f"{line['what']}_s"} for line in lines
    ]
    assert {line["what"] for line in lines} == arms
    assert {claim["paper"] for claim in result["claims"]} == {12.1, 27.6}
    assert "other sizes" in (path / "report.md").read_text()
    assert (path / "steps.png").read_bytes().startswith(b"\x89PNG")


def answers(config, *slots):
    """Rows on adapters a and b that were decoded with these slots, longer than the timing."""
    steps = decode_overhead.WARM_UP + config.repeats + 1
    made = []
    for name, slot in zip("ab", slots, strict=True):
        each = Generation(0, Request(prompt=[1], adapter=name), slots={"a": 0, "b": 1})
        each.tokens += [1] * steps
        each._routing.append(Routing(np.full((1, steps, 1), slot), np.ones((1, steps, 1))))
        made.append(each)
    return made


def test_rows_decoded_with_other_slots_than_they_asked_for_fail_the_run():
    config = tiny_config()
    decode_overhead.check(config, "mixed", answers(config, 0, 1))
    with pytest.raises(RuntimeError, match="arm mixed: rows were decoded with the slots"):
        decode_overhead.check(config, "mixed", answers(config, 0, 0))
    with pytest.raises(RuntimeError, match="arm vocabulary"):
        decode_overhead.check(config, "vocabulary", answers(config, 0, -1))
    short = answers(config, 0, 1)
    short[1].tokens.clear()
    with pytest.raises(RuntimeError, match="rows ended before the timing did"):
        decode_overhead.check(config, "mixed", short)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_adapters": 1}, "at least 2 adapters"),
        ({"repeats": 20}, "a context of 41 tokens or more"),
        ({"arms": ()}, "arms is empty"),
        ({"strategy": "groupd"}, "Config.strategy: .*grouped"),
    ],
)
def test_a_config_that_cannot_be_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        tiny_config(**values)
