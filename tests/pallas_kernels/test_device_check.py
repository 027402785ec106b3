"""The script for a GPU machine, run at tiny sizes: it stops in time, and its checks can fail."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import bench, device_cases, device_check, device_numbers
from pallas_kernels.device_numbers import NumberCheck, expected
from pallas_kernels.shapes import SMALL
from tests.pallas_kernels.cases import expected as expected_by_loops
from tests.pallas_kernels.cases import make_case

ROOT = pathlib.Path(pallas_kernels.__file__).parents[1]
ODD = NumberCheck("grouped", "xla", "odd", SMALL["odd"], "float32")


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_without_a_gpu_it_says_so_and_measures_nothing(capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    assert device_check.main([f"--out={out}"]) == 2
    assert "no GPU was measured" in capsys.readouterr().err
    assert not out.exists()


def few(scale):
    """One case of a section, so that the test is of the script and not of every size."""
    found = device_cases.sections(scale)
    return {name: found[name][-1:] for name in ("tokens, k=1", "baselines")}


def test_all_of_it_at_tiny_sizes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "sections", few)
    some = [check for check in device_numbers.number_checks(wide=False) if check.size_name == "odd"]
    monkeypatch.setattr(device_check, "number_checks", lambda *, wide: iter(some))
    out = tmp_path / "rows.jsonl"
    assert device_check.main(["--allow_cpu", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert "No GPU was measured" in said
    rows = rows_of(out)
    assert [json.loads(line) for line in said.splitlines()[:-1]] == rows
    machine, *_, summary = rows
    assert (machine["row"], machine["measured_gpu"]) == ("machine", False)
    assert (summary["row"], summary["wrong"], summary["left_out"]) == ("summary", [], [])

    checked = {row["what"] for row in rows if row["row"] == "numbers"}
    assert {"grouped on xla, size odd, float32", "auto on auto, size odd, float32"} <= checked
    assert any("grouped on triton" in row["what"] for row in rows if row["row"] == "missing")
    assert [row["what"] for row in rows if row["row"] == "constant"] == list(device_cases.CONSTANTS)
    timed = {(row["section"], row["arm"]): row for row in rows if row["row"] == "time"}
    assert {arm for section, arm in timed if section == "baselines"} >= set(bench_arms())
    row = timed["tokens, k=1", "grouped"]
    assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert row["of_floor"] == pytest.approx(row["floor_us"] / row["median_us"])
    assert ("tokens, k=1", "sort") in timed


def bench_arms():
    return ["auto", "single_lora", "full_passes", "per_row_bgmv", "ragged_dot", "per_adapter_loop"]


def test_a_wrong_number_fails_the_check(monkeypatch, tmp_path):
    monkeypatch.setattr(device_check, "sections", lambda scale: {})
    monkeypatch.setattr(device_check, "CONSTANTS", {})
    right = device_numbers.lora_delta
    monkeypatch.setattr(device_check, "number_checks", lambda *, wide: iter([ODD]))
    monkeypatch.setattr(
        device_numbers, "lora_delta", lambda *args, **options: right(*args, **options) * 1.001
    )
    out = tmp_path / "rows.jsonl"
    assert device_check.main(["--allow_cpu", f"--out={out}"]) == 1
    assert rows_of(out)[-1]["wrong"] == [str(ODD)]


def test_a_kernel_that_raises_is_wrong_and_not_missing(monkeypatch, tmp_path):
    def broken(*args, **options):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(device_check, "sections", lambda scale: {})
    monkeypatch.setattr(device_check, "CONSTANTS", {})
    monkeypatch.setattr(device_check, "number_checks", lambda *, wide: iter([ODD]))
    monkeypatch.setattr(device_numbers, "lora_delta", broken)
    out = tmp_path / "rows.jsonl"
    assert device_check.main(["--allow_cpu", f"--out={out}"]) == 1
    (row,) = [row for row in rows_of(out) if row["row"] == "numbers"]
    assert row["error"] == "RuntimeError: out of registers"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_numbers_check_passes_and_is_not_lax(dtype):
    result = NumberCheck("all_slots", "xla", "odd", SMALL["odd"], dtype).run()
    assert result["ok"]
    assert 0 < result["worst"] <= 1


def test_what_is_expected_is_the_definition_and_its_gradient():
    case = make_case(SMALL["odd"])
    ids, ranks = np.asarray(case.routing.adapter_ids), np.asarray(case.ranks)
    weights = np.random.default_rng(1).standard_normal(case.base.shape)
    operands = {
        "x": case.x,
        "lora_a": case.lora_a,
        "lora_b": case.lora_b,
        "gates": case.routing.gates,
        "base": case.base,
    }
    found = expected(operands, ids, ranks, weights)
    np.testing.assert_allclose(found["y"], expected_by_loops(case), rtol=1e-12)

    def loss(operands):
        y = pallas_kernels.lora_delta(
            operands["x"],
            operands["lora_a"],
            operands["lora_b"],
            pallas_kernels.Routing(case.routing.adapter_ids, operands["gates"]),
            base=operands["base"],
            ranks=case.ranks,
            strategy="reference",
        )
        return jnp.sum(y * weights)

    for name, gradient in jax.jit(jax.grad(loss))(operands).items():
        if name != "base":
            np.testing.assert_allclose(found[name], gradient, rtol=2e-4, atol=2e-4)


def run_script(*arguments, code=""):
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", DEVICE_CHECK]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


DEVICE_CHECK = "pallas_kernels.device_check"


def test_it_stops_in_time_and_says_what_it_left_out(tmp_path):
    out = tmp_path / "rows.jsonl"
    done = run_script("--allow_cpu", "--minutes=0.005", f"--out={out}")
    assert done.returncode == 0, done.stderr
    summary = rows_of(out)[-1]
    assert summary["row"] == "summary"
    assert "N=64 D=32 r=4 K=16 k=2" in summary["left_out"]
    assert "cases left out for want of time" in done.stdout


def test_jax_and_numpy_are_all_it_imports(tmp_path):
    # A module set to None cannot be imported, as if it were not installed.
    code = (
        "import sys\n"
        "absent = 'jaxtyping', 'flax', 'absl', 'gin', 'matplotlib', 'optax', 'beartype'\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from pallas_kernels import device_check\n"
        "sys.exit(device_check.main(sys.argv[1:]))\n"
    )
    out = tmp_path / "rows.jsonl"
    done = run_script("--allow_cpu", "--minutes=0.005", f"--out={out}", code=code)
    assert done.returncode == 0, done.stderr


def test_the_sort_is_done_anew_for_every_call():
    inputs = bench.make_inputs(SMALL["odd"])
    plans = device_cases.sort_arm(inputs, calls=2).run(*inputs.arguments())
    leaves = [jax.tree.leaves(plan) for plan in plans]
    assert any(not np.array_equal(a, b) for a, b in zip(*leaves, strict=True))
