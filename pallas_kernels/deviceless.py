"""Compiles a function for a named GPU on a machine without one, and reports what XLA made of it.

    JAX_PLATFORMS=cpu python -m pallas_kernels.deviceless

compiles about twenty chosen shapes of `lora_delta` for an H200 in one process, prints a line each
and exits with 1 where a fact that must hold does not. It needs the extra `deviceless`.

Read structure from such a compilation (launches, CUDA graphs, copies, memory), never speed:
products of matrices are not tuned without the device.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from pallas_kernels.api import lora_delta
from pallas_kernels.shapes import SMOLLM2, ProblemSize
from pallas_kernels.types import Routing

TARGETS = pathlib.Path(__file__).parent / "targets"
# What Pallas asks of the device that it lowers for.
DEVICES = {"h200": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")}


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of the launch sequence; `captured` where it is part of a CUDA graph."""

    kind: str  # "kCustomKernel", "kGemm", "kCopy", "kWhile", ...
    name: str
    captured: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What XLA made of one function. Memory in bytes."""

    thunks: tuple[Thunk, ...]  # in launch order, the graphs themselves left out
    graphs: int
    hlo: str  # after optimisation
    argument_bytes: int
    output_bytes: int
    temp_bytes: int

    def count(self, *, opcodes: tuple[str, ...], size: int) -> int:
        """Instructions with one of `opcodes` (also inside fusions) that yield `size` elements."""
        found = re.findall(rf" = \w+\[([\d,]*)\]\S* (?:{'|'.join(opcodes)})\(", self.hlo)
        return sum(math.prod(int(d) for d in dims.split(",") if d) == size for dims in found)


def compile_for(
    function: Callable, *arguments: jax.ShapeDtypeStruct, device: str = "h200"
) -> Report:
    """Compiles `jax.jit(function)` for `arguments` (shapes, or pytrees of shapes) on `device`.

    Every run of two or more capturable steps becomes a CUDA graph here; on a device, XLA leaves
    runs of fewer than five uncaptured unless `--xla_gpu_graph_min_graph_size` says otherwise.
    Raises NotImplementedError where the CUDA compiler is not installed.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is unknown; known are {', '.join(DEVICES)}")
    mesh = _mesh(device)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=everywhere), arguments
    )
    with tempfile.TemporaryDirectory(prefix="deviceless_") as dump:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[device])):
            lowered = jax.jit(function).lower(*shapes)
        options: dict[str, str | bool] = {
            "xla_dump_to": dump,
            "xla_dump_hlo_as_text": True,
            "xla_gpu_graph_min_graph_size": "1",
        }
        compiled = lowered.compile(compiler_options=options)
        after = sorted(pathlib.Path(dump).glob("*thunk_sequence_after_thunk_passes.txt"))
        before = sorted(pathlib.Path(dump).glob("*thunk_sequence.txt"))
        thunks, graphs = parse_thunks((after or before)[-1].read_text())
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert hlo is not None
    return Report(
        thunks=thunks,
        graphs=graphs,
        hlo=hlo,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def parse_thunks(text: str) -> tuple[tuple[Thunk, ...], int]:
    """Thunks, and the number of CUDA graphs, of XLA's dump: what a step contains is indented."""
    thunks: list[Thunk] = []
    graphs = 0
    graph_indent = None
    for line in text.splitlines():
        match = re.match(r"(\s*)\d+:\s+(k\w+)\s*(?:\[[^\]]*\])?\s*([\w.\-]*)", line)
        if not match:
            continue
        indent, kind, name = len(match[1]), match[2], match[3]
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        if kind == "kCommandBuffer":
            graphs += 1
            graph_indent = indent
        else:
            thunks.append(Thunk(kind, name, captured=graph_indent is not None))
    return tuple(thunks), graphs


@functools.cache
def _mesh(device: str) -> jax.sharding.Mesh:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise NotImplementedError(
            "compiling for a GPU needs XLA's CUDA compiler, which is not installed. Use an "
            "environment of its own: pip install -c constraints.txt -e '.[deviceless]'"
        )
    # Asks for CUDA's run-time libraries otherwise, which compiling does not need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    target = (TARGETS / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=target)
    return topologies.make_mesh(topology, (1,), ("device",))


@dataclasses.dataclass(frozen=True)
class Case:
    """A routed projection in bfloat16 and the strategy that computes it."""

    strategy: str
    size: ProblemSize

    def __str__(self):
        s = self.size
        return (
            f"{self.strategy:9} N={s.num_tokens:<5} D={s.d_in:<4} F={s.d_out:<4} "
            f"R={s.rank:<2} K={s.num_slots:<2} k={s.top_k}"
        )


def _paper(*, num_tokens: int, num_slots: int, top_k: int = 2) -> ProblemSize:
    """The paper's projection, 4096 to 4096 at rank 64."""
    return ProblemSize(
        num_tokens=num_tokens, num_slots=num_slots, top_k=top_k, d_in=4096, d_out=4096, rank=64
    )


_TOKENS = (1, 16, 128, 1024, 8192)
_DEMO = [SMOLLM2[name] for name in ("q_proj", "up_proj", "down_proj")]
CASES = (
    *(Case("all_slots", _paper(num_tokens=n, num_slots=4)) for n in _TOKENS),
    Case("all_slots", _paper(num_tokens=128, num_slots=8)),
    Case("all_slots", _paper(num_tokens=1024, num_slots=4, top_k=1)),
    *(Case("all_slots", size) for size in _DEMO),
    *(Case("grouped", _paper(num_tokens=n, num_slots=8)) for n in _TOKENS),
    Case("grouped", _paper(num_tokens=1024, num_slots=64)),
    Case("grouped", _paper(num_tokens=1024, num_slots=8, top_k=1)),
    *(Case("grouped", size) for size in _DEMO),
)


def compile_case(case: Case) -> Report:
    """The routed delta added to its base, sorting included where the strategy sorts."""

    def routed(x, lora_a, lora_b, adapter_ids, gates, base):
        routing = Routing(adapter_ids=adapter_ids, gates=gates)
        return lora_delta(x, lora_a, lora_b, routing, base=base, strategy=case.strategy)

    s = case.size
    shapes = [
        ((s.num_tokens, s.d_in), jnp.bfloat16),
        ((s.num_slots, s.rank, s.d_in), jnp.bfloat16),
        ((s.num_slots, s.rank, s.d_out), jnp.bfloat16),
        ((s.num_tokens, s.top_k), jnp.int32),
        ((s.num_tokens, s.top_k), jnp.float32),
        ((s.num_tokens, s.d_out), jnp.bfloat16),
    ]
    return compile_for(routed, *(jax.ShapeDtypeStruct(*each) for each in shapes))


def problems(case: Case, report: Report) -> list[str]:
    """The facts that must hold and do not: what it moves, what it holds, how it is launched."""
    wrong = []
    s = case.size
    columns = s.num_slots * s.rank
    for name, size in (("lora_a", columns * s.d_in), ("lora_b", columns * s.d_out)):
        if moved := report.count(opcodes=("copy", "transpose", "gather"), size=size):
            wrong.append(f"{moved} copies of {name}")

    # A float32 sum of the output's size is kept before it is rounded; all_slots keeps h as well.
    # 4 MiB are for the partial sums of split products, and for what sorting needs.
    width = s.d_out + (columns if case.strategy == "all_slots" else 0)
    allowed = 4 * s.num_tokens * width + 4 * 2**20
    if report.temp_bytes > allowed:
        wrong.append(f"{report.temp_bytes} bytes of temporary memory, more than {allowed}")

    if case.strategy == "all_slots":  # the sorted path is a loop, which XLA does not capture
        outside = [each.name for each in report.thunks if not each.captured]
        if outside or report.graphs != 1:
            wrong.append(f"{report.graphs} graphs instead of 1, outside of them: {outside}")
        if len(report.thunks) > 5:
            wrong.append(f"{len(report.thunks)} launches, more than 5")
    return wrong


def main() -> int:
    """Compiles the chosen cases; 1 where a fact does not hold."""
    jax.config.update("jax_platforms", "cpu")  # the plug-in would look for a GPU otherwise
    failed = 0
    for case in CASES:
        start = time.monotonic()
        report = compile_case(case)
        wrong = problems(case, report)
        failed += bool(wrong)
        captured = sum(each.captured for each in report.thunks)
        print(
            f"{case}  {len(report.thunks):3} steps, {captured:3} in {report.graphs} graphs, "
            f"temp {report.temp_bytes / 2**20:7.1f} MiB, {time.monotonic() - start:4.1f} s  "
            + ("; ".join(wrong) or "ok"),
            flush=True,
        )
    print(f"{len(CASES)} shapes compiled for an H200, {failed} with a fact that does not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
