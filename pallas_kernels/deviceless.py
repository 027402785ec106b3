"""Compiles a function for a named GPU on a machine without one, and reports what XLA made of it.

    JAX_PLATFORMS=cpu python -m pallas_kernels.deviceless
    JAX_PLATFORMS=cpu python -m pallas_kernels.deviceless --num_tokens 1 1024 --strategy grouped
    JAX_PLATFORMS=cpu python -m pallas_kernels.deviceless --all --results runs/deviceless.jsonl

prints a line for each shape of `lora_delta`, compiled for an H200 in one process: the chosen ones,
those that the flags name, or the whole table (522 rows of one to three seconds; --results keeps
what is done, and --shard 1/2 and 2/2 share it between two processes). It exits with 1 where a fact
that must hold does not. It needs the extra `deviceless`.

Read structure from such a compilation (launches, CUDA graphs, copies, memory, registers), never
speed: products of matrices are not tuned without the device.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from pallas_kernels import cost
from pallas_kernels.api import lora_delta, make_plan
from pallas_kernels.shapes import SMOLLM2, ProblemSize
from pallas_kernels.types import DispatchPlan, Routing, Tiles

TARGETS = pathlib.Path(__file__).parent / "targets"
# What Pallas asks of the device that it lowers for.
DEVICES = {"h200": AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")}
SHARED_MEMORY = 227 * 1024  # what one block may use on Hopper
WGMMA_ROWS = 64  # of a tile, from which four warps multiply by wgmma


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One step of the launch sequence; `captured` where it is part of a CUDA graph."""

    kind: str  # "kCustomKernel", "kGemm", "kCopy", "kWhile", ...
    name: str
    captured: bool
    threads: int = 0  # in a block, of a kernel
    shared_bytes: int = 0  # dynamic shared memory of a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel, however often it is launched. `registers` is for each thread."""

    name: str  # of pallas_call, or XLA's own; "__1" and so on where two differ in a shape
    pallas: bool  # ours, by pallas_call
    launches: int
    threads: int
    shared_bytes: int  # of a block, dynamic and static
    instructions: tuple[str, ...]  # which of wgmma, mma.sync and cp.async it holds
    # None where nobody asked for them, or where XLA wrote no PTX for this kernel.
    registers: int | None
    spill_bytes: int | None  # stores and loads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What XLA made of one function. Memory in bytes, of one device."""

    thunks: tuple[Thunk, ...]  # in launch order, the graphs themselves left out
    graphs: int
    kernels: tuple[Kernel, ...]
    # Pallas kernels that the program calls and no launch was found of: not to be passed over.
    lost: tuple[str, ...]
    hlo: str  # after optimisation
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the output, what lies where a donated argument lay
    temp_bytes: int

    @property
    def outside(self) -> list[str]:
        """Steps that are in no CUDA graph."""
        return [f"{each.kind} {each.name}" for each in self.thunks if not each.captured]

    @property
    def copies(self) -> list[str]:
        """Steps that only copy."""
        copying = ("kCopy", "kDeviceToDeviceCopy", "kMemcpy")
        by_kind = (each for each in self.thunks if each.kind in copying)
        by_name = (each for each in self.thunks if re.match(r"(wrapped_)?copy", each.name))
        return [each.name for each in (*by_kind, *by_name)]

    def writes(self, size: int) -> list[str]:
        """Steps that write a result of `size` elements to memory, by name."""
        entry = self.hlo.partition("\nENTRY ")[2]
        found = []
        for name, results, opcode in re.findall(r"%([\w.\-]+) = (.+?) ([\w\-]+)\(", entry):
            if opcode in ("parameter", "bitcast", "get-tuple-element", "tuple", "constant"):
                continue  # these name memory and write none
            shapes = re.findall(r"\w+\[([\d,]*)\]", results)
            if any(math.prod(int(d) for d in dims.split(",") if d) == size for dims in shapes):
                found.append(name)
        return found

    def count(self, *, opcodes: tuple[str, ...], size: int) -> int:
        """Instructions with one of `opcodes` (also inside fusions) that yield `size` elements."""
        found = re.findall(rf" = \w+\[([\d,]*)\]\S* (?:{'|'.join(opcodes)})\(", self.hlo)
        return sum(math.prod(int(d) for d in dims.split(",") if d) == size for dims in found)


def compile_for(
    function: Callable,
    *arguments,
    device: str = "h200",
    mesh: jax.sharding.Mesh | None = None,
    donate: Sequence[int] = (),
    resources: bool = False,
) -> Report:
    """Compiles `jax.jit(function)` for `arguments` (shapes, or pytrees of shapes) on `device`.

    Every run of two or more capturable steps becomes a CUDA graph here; on a device, XLA leaves
    runs of fewer than five uncaptured unless `--xla_gpu_graph_min_graph_size` says otherwise.

    mesh       of `devices(n)`: the program of each of them, the arguments split as their
               shardings say. None: of one device
    donate     indices of arguments whose memory the result may take, as `donate_argnums`
    resources  also assemble every kernel, for its registers and spills

    Raises ValueError for an unknown device, and NotImplementedError where the CUDA compiler is not
    installed.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is unknown; known are {', '.join(DEVICES)}")
    shapes = arguments
    if mesh is None:
        everywhere = NamedSharding(_mesh(device), PartitionSpec())
        shapes = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=everywhere), shapes
        )
    with tempfile.TemporaryDirectory(prefix="deviceless_") as folder:
        dump = pathlib.Path(folder)
        # A mesh of such devices says itself what they are.
        with lowering_for(device) if mesh is None else jax.set_mesh(mesh):
            lowered = jax.jit(function, donate_argnums=donate).lower(*shapes)
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_gpu_graph_min_graph_size": "1",
        }
        compiled = lowered.compile(compiler_options=options)
        after = sorted(dump.glob("*thunk_sequence_after_thunk_passes.txt"))
        before = sorted(dump.glob("*thunk_sequence.txt"))
        thunks, graphs = parse_thunks((after or before)[-1].read_text())
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert hlo is not None
        ptx = dict(_ptx_by_kernel(path.read_text() for path in dump.glob("*.ptx")))
        kernels, lost = _kernels(thunks, hlo, ptx, assemble if resources else None)
    return Report(
        thunks=thunks,
        graphs=graphs,
        kernels=kernels,
        lost=lost,
        hlo=hlo,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def lowering_for(device: str):
    """A context in which tracing is for `device`: paths are chosen and kernels lowered for it."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[device]))


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
            continue
        threads = re.search(r"threads: \[(\d+), (\d+), (\d+)\]", line)
        shared = re.search(r"shared_memory: (\d+) bytes", line)
        thunks.append(
            Thunk(
                kind,
                name,
                captured=graph_indent is not None,
                threads=math.prod(map(int, threads.groups())) if threads else 0,
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(thunks), graphs


def _ptx_by_kernel(texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in texts:
        # A module without a kernel holds constants.
        yield from ((name, text) for name in re.findall(r"\.entry\s+([\w$]+)", text))


def _kernels(
    thunks: Sequence[Thunk],
    hlo: str,
    ptx: dict[str, str],
    assembler: Callable[[str, str], tuple[int, int, int]] | None,
) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """The kernels of a launch sequence, and the Pallas calls of `hlo` that have no launch."""
    # The text of a call holds the whole kernel as bytes; its name stands at the end of the line.
    called = collections.Counter(
        re.findall(
            r'custom_call_target="__gpu\$xla\.gpu\.triton".* name = "([^"]+)"[^"]*$',
            hlo,
            re.MULTILINE,
        )
    )
    launched = collections.Counter(each.name for each in thunks if each.kind == "kCustomKernel")
    kernels = []
    found: collections.Counter[str | None] = collections.Counter()
    for name, launches in launched.items():
        first = next(each for each in thunks if each.name == name)
        origin = re.sub(r"__\d+$", "", name)
        pallas = next((each for each in (name, origin) if each in called), None)
        found[pallas] += launches
        text = ptx.get(name, "")
        static, registers, spills = 0, None, None
        if assembler is not None and text:
            registers, spills, static = assembler(text, name)
        kernels.append(
            Kernel(
                name=name,
                pallas=pallas is not None,
                launches=launches,
                threads=first.threads,
                shared_bytes=first.shared_bytes + static,
                instructions=_instructions(text, name),
                registers=registers,
                spill_bytes=spills,
            )
        )
    lost = tuple(name for name, calls in called.items() if found[name] < calls)
    return tuple(kernels), lost


def _instructions(ptx: str, kernel: str) -> tuple[str, ...]:
    bodies = re.split(r"\.entry\s+", ptx)[1:]
    body = next((each for each in bodies if re.match(rf"{re.escape(kernel)}\b", each)), "")
    known = {
        "wgmma": r"wgmma\.mma_async",
        "mma.sync": r"\bmma\.sync",
        "cp.async": r"cp\.async\.c[ag]",
    }
    return tuple(name for name, pattern in known.items() if re.search(pattern, body))


def assemble(ptx: str, kernel: str) -> tuple[int, int, int]:
    """Registers of a thread, bytes spilled (stores and loads) and static shared memory, by ptxas.

    Raises RuntimeError with the assembler's own words where it fails.
    """
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_ptxas(), "-v", f"-arch={target[1]}", file.name, "-o", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"ptxas cannot assemble kernel {kernel!r}: {result.stderr.strip()}")
    return parse_ptxas(result.stderr, kernel)


def parse_ptxas(text: str, kernel: str) -> tuple[int, int, int]:
    """`assemble`'s numbers from what `ptxas -v` prints."""
    _, _, own = text.partition(f"Compiling entry function '{kernel}'")
    own = own.partition("Compiling entry function")[0]
    registers = re.search(r"Used (\d+) registers", own)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", own)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas says nothing of kernel {kernel!r}: {text.strip()}")
    static = re.search(r"(\d+) bytes smem", own)
    return int(registers[1]), int(spills[1]) + int(spills[2]), int(static[1]) if static else 0


@functools.cache
def _ptxas() -> str:
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia and nvidia.submodule_search_locations) or ():
        for path in sorted(pathlib.Path(root).rglob("bin/ptxas")):
            return str(path)
    raise NotImplementedError(
        "registers and spills need ptxas, which is not installed: it comes with nvidia-cuda-nvcc, "
        "in the extra 'deviceless'. Leave resources=True out, or install it"
    )


def _mesh(device: str) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(devices(1, device=device), ("device",))


@functools.cache
def devices(count: int, *, device: str = "h200") -> list:
    """So many devices of one process to compile for, as if they stood in one node.

    Raises NotImplementedError where the CUDA compiler is not installed.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise NotImplementedError(
            "compiling for a GPU needs XLA's CUDA compiler, which is not installed. Use an "
            "environment of its own: pip install -c constraints.txt -e '.[deviceless]'"
        )
    # Asks for CUDA's run-time libraries otherwise, which compiling does not need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    target = (TARGETS / f"{device}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=target
    )
    return list(topology.devices)


PARTS = ("forward", "backward", "plan")
STRATEGIES = ("all_slots", "grouped", "bgmv")


@dataclasses.dataclass(frozen=True)
class Case:
    """A routed projection and the strategy that computes it.

    part  "forward": the delta added to its base, with the plan given, which projections share;
          "backward": all gradients; "plan": the sort that makes the plan
    """

    strategy: str
    size: ProblemSize
    part: str = "forward"
    dtype: str = "bfloat16"
    backend: str = "auto"

    def __post_init__(self):
        if self.part not in PARTS:
            raise ValueError(f"part is {self.part!r}; expected one of {', '.join(PARTS)}")

    def __str__(self):
        s = self.size
        return (
            f"{self.strategy:9} {self.part:8} N={s.num_tokens:<5} D={s.d_in:<4} F={s.d_out:<4} "
            f"R={s.rank:<3} K={s.num_slots:<2} k={s.top_k} {self.dtype}"
            + (f" on {self.backend}" if self.backend != "auto" else "")
        )

    def routing(self) -> Routing:
        """Shapes of the decision."""
        shape = (self.size.num_tokens, self.size.top_k)
        return jax.eval_shape(lambda: Routing(jnp.zeros(shape, jnp.int32), jnp.zeros(shape)))

    def make_plan(self, routing: Routing):
        """The plan of a decision, None where the strategy needs none."""
        return make_plan(routing, self.size.num_slots, strategy=self.strategy, backend=self.backend)

    def plan(self):
        """Shapes of the plan, as made for a GPU."""
        with lowering_for("h200"):
            return jax.eval_shape(self.make_plan, self.routing())

    def tile_rows(self) -> int:
        """Rows of a tile on a GPU, 0 where there are no tiles."""
        if (plan := self.plan()) is None:
            return 0
        return _on_gpu(plan).block


def _on_gpu(plan: DispatchPlan) -> Tiles:
    """The tiles that a GPU uses, of those that a plan holds for each platform."""
    return plan.tiles.get("cuda") or next(iter(plan.tiles.values()))


def _paper(*, num_tokens: int, num_slots: int, top_k: int = 2, rank: int = 64) -> ProblemSize:
    """The paper's projection, 4096 to 4096, at rank 64 where nothing else is said."""
    return ProblemSize(
        num_tokens=num_tokens, num_slots=num_slots, top_k=top_k, d_in=4096, d_out=4096, rank=rank
    )


_DEMO = [SMOLLM2[name] for name in ("q_proj", "up_proj", "down_proj")]
CASES = (
    *(Case("all_slots", _paper(num_tokens=n, num_slots=4)) for n in (1, 160, 1024, 8192)),
    Case("all_slots", _paper(num_tokens=160, num_slots=8, rank=16)),
    Case("all_slots", _paper(num_tokens=1024, num_slots=4, top_k=1), part="backward"),
    *(Case("all_slots", size) for size in _DEMO),
    Case("bgmv", _paper(num_tokens=1, num_slots=64)),
    Case("bgmv", _paper(num_tokens=32, num_slots=64, top_k=1)),
    *(Case("grouped", _paper(num_tokens=n, num_slots=8, top_k=1)) for n in (32, 1024, 8192)),
    *(Case("grouped", _paper(num_tokens=n, num_slots=8)) for n in (1, 160, 1024, 65536)),
    Case("grouped", _paper(num_tokens=1024, num_slots=64, top_k=4, rank=16)),
    Case("grouped", _paper(num_tokens=1024, num_slots=8), dtype="float32"),
    Case("grouped", _paper(num_tokens=1024, num_slots=8), part="backward"),
    *(Case("grouped", _paper(num_tokens=n, num_slots=64), part="plan") for n in (160, 8192)),
    Case("grouped", _DEMO[0]),
)


def table() -> list[Case]:
    """Every shape that is promised, by every strategy that is meant for it, in a fixed order."""
    cases = []
    for n, slots, rank, top_k in itertools.product(
        (1, 32, 160, 1024, 8192, 65536), (4, 8, 64), (16, 64), (1, 2, 4)
    ):
        size = _paper(num_tokens=n, num_slots=slots, top_k=top_k, rank=rank)
        # All slots need h (N, K·R) in memory, one adapter per row needs the weights N·k times.
        fits = {"all_slots": slots <= 8, "grouped": True, "bgmv": n <= 160}
        for strategy in STRATEGIES:
            if fits[strategy]:
                cases += [Case(strategy, size, part=part) for part in ("forward", "backward")]
        if rank == 64:  # a plan does not depend on the rank
            cases.append(Case("grouped", size, part="plan"))
    return cases


def compile_case(case: Case, *, resources: bool = False) -> Report:
    """What the case names, compiled; the base is donated, being an intermediate in a model."""
    s, dtype = case.size, jnp.dtype(case.dtype)
    if case.part == "plan":
        return compile_for(
            lambda routing: _on_gpu(case.make_plan(routing)), case.routing(), resources=resources
        )

    def forward(x, lora_a, lora_b, gates, base, adapter_ids, ranks, plan):
        routing = Routing(adapter_ids=adapter_ids, gates=gates)
        return lora_delta(
            x, lora_a, lora_b, routing, base=base, ranks=ranks, plan=plan,
            strategy=case.strategy, backend=case.backend,
        )  # fmt: skip

    def backward(x, lora_a, lora_b, gates, dy, adapter_ids, ranks, plan):
        def delta(x, lora_a, lora_b, gates):
            base = jnp.zeros_like(dy)
            return forward(x, lora_a, lora_b, gates, base, adapter_ids, ranks, plan)

        return jax.vjp(delta, x, lora_a, lora_b, gates)[1](dy)

    routing = case.routing()
    return compile_for(
        forward if case.part == "forward" else backward,
        jax.ShapeDtypeStruct((s.num_tokens, s.d_in), dtype),
        jax.ShapeDtypeStruct((s.num_slots, s.rank, s.d_in), dtype),
        jax.ShapeDtypeStruct((s.num_slots, s.rank, s.d_out), dtype),
        routing.gates,
        jax.ShapeDtypeStruct((s.num_tokens, s.d_out), dtype),
        routing.adapter_ids,
        jax.ShapeDtypeStruct((s.num_slots,), jnp.int32),
        case.plan(),
        donate=(4,) if case.part == "forward" else (),
        resources=resources,
    )


def _estimate(case: Case) -> cost.Estimate:
    """What the case costs by count, its sort aside."""
    device = dataclasses.replace(
        cost.H200, itemsize=jnp.dtype(case.dtype).itemsize, sort_launches=0
    )
    backend = "triton" if case.backend == "auto" else case.backend
    return cost.estimate(cost.path(case.strategy, backend, case.size, device), case.size, device)


def over_floor(case: Case) -> float | None:
    """Bytes that the kernels move by count over the least that a projection can; forward alone."""
    if case.part != "forward":
        return None
    itemsize = jnp.dtype(case.dtype).itemsize
    return _estimate(case).bytes / cost.floor_bytes(case.size, itemsize=itemsize)


def allowed_launches(case: Case) -> int | None:
    """Launches of one projection as designed, its sort and its base product aside."""
    if case.part != "forward":
        return None
    return round(_estimate(case).launches)


def problems(case: Case, report: Report) -> list[str]:
    """The facts that must hold and do not: what it moves, what it holds, how it is launched."""
    s = case.size
    wrong = [f"Pallas kernel {name} has no launch" for name in report.lost]
    for kernel in report.kernels:
        wrong += _kernel_problems(kernel)

    rows = 0 if case.part == "plan" else case.tile_rows()
    ours = [each for each in report.kernels if each.pallas]
    if ours and rows >= WGMMA_ROWS and case.dtype != "float32":
        wrong += [
            f"{each.name} multiplies tiles of {rows} rows by mma.sync"
            for each in ours
            if "mma.sync" in each.instructions
            # The gradient of a weight has a row for each rank and not for each token.
            and not (each.name.startswith("lora_outer") and s.rank < WGMMA_ROWS)
        ]
        if not any("wgmma" in each.instructions for each in ours):
            wrong.append(f"no wgmma in tiles of {rows} rows")

    if case.part == "forward":
        columns = s.num_slots * s.rank
        sizes = {
            "lora_a": columns * s.d_in,
            "lora_b": columns * s.d_out,
            "the output": s.num_tokens * s.d_out,
            "x": s.num_tokens * s.d_in,
            "gathered x": s.num_tokens * s.top_k * s.d_in,
        }
        by_size: dict[int, list[str]] = {}
        for name, size in sizes.items():
            by_size.setdefault(size, []).append(name)
        for size, names in by_size.items():
            if moved := report.count(opcodes=("copy", "transpose", "gather"), size=size):
                wrong.append(f"{moved} copies of {' or '.join(names)}")
        if report.copies:
            wrong.append(f"{len(report.copies)} steps that only copy: {report.copies}")
    if (allowed := _allowed_temporary(case)) is not None and report.temp_bytes > allowed:
        wrong.append(f"{report.temp_bytes} bytes of temporary memory, more than {allowed}")

    if report.outside or report.graphs != 1:
        wrong.append(f"{report.graphs} graphs instead of 1, outside of them: {report.outside}")
    launches = allowed_launches(case)
    if launches is not None and len(report.thunks) > launches:
        wrong.append(f"{len(report.thunks)} launches, more than {launches}")
    return wrong


def _kernel_problems(kernel: Kernel) -> list[str]:
    wrong = []
    if kernel.shared_bytes > SHARED_MEMORY:
        wrong.append(
            f"{kernel.name} uses {kernel.shared_bytes} bytes of shared memory, "
            f"more than {SHARED_MEMORY}"
        )
    if kernel.pallas and kernel.registers is None:
        wrong.append(f"registers of {kernel.name} are unknown: XLA wrote no PTX for it")
    if kernel.spill_bytes:
        wrong.append(f"{kernel.name} spills {kernel.spill_bytes} bytes")
    return wrong


def _allowed_temporary(case: Case) -> int | None:
    """Bytes: a float32 sum of the output's size, kept before it is rounded; all_slots keeps h too.

    4 MiB are for the partial sums of split products.
    """
    if case.part != "forward":
        return None
    s = case.size
    width = s.d_out + (s.num_slots * s.rank if case.strategy == "all_slots" else 0)
    return 4 * s.num_tokens * width + 4 * 2**20


def measure(case: Case) -> dict:
    """One row of the table: plain numbers, and what is wrong."""
    start = time.monotonic()
    row: dict = {"case": str(case)}
    try:
        report = compile_case(case, resources=True)
    except Exception as error:  # XLA refuses a kernel that does not fit with errors of many types
        lines = str(error).strip().splitlines() or [""]
        return row | {"problems": [f"{type(error).__name__}: {lines[0][:200]}"]}
    ours = [each for each in report.kernels if each.pallas]
    return row | {
        "seconds": round(time.monotonic() - start, 1),
        "launches": len(report.thunks),
        "captured": sum(each.captured for each in report.thunks),
        "graphs": report.graphs,
        "kernels": [dataclasses.asdict(each) for each in ours],
        "temp_bytes": report.temp_bytes,
        "over_floor": over_floor(case),
        "problems": problems(case, report),
    }


def line(row: dict) -> str:
    """A row for people; registers, shared memory and instructions of our own kernels."""
    verdict = "; ".join(row["problems"]) or "ok"
    if "launches" not in row:
        return f"{row['case']}  {verdict}"
    parts = [
        f"{row['launches']:2} steps, {row['captured']:2} in {row['graphs']} graphs",
        f"temp {row['temp_bytes'] / 2**20:7.1f} MiB",
    ]
    for kernel in row["kernels"]:
        parts.append(
            f"{kernel['name']} {kernel['registers']} reg {kernel['spill_bytes']} spilled "
            f"{kernel['shared_bytes'] / 1024:.0f} KiB shared "
            f"{kernel['threads']} threads {'+'.join(kernel['instructions']) or 'no tensor core'}"
        )
    if row["over_floor"] is not None:
        parts.append(f"bytes {row['over_floor']:.2f} of the floor")
    parts.append(f"{row['seconds']:.1f} s")
    return f"{row['case']}  {', '.join(parts)}  {verdict}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the chosen cases and prints a line each; 1 where a fact does not hold."""
    parser = _parser()
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # the plug-in would look for a GPU otherwise
    try:
        _mesh("h200")
        cases = _chosen(options)
        done = _read(options.results)
    except (NotImplementedError, OSError, ValueError) as error:
        parser.error(str(error))
    index, shards = options.shard
    cases = cases[index - 1 :: shards]
    failed = 0
    for case in cases:
        row = done.get(str(case))
        if row is None:
            row = measure(case)
            if options.results is not None:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        failed += bool(row["problems"])
        print(line(row), flush=True)
    print(f"{len(cases)} shapes compiled for an H200, {failed} with a fact that does not hold")
    return 1 if failed else 0


# What a shape is where the command line does not say.
_DEFAULTS = {
    "num_tokens": 1024,
    "d_in": 4096,
    "d_out": 4096,
    "rank": 64,
    "num_slots": 8,
    "top_k": 2,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.deviceless",
        description="Compiles lora_delta for an H200 without one and says what XLA made of it. "
        "Without flags: the chosen shapes. Several values of a flag are combined.",
    )
    for name, default in _DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, nargs="+", help=f"{default} where left out")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), nargs="+")
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", help="all where left out")
    parser.add_argument("--backend", choices=("auto", "xla", "triton"), help="auto where left out")
    parser.add_argument("--backward", action="store_true", help="the gradients too")
    parser.add_argument("--all", action="store_true", help="the whole table")
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        help="file of rows (JSON lines); those in it are not redone, changed source or not",
    )
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="each N-th row, from the I-th"
    )
    return parser


def _chosen(options: argparse.Namespace) -> Sequence[Case]:
    """The cases that the flags name; ValueError for shapes that cannot be."""
    named = (*_DEFAULTS, "dtype", "strategy", "backend", "backward")
    given = [name for name in named if getattr(options, name)]
    if options.all and given:
        raise ValueError(f"--all is a table of its own; leave out --{', --'.join(given)}")
    if options.all:
        return table()
    if not given:
        return CASES
    fields = {name: getattr(options, name) or [default] for name, default in _DEFAULTS.items()}
    sizes = [
        ProblemSize(**dict(zip(fields, values, strict=True)))
        for values in itertools.product(*fields.values())
    ]
    parts = ("forward", "backward") if options.backward else ("forward",)
    return [
        Case(strategy, size, part=part, dtype=dtype, backend=options.backend or "auto")
        for size in sizes
        for strategy in options.strategy or STRATEGIES
        for dtype in options.dtype or ["bfloat16"]
        for part in parts
    ]


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}; expected I/N with 1 ≤ I ≤ N, such as 1/2")
    return int(match[1]), int(match[2])


def _read(path: pathlib.Path | None) -> dict[str, dict]:
    if path is None or not path.exists():
        return {}
    rows = (json.loads(each) for each in path.read_text(encoding="utf-8").splitlines())
    return {row["case"]: row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
