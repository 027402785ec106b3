"""Compiling for a GPU without one: is the report read right, and can its facts fail?"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import Routing, deviceless, lora_delta
from pallas_kernels.shapes import ProblemSize

DUMP = """\
000: kCommandBuffer [source | next=004 (1)]
    001: kCustomKernel [source       | next=002 (1)] gemm_fusion_dot_2 grid: [16384, 1, 1]
    002: kCustomKernel [prev=001 (1) | sink        ] ours__1 grid: [4, 1, 1] threads: [128, 1, 1]  \
shared_memory: 16384 bytes

003: kCopy [prev=000 (1) | next=004 (1)] copy.3
004: kWhile [prev=003 (1) | sink] while.1
    body:
        005: kGemm [source | sink] custom-call.2
"""
CALL = (
    '  %pallas_call.3 = bf16[8]{{0}} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
    'metadata={{op_name="jit(f)/ours"}}, backend_config={{grid_x = 4 : i32, ir = "ML\\EFR", '
    'name = "{name}", num_stages = 2 : i32}}\n'
)
PTX = """\
.target sm_90a
.visible .entry ours(
 wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
.visible .entry ours__1(
 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
 cp.async.cg.shared.global
"""


def test_thunks_are_read_from_the_dump():
    thunks, graphs = deviceless.parse_thunks(DUMP)
    assert graphs == 1
    assert [(each.kind, each.name, each.captured) for each in thunks] == [
        ("kCustomKernel", "gemm_fusion_dot_2", True),
        ("kCustomKernel", "ours__1", True),
        ("kCopy", "copy.3", False),
        ("kWhile", "while.1", False),
        ("kGemm", "custom-call.2", False),
    ]
    assert (thunks[1].threads, thunks[1].shared_bytes) == (128, 16384)


def test_kernels_are_told_apart_and_none_is_lost():
    thunks, _ = deviceless.parse_thunks(DUMP)
    ptx = dict(deviceless._ptx_by_kernel([PTX, ".target sm_90a\n.global .b8 constants[4];"]))
    assert list(ptx) == ["ours", "ours__1"]
    hlo = CALL.format(name="ours") + CALL.format(name="theirs")
    kernels, lost = deviceless._kernels(thunks, hlo, ptx, lambda ptx, name: (40, 8, 256))
    by_name = {each.name: each for each in kernels}
    assert by_name["ours__1"] == deviceless.Kernel(
        name="ours__1", pallas=True, launches=1, threads=128, shared_bytes=16384 + 256,
        instructions=("mma.sync", "cp.async"), registers=40, spill_bytes=8,
    )  # fmt: skip
    assert not by_name["gemm_fusion_dot_2"].pallas
    assert by_name["gemm_fusion_dot_2"].registers is None
    assert lost == ("theirs",)
    # called twice, launched once
    assert deviceless._kernels(thunks, 2 * CALL.format(name="ours"), ptx, None)[1] == ("ours",)


def test_the_assemblers_words_are_read_for_one_kernel():
    text = """\
ptxas info    : 640 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'ours' for 'sm_90a'
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 29 registers, used 1 barriers, 384 bytes smem
"""
    assert deviceless.parse_ptxas(text, "ours") == (29, 28, 384)
    assert deviceless.parse_ptxas(text, "other") == (255, 8, 0)
    with pytest.raises(RuntimeError, match="nothing of kernel 'third'"):
        deviceless.parse_ptxas(text, "third")


def report(**fields) -> deviceless.Report:
    nothing = {
        "thunks": (), "graphs": 1, "kernels": (), "lost": (), "hlo": "", "argument_bytes": 0,
        "output_bytes": 0, "alias_bytes": 0, "temp_bytes": 0,
    }  # fmt: skip
    return deviceless.Report(**nothing | fields)


def test_instructions_are_counted_by_result_size():
    hlo = """
      %transpose.1 = bf16[4096,256]{1,0} transpose(%a), dimensions={1,0}
      ROOT %copy = f32[8]{0} copy(%b)
    """
    made = report(hlo=hlo)
    assert made.count(opcodes=("copy", "transpose"), size=4096 * 256) == 1
    assert made.count(opcodes=("copy",), size=8) == 1
    assert made.count(opcodes=("transpose",), size=8) == 0


def test_what_is_written_is_told_from_what_is_named():
    hlo = """
%fused (p: f32[8]) -> f32[8] {
  ROOT %slice.9 = bf16[4,16,256]{2,1,0} slice(%p), slice={[0:4]}
}

ENTRY %main (w: bf16[3,4,16,256]) -> f32[2] {
  %w = bf16[4,16,256]{2,1,0} parameter(0)
  %bitcast.1 = bf16[64,256]{1,0} bitcast(%w)
  %wrapped_slice = bf16[1,4,16,256]{3,2,1,0} fusion(%w), kind=kLoop
  %both.2 = (f32[2]{0}, f32[16384]{0}) fusion(%w), kind=kInput
  ROOT %get-tuple-element.3 = f32[16384]{0} get-tuple-element(%both.2), index=1
}
"""
    made = report(hlo=hlo)
    assert made.writes(4 * 16 * 256) == ["wrapped_slice", "both.2"]
    assert made.writes(2) == ["both.2"]
    assert made.writes(3) == []


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="'b200' is unknown; known are h200"):
        deviceless.compile_for(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32), device="b200")


def test_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    deviceless.devices.cache_clear()
    with pytest.raises(NotImplementedError, match=r"\[deviceless\]"):
        deviceless.compile_for(jnp.sin, jax.ShapeDtypeStruct((2,), jnp.float32))


SIZE = ProblemSize(num_tokens=1024, d_in=256, d_out=512, rank=16, num_slots=4, top_k=1)
CASE = deviceless.Case("grouped", SIZE)
KERNEL = deviceless.Kernel(
    name="shrink", pallas=True, launches=1, threads=128, shared_bytes=1024,
    instructions=("wgmma", "cp.async"), registers=80, spill_bytes=0,
)  # fmt: skip
STEP = deviceless.Thunk("kCustomKernel", "shrink", captured=True)
SOUND = report(thunks=(STEP, STEP), kernels=(KERNEL,))


def broken(kernel=None, **fields):
    kernels = {} if kernel is None else {"kernels": (dataclasses.replace(KERNEL, **kernel),)}
    return dataclasses.replace(SOUND, **kernels, **fields)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (broken({"spill_bytes": 8}), "shrink spills 8 bytes"),
        (broken({"shared_bytes": 232449}), "shrink uses 232449 bytes of shared memory"),
        (broken({"registers": None, "spill_bytes": None}), "registers of shrink are unknown"),
        (broken({"instructions": ("wgmma", "mma.sync")}), "rows by mma.sync"),
        (broken({"instructions": ()}), "no wgmma in tiles of"),
        (broken(lost=("expand",)), "Pallas kernel expand has no launch"),
        (broken(hlo=" = bf16[1024,512]{1,0} copy(%y)"), "1 copies of the output"),
        (broken(hlo=" = bf16[64,256]{1,0} transpose(%a)"), "1 copies of lora_a"),
        (broken(hlo=" = bf16[4,16,512]{2,1,0} copy(%b)"), "1 copies of lora_b"),
        (broken(hlo=" = bf16[1024,256]{1,0} gather(%x)"), "1 copies of x or gathered x"),
        (
            broken(thunks=(STEP, deviceless.Thunk("kCopy", "kCopy", captured=True))),
            "1 steps that only copy",
        ),
        (broken(temp_bytes=7 * 2**20), "more than 6291456"),
        (broken(thunks=(STEP, STEP, STEP)), "3 launches, more than 2"),
        (broken(graphs=2), "2 graphs instead of 1"),
        (
            broken(thunks=(STEP, dataclasses.replace(STEP, captured=False))),
            "outside of them: ['kCustomKernel shrink']",
        ),
    ],
)
def test_every_fact_can_fail(made, problem):
    assert deviceless.problems(CASE, SOUND) == []
    (found,) = deviceless.problems(CASE, made)
    assert problem in found


def test_small_tiles_and_float32_need_no_wgmma():
    small = dataclasses.replace(CASE, size=dataclasses.replace(SIZE, num_tokens=16))
    single = dataclasses.replace(CASE, dtype="float32")
    for case in (small, single):
        assert deviceless.problems(case, broken({"instructions": ("mma.sync",)})) == []


@pytest.mark.parametrize(
    ("slots", "top_k", "most"), [(4, 1, 1.1), (8, 1, 1.1), (64, 1, 1.1), (8, 2, 1.3)]
)
@pytest.mark.parametrize("tokens", [1024, 8192, 65536])
def test_grouped_moves_little_more_than_the_floor(tokens, slots, top_k, most):
    size = ProblemSize(
        num_tokens=tokens, d_in=4096, d_out=4096, rank=64, num_slots=slots, top_k=top_k
    )
    assert 1 <= deviceless.over_floor(deviceless.Case("grouped", size)) < most
    assert deviceless.over_floor(deviceless.Case("grouped", size, part="backward")) is None


def test_flags_name_shapes_and_rows_are_not_made_twice(monkeypatch, tmp_path, capsys):
    made = []

    def measure(case):
        made.append(case)
        return {"case": str(case), "problems": ["bad"] if case.size.num_tokens == 7 else []}

    monkeypatch.setattr(deviceless, "measure", measure)
    monkeypatch.setattr(deviceless, "_mesh", lambda device: None)
    flags = ["--strategy", "grouped", "--d_in", "64", "--results", str(tmp_path / "rows.jsonl")]
    assert deviceless.main([*flags, "--num_tokens", "5", "6", "--backward"]) == 0
    assert [(c.size.num_tokens, c.size.d_in, c.part) for c in made] == [
        (5, 64, "forward"), (5, 64, "backward"), (6, 64, "forward"), (6, 64, "backward"),
    ]  # fmt: skip
    assert deviceless.main([*flags, "--num_tokens", "6", "7"]) == 1
    assert [c.size.num_tokens for c in made[4:]] == [7]
    assert deviceless.main([*flags, "--num_tokens", "7", "--shard", "2/2"]) == 0
    assert "2 shapes compiled for an H200, 1 with a fact" in capsys.readouterr().out


def test_the_whole_table_has_each_row_once():
    rows = [str(case) for case in deviceless.table()]
    assert len(rows) == len(set(rows)) == 522
    assert {str(each) for each in deviceless.CASES if each.size.d_in != 4096}.isdisjoint(rows)


def product(x, w, *, rows, name, warps=4):
    """x·w in a Pallas kernel of one program for each `rows` rows."""

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32).astype(
            out_ref.dtype
        )

    from jax.experimental.pallas import triton as plgpu

    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows,),
        in_specs=[
            pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0)),
            pl.BlockSpec(w.shape, lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, w.shape[1]), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2),
        name=name,
    )(x, w)


@pytest.mark.deviceless
def test_registers_and_instructions_of_pallas_kernels():
    def function(x, w):
        y = product(x, w, rows=64, name="multiply")
        y = product(y, w, rows=64, name="multiply")
        return jnp.sin(product(y, w, rows=16, name="multiply"))

    shapes = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((256, 64), (64, 64))]
    made = deviceless.compile_for(function, *shapes, resources=True)
    assert made.graphs == 1 and made.outside == [] and made.lost == () and made.copies == []
    tall, flat, rest = made.kernels
    assert (tall.name, tall.pallas, tall.launches, tall.threads) == ("multiply", True, 2, 128)
    assert tall.instructions == ("wgmma",)
    assert "mma.sync" in flat.instructions and flat.pallas and flat.launches == 1
    assert not rest.pallas and rest.instructions == ()
    assert tall.shared_bytes >= 2 * (64 + 64) * 64
    for kernel in made.kernels:
        assert 8 <= kernel.registers <= 255 and kernel.spill_bytes == 0
    assert deviceless.compile_for(function, *shapes).kernels[0].registers is None


@pytest.mark.deviceless
def test_spills_are_seen():
    def function(x, w):
        return product(x, w, rows=64, name="too_large")

    shapes = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((256, 64), (64, 128))]
    (kernel,) = deviceless.compile_for(function, *shapes, resources=True).kernels
    assert kernel.spill_bytes == 0
    shapes[1] = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    (kernel,) = deviceless.compile_for(function, *shapes, resources=True).kernels
    assert kernel.spill_bytes > 0


@pytest.mark.deviceless
def test_what_does_not_fit_the_device_is_a_row_and_not_the_end(monkeypatch):
    def compile_case(case, *, resources):
        shapes = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in ((256, 1024), (1024, 256))]
        return deviceless.compile_for(
            lambda x, w: product(x, w, rows=256, name="huge"), *shapes, resources=resources
        )

    monkeypatch.setattr(deviceless, "compile_case", compile_case)
    row = deviceless.measure(CASE)
    assert "hared memory" in row["problems"][0]
    assert row["problems"][0] in deviceless.line(row)


@pytest.mark.deviceless
def test_all_slots_is_one_graph_without_copies():
    size = ProblemSize(num_tokens=128, d_in=256, d_out=512, rank=16, num_slots=4, top_k=2)
    case = deviceless.Case("all_slots", size)
    made = deviceless.compile_case(case, resources=True)
    assert deviceless.problems(case, made) == []
    assert [each.name for each in made.kernels] == ["all_slots_shrink", "all_slots_expand"]
    assert made.output_bytes == 128 * 512 * 2


@pytest.mark.deviceless
def test_what_must_not_be_is_reported():
    def wasteful(x, lora_a, lora_b, ids, rounds):
        turned = jax.lax.optimization_barrier(jnp.swapaxes(lora_a, 1, 2))
        per_token = jax.lax.optimization_barrier(lora_b[ids])
        h = jnp.einsum("nd,ndr->nr", x, turned[ids])
        y = jnp.einsum("nr,nrf->nf", h, per_token)
        return turned, jax.lax.fori_loop(0, rounds, lambda i, y: jnp.sin(y), y)

    shapes = [
        ((SIZE.num_tokens, SIZE.d_in), jnp.bfloat16),
        ((SIZE.num_slots, SIZE.rank, SIZE.d_in), jnp.bfloat16),
        ((SIZE.num_slots, SIZE.rank, SIZE.d_out), jnp.bfloat16),
        ((SIZE.num_tokens,), jnp.int32),
        ((), jnp.int32),
    ]
    made = deviceless.compile_for(wasteful, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    wrong = deviceless.problems(deviceless.Case("all_slots", SIZE), made)
    for each in ("1 copies of lora_a", "temporary memory", "outside of them", "launches"):
        assert any(each in found for found in wrong), (each, wrong)


@pytest.mark.deviceless
def test_kernels_run_inside_shard_map():
    mesh = deviceless._mesh("h200")
    tokens, everywhere = jax.P("device"), jax.P()

    def loss(x, lora_a, lora_b, ids, gates, base):
        def update(x, lora_a, lora_b, ids, gates, base):
            routing = Routing(ids, gates)
            return lora_delta(x, lora_a, lora_b, routing, base=base, strategy="grouped")

        y = jax.shard_map(
            update,
            mesh=mesh,
            in_specs=(tokens, everywhere, everywhere, tokens, tokens, tokens),
            out_specs=tokens,
        )(x, lora_a, lora_b, ids, gates, base)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    shapes = [
        ((1024, 512), jnp.bfloat16),
        ((8, 64, 512), jnp.bfloat16),
        ((8, 64, 512), jnp.bfloat16),
        ((1024, 2), jnp.int32),
        ((1024, 2), jnp.float32),
        ((1024, 512), jnp.bfloat16),
    ]
    gradient = jax.grad(loss, argnums=(0, 1, 2, 4, 5))
    report = deviceless.compile_for(gradient, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    ours = {each.name.split("__")[0] for each in report.kernels if each.pallas}
    assert ours == {"token_sort_rank", "lora_shrink", "lora_expand", "lora_outer"}
    assert report.graphs == 1 and not report.outside
