"""Which algorithm for which shape, and why; and who can run it.

A strategy is the algorithm, a backend is who runs it. `auto` takes the path that the cost model of
`pallas_kernels.cost` expects to be fastest, by static sizes alone: one compiled program holds one
path, and nothing is decided inside a step.
"""

import difflib
import functools
import importlib

import jax

from pallas_kernels import cost
from pallas_kernels.paths import Path
from pallas_kernels.shapes import ProblemSize

STRATEGIES = ("all_slots", "grouped", "bgmv", "reference")
BACKENDS = ("xla", "triton", "interpret")


def check_names(strategy: str, backend: str) -> None:
    """Raises ValueError for an unknown name, NotImplementedError for what cannot run."""
    _check_name("strategy", strategy, STRATEGIES)
    _check_name("backend", backend, BACKENDS)
    if backend in ("auto", "xla"):
        return
    if strategy == "reference":
        raise NotImplementedError(
            "strategy 'reference' has no kernel: XLA runs it on CPU and GPU. Use backend='xla' or "
            "'auto', or another strategy"
        )
    if reason := kernels_missing():
        raise NotImplementedError(f"backend {backend!r}: {reason}. Use backend='xla' or 'auto'")
    if backend == "triton" and not cuda_at_hand():
        raise NotImplementedError(
            "backend 'triton' needs an NVIDIA GPU, and JAX sees none here. Use backend='auto' or "
            "'xla', or 'interpret' to run the kernels on CPU for a test"
        )


def paths(strategy: str, backend: str, size: ProblemSize, *, wide: bool = False) -> dict[str, Path]:
    """The path for each platform: {"cuda": ..., "default": ...}, or "default" alone.

    Args:
      size: N, k and K; also R, D and F where they are known.
      wide: an operand is float64, which the kernels do not take.
    """
    check_names(strategy, backend)
    if backend == "auto":
        found = {"default": _path(strategy, "xla", size, cost.CPU)}
        if cuda_at_hand() and not kernels_missing() and not wide:
            name = "xla" if strategy == "reference" else "triton"
            found["cuda"] = _path(strategy, name, size, cost.H200)
        return found
    if wide and backend != "xla":
        raise NotImplementedError(f"backend {backend!r} has no float64; use 'xla' or 'auto'")
    device = cost.CPU if backend == "xla" else cost.H200
    return {"default": _path(strategy, backend, size, device)}


def _path(strategy: str, backend: str, size: ProblemSize, device: cost.Device) -> Path:
    if strategy == "auto":
        return cost.choose(size, device, backend)
    return cost.path(strategy, backend, size, device)


def explain(size: ProblemSize, device: str = "h200") -> str:
    """What `auto` compares for one projection: the estimate of every path, best first, as a table.

    Args:
      size: N, k, K, R, D and F.
      device: h200, for bfloat16 inputs, or cpu, for float32 ones.

        >>> size = ProblemSize(num_tokens=64, d_in=64, d_out=64, rank=4, num_slots=2, top_k=1)
        >>> print(explain(size, device="cpu").splitlines()[0])
        cpu: num_tokens 64, d_in 64, d_out 64, rank 4, num_slots 2, top_k 1; floor 0.05 MB, 0.9 µs
    """
    if device not in cost.DEVICES:
        raise ValueError(f"device is {device!r}; expected one of {', '.join(cost.DEVICES)}")
    return cost.explain(size, cost.DEVICES[device])


@functools.cache
def kernels_missing() -> str:
    """Why the kernels cannot be used with this JAX; empty where they can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        return f"JAX {jax.__version__} has no Pallas Triton ({error})"
    return ""


def cuda_at_hand() -> bool:
    """Whether a program traced now may run on an NVIDIA GPU, one that is only compiled for too."""
    compiled_for = jax.sharding.get_abstract_mesh().abstract_device
    if compiled_for is not None:
        # A mesh says "gpu" where a compilation for a named device says "cuda".
        return compiled_for.platform in ("cuda", "gpu") and "NVIDIA" in compiled_for.device_kind
    return _cuda_in_process()


@functools.cache
def _cuda_in_process() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _check_name(argument: str, value: str, known: tuple[str, ...]) -> None:
    if value in (*known, "auto"):
        return
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"{argument} is {value!r}; expected 'auto' or one of {', '.join(map(repr, known))}{hint}"
    )
