"""Compiling for a GPU without one: is the report read right, and can its facts fail?"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import deviceless
from pallas_kernels.shapes import ProblemSize

DUMP = """\
000: kCommandBuffer [source | next=004 (1)]
    001: kCustomKernel [source       | next=002 (1)] gemm_fusion_dot_2 grid: [16384, 1, 1]
    002: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion grid: [128, 1, 1]

003: kCopy [prev=000 (1) | next=004 (1)] copy.3
004: kWhile [prev=003 (1) | sink] while.1
    body:
        005: kGemm [source | sink] custom-call.2
"""


def test_thunks_are_read_from_the_dump():
    thunks, graphs = deviceless.parse_thunks(DUMP)
    assert graphs == 1
    assert [(each.kind, each.name, each.captured) for each in thunks] == [
        ("kCustomKernel", "gemm_fusion_dot_2", True),
        ("kCustomKernel", "loop_add_fusion", True),
        ("kCopy", "copy.3", False),
        ("kWhile", "while.1", False),
        ("kGemm", "custom-call.2", False),
    ]


def test_instructions_are_counted_by_result_size():
    hlo = """
      %transpose.1 = bf16[4096,256]{1,0} transpose(%a), dimensions={1,0}
      ROOT %copy = f32[8]{0} copy(%b)
    """
    report = deviceless.Report(
        thunks=(), graphs=0, hlo=hlo, argument_bytes=0, output_bytes=0, temp_bytes=0
    )
    assert report.count(opcodes=("copy", "transpose"), size=4096 * 256) == 1
    assert report.count(opcodes=("copy",), size=8) == 1
    assert report.count(opcodes=("transpose",), size=8) == 0


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'b200' is unknown; known are h200"):
        deviceless.compile_for(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32), device="b200")


def test_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    deviceless._mesh.cache_clear()
    with pytest.raises(NotImplementedError, match=r"\[deviceless\]"):
        deviceless.compile_for(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32))


SIZE = ProblemSize(num_tokens=128, d_in=256, d_out=512, rank=16, num_slots=4, top_k=2)
CASE = deviceless.Case("all_slots", SIZE)


@pytest.mark.deviceless
def test_all_slots_is_one_graph_without_copies():
    report = deviceless.compile_case(CASE)
    assert deviceless.problems(CASE, report) == []
    assert 2 <= len(report.thunks) <= 5
    assert report.output_bytes == 128 * 512 * 2


@pytest.mark.deviceless
def test_what_must_not_be_is_reported():
    size = dataclasses.replace(SIZE, num_tokens=1024)

    def wasteful(x, lora_a, lora_b, ids, rounds):
        turned = jax.lax.optimization_barrier(jnp.swapaxes(lora_a, 1, 2))
        per_token = jax.lax.optimization_barrier(lora_b[ids])
        h = jnp.einsum("nd,ndr->nr", x, turned[ids])
        y = jnp.einsum("nr,nrf->nf", h, per_token)
        return turned, jax.lax.fori_loop(0, rounds, lambda i, y: jnp.sin(y), y)

    shapes = [
        ((size.num_tokens, size.d_in), jnp.bfloat16),
        ((size.num_slots, size.rank, size.d_in), jnp.bfloat16),
        ((size.num_slots, size.rank, size.d_out), jnp.bfloat16),
        ((size.num_tokens,), jnp.int32),
        ((), jnp.int32),
    ]
    report = deviceless.compile_for(wasteful, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    wrong = deviceless.problems(deviceless.Case("all_slots", size), report)
    for each in ("1 copies of lora_a", "temporary memory", "outside of them", "launches"):
        assert any(each in found for found in wrong), (each, wrong)
