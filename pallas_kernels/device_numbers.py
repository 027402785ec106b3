"""Numbers of every strategy and backend against float64, forward and backward, without a test
framework: `device_check` runs them on the machine itself, where compilers have erred before."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import lora_delta
from pallas_kernels.shapes import SMALL, ProblemSize, workload
from pallas_kernels.types import Routing

PAIRS = (
    ("all_slots", "xla"),
    ("grouped", "xla"),
    ("bgmv", "xla"),
    ("all_slots", "triton"),
    ("grouped", "triton"),
    ("bgmv", "triton"),
    ("auto", "auto"),
    ("reference", "xla"),
)
WIDE = {
    "some": ProblemSize(num_tokens=160, d_in=512, d_out=384, rank=16, num_slots=8, top_k=2),
    "many": ProblemSize(num_tokens=2051, d_in=1024, d_out=1040, rank=64, num_slots=8, top_k=1),
    "sets": ProblemSize(num_tokens=1111, d_in=520, d_out=512, rank=32, num_slots=4, top_k=2),
    # What only many tokens reach: the fused kernel, with one adapter a tile and with two, and the
    # sort that counts in blocks first.
    "fused": ProblemSize(num_tokens=4117, d_in=520, d_out=512, rank=64, num_slots=8, top_k=1),
    "fused_sets": ProblemSize(num_tokens=4117, d_in=512, d_out=520, rank=32, num_slots=4, top_k=2),
    "long": ProblemSize(num_tokens=8320, d_in=64, d_out=72, rank=8, num_slots=8, top_k=1),
}
GRADIENTS = ("x", "lora_a", "lora_b", "gates")


@dataclasses.dataclass(frozen=True)
class NumberCheck:
    """One strategy on one backend at one size, in one dtype, with mixed ranks and unused tokens."""

    strategy: str
    backend: str
    size_name: str
    size: ProblemSize
    dtype: str

    def __str__(self):
        return f"{self.strategy} on {self.backend}, size {self.size_name}, {self.dtype}"

    def run(self) -> dict:
        """{"ok", "worst", ...}: the largest error of each result over what its dtype allows.

        Raises NotImplementedError where the pair is not there.
        """
        operands, ids, ranks, weights = _problem(self.size, self.dtype)

        def loss(operands):
            y = lora_delta(
                operands["x"],
                operands["lora_a"],
                operands["lora_b"],
                Routing(ids, operands["gates"]),
                base=operands["base"],
                ranks=ranks,
                strategy=self.strategy,
                backend=self.backend,
            )
            return jnp.sum(y.astype(jnp.float32) * weights), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
        exact = expected(operands, np.asarray(ids), np.asarray(ranks), np.asarray(weights))
        found = {"y": y, **{name: gradients[name] for name in GRADIENTS}}
        # Of the largest value: roundings of a result and of h, or of a long sum in float32, whose
        # 64 are still a hundredth of what TF32 would make of it.
        eps = float(jnp.finfo(self.dtype).eps)
        allowed = (64 if self.dtype == "float32" else 4) * eps
        errors = {}
        for name, value in found.items():
            scale = max(1.0, float(np.abs(exact[name]).max(initial=0.0)))
            error = np.abs(np.asarray(value, np.float64) - exact[name]).max(initial=0.0)
            errors[name] = float(error) / (allowed * scale)
        untouched = np.all(np.asarray(ids) == -1, axis=1)
        kept = bool(np.all(np.asarray(y)[untouched] == np.asarray(operands["base"])[untouched]))
        unused = np.setdiff1d(np.arange(self.size.num_slots), np.asarray(ids))
        zero = not any(
            np.asarray(gradients[n], np.float64)[unused].any() for n in ("lora_a", "lora_b")
        )
        worst = max(errors.values())
        return {
            "ok": bool(worst <= 1) and kept and zero,
            "worst": worst,
            "errors": errors,
            "base_kept": kept,
            "unused_zero": zero,
        }


def number_checks(*, wide: bool) -> Iterator[NumberCheck]:
    """Small odd sizes; with `wide` also those at which kernels tile and split."""
    small = {name: SMALL[name] for name in ("odd", "one_token", "many_slots", "past_a_tile")}
    sizes = {**(WIDE if wide else {}), **small}
    for strategy, backend in PAIRS:
        for name, size in sizes.items():
            for dtype in ("bfloat16", "float32") if wide else ("float32",):
                yield NumberCheck(strategy, backend, name, size, dtype)


def expected(
    operands: dict, ids: np.ndarray, ranks: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """y, and the gradients of Σ weights·y, in float64 by the definition."""
    x, a, b, gates, base = (
        np.asarray(operands[name], np.float64)
        for name in ("x", "lora_a", "lora_b", "gates", "base")
    )
    dy = np.asarray(weights, np.float64)
    y, dx, da, db, d_gates = base.copy(), *(np.zeros_like(each) for each in (x, a, b, gates))
    for slot in range(len(a)):
        r = int(ranks[slot])
        for j in range(ids.shape[1]):
            rows = np.flatnonzero(ids[:, j] == slot)
            gate = gates[rows, j][:, None]
            h = x[rows] @ a[slot, :r].T
            dh = dy[rows] @ b[slot, :r].T
            y[rows] += gate * (h @ b[slot, :r])
            dx[rows] += gate * dh @ a[slot, :r]
            da[slot, :r] += (gate * dh).T @ x[rows]
            db[slot, :r] += (gate * h).T @ dy[rows]
            d_gates[rows, j] = np.sum(h * dh, axis=1)
    return {"y": y, "x": dx, "lora_a": da, "lora_b": db, "gates": d_gates}


def _problem(size: ProblemSize, dtype: str):
    rng = np.random.default_rng(0)
    n, d, f, r, k = size.num_tokens, size.d_in, size.d_out, size.rank, size.num_slots
    ranks = np.resize([r, max(1, r // 2), r, 1], k)
    in_rank = np.arange(r)[None, :, None] < ranks[:, None, None]

    def random(*shape):
        return rng.standard_normal(shape)

    operands = {
        "x": jnp.asarray(random(n, d), dtype),
        "lora_a": jnp.asarray(random(k, r, d) / d**0.5 * in_rank, dtype),
        "lora_b": jnp.asarray(random(k, r, f) / r**0.5 * in_rank, dtype),
        "base": jnp.asarray(random(n, f), dtype),
    }
    routing = workload("uniform", size)
    # A third of the tokens lose an adapter, a tenth all; the last slot is used by none.
    ids = np.array(routing.adapter_ids)
    ids[::3, -1] = -1
    ids[::10] = -1
    if k > 1:
        ids[ids == k - 1] = -1
    operands["gates"] = jnp.asarray(routing.gates)
    # Multiples of 1/8, exact in every dtype: the cotangent itself is not rounded.
    weights = jnp.asarray(np.round(8 * random(n, f)) / 8, jnp.float32)
    return operands, jnp.asarray(ids), jnp.asarray(ranks, jnp.int32), weights
