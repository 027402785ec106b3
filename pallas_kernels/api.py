"""The routed low-rank update: its contract, and the way from a call to the path that runs it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import strategy as strategies
from pallas_kernels.arrays import Array, Float, Int
from pallas_kernels.checks import (
    check_operands,
    check_plan,
    check_routing,
    check_same_slots,
    check_tiles,
)
from pallas_kernels.numerics import vary_together
from pallas_kernels.paths import Path, backward, forward, sort
from pallas_kernels.shapes import ProblemSize
from pallas_kernels.types import DispatchPlan, Indices, Operands, Routing, Tiles


def lora_delta(
    x: Float[Array, "*batch D"],
    lora_a: Float[Array, "*L K R D"],
    lora_b: Float[Array, "*L K R F"],
    routing: Routing,
    *,
    base: Float[Array, "*batch F"] | None = None,
    ranks: Int[Array, "*L K"] | None = None,
    layer: int | Int[Array, ""] | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    plan: DispatchPlan | None = None,
) -> Float[Array, "*batch F"]:
    """Adds to `base` what each token's adapters contribute.

        y[n] = base[n] + Σ_j gates[n, j] · B[id[n, j]]ᵀ · (A[id[n, j]] · x[n])

    from MoLoRA, arXiv 2603.15965. Sums are taken in float32 with exact float32 products and
    rounded once, to the dtype of `base` (of `x` without one). The kernels of `grouped` round once a
    pass, of which there are k where tokens share no sets of adapters, and they multiply a half
    lora_b with an h of 16 bits of mantissa. A token with id −1 alone gets its base unchanged; an id
    that stands twice counts twice. A token never sees the numbers of an adapter it is not
    routed to, overflow and NaN included. The exception is a `lora_b` that is itself not finite:
    `grouped`, `bgmv` and `reference` keep it to its own tokens, `all_slots` cannot. Nor can
    `all_slots` in the gradient of a lora_a or an x that is not finite.

    Differentiable once, in reverse mode, in x, lora_a, lora_b, base and the gates; an adapter that
    no token uses has gradients of exactly zero. Works under `jit`, `vmap`, `scan` and `shard_map`.

    Args:
      x: (..., D), N tokens in all.
      lora_a: (K, R, D), as PEFT stores A: contraction last.
      lora_b: (K, R, F), the transpose of PEFT's B, with the adapter's scale in it.
      routing: ids and gates (N, k), k ≤ K. Inside `jit` an id outside [0, K) acts as −1.
      base: (..., F), the frozen projection's output; zero where None.
      ranks: (K,), the rows of each slot that count. Those past it must be finite, add nothing and
        have zero gradients. All R count where None.
      layer: given with whole stacks, lora_a (L, K, R, D), lora_b (L, K, R, F) and ranks (L, K):
        the layer to use. The kernels then read it where it lies; a slice inside `jit` is a copy.
      strategy: the algorithm: all_slots, grouped, bgmv, reference; auto takes the one that the
        cost model expects to be fastest (`pallas_kernels.explain` prints why).
      backend: who runs it: xla; triton, on an NVIDIA GPU; interpret, the same kernels on CPU for
        tests; auto takes triton where there is a kernel and a GPU, and xla elsewhere.
      plan: what `make_plan` made for this routing; made here where None.

    Raises:
      ValueError: shapes or dtypes that do not fit; outside `jit` also an id or a rank out of range,
        with its position; a plan for another strategy or other sizes.
      NotImplementedError: a backend that cannot run here, and why.

        >>> x, a, b = jnp.ones((3, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 4, 6))
        >>> routing = Routing(jnp.array([[0], [1], [-1]]), jnp.ones((3, 1)))
        >>> lora_delta(x, a, b, routing)[:, 0].tolist()
        [32.0, 32.0, 0.0]
    """
    (y,) = lora_deltas(
        x, (lora_a,), (lora_b,), routing,
        bases=None if base is None else (base,), ranks=(ranks,), layer=layer,
        strategy=strategy, backend=backend, plan=plan,
    )  # fmt: skip
    return y


def lora_deltas(
    x: Float[Array, "*batch D"],
    lora_a: Sequence[Array],
    lora_b: Sequence[Array],
    routing: Routing,
    *,
    bases: Sequence[Array] | None = None,
    ranks: Sequence[Array | None] | None = None,
    layer: int | Int[Array, ""] | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    plan: DispatchPlan | None = None,
) -> tuple[Array, ...]:
    """`lora_delta` for several projections that share x, such as q, k and v: x is read once.

    One lora_a, lora_b, base and ranks for each projection, in the same order; they may differ in
    R and F, and hold the same slots and layers. The rest, errors included, is as in `lora_delta`.

        >>> x, a, b = jnp.ones((3, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 4, 6))
        >>> routing = Routing(jnp.array([[0], [1], [-1]]), jnp.ones((3, 1)))
        >>> q, k = lora_deltas(x, [a, a], [b, b[..., :2]], routing)
        >>> q.shape, k.shape
        ((3, 6), (3, 2))
    """
    num_projections = len(lora_a)
    if not num_projections:
        raise ValueError("lora_a is empty; expected the stack of one projection or more")
    ranks = (None,) * num_projections if ranks is None else tuple(ranks)
    for name, each in (("lora_b", lora_b), ("ranks", ranks), ("bases", bases)):
        if each is not None and len(each) != num_projections:
            raise ValueError(
                f"{name} holds {len(each)} projections and lora_a {num_projections}; expected one "
                "for each"
            )
    given = [None] * num_projections if bases is None else bases
    check_same_slots(lora_a)
    for a, b, base, own in zip(lora_a, lora_b, given, ranks, strict=True):
        check_operands(x, a, b, routing, base=base, ranks=own, layer=layer)
    num_tokens, top_k = routing.adapter_ids.shape
    num_slots = lora_a[0].shape[-3]
    if plan is not None:
        check_plan(plan, routing, num_slots, strategy=strategy)
        strategy = plan.strategy if strategy == "auto" else strategy

    x = jnp.asarray(x)
    flat = [
        jnp.zeros((num_tokens, b.shape[-1]), x.dtype)
        if base is None
        else jnp.reshape(jnp.asarray(base), (num_tokens, b.shape[-1]))
        for b, base in zip(lora_b, given, strict=True)
    ]
    operands = Operands(
        x=jnp.reshape(x, (num_tokens, x.shape[-1])),
        lora_a=tuple(map(jnp.asarray, lora_a)),
        lora_b=tuple(map(jnp.asarray, lora_b)),
        gates=jnp.asarray(routing.gates),
        base=tuple(flat),
    )
    # The paths of all projections are one: they are chosen by the widest.
    size = ProblemSize(
        num_tokens=num_tokens, top_k=top_k, num_slots=num_slots,
        rank=max(a.shape[-2] for a in lora_a), d_in=x.shape[-1],
        d_out=max(b.shape[-1] for b in lora_b),
    )  # fmt: skip
    wide = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(operands))
    chosen = strategies.paths(strategy, backend, size, wide=wide)
    tiles = {} if plan is None else plan.tiles
    indices = {
        platform: Indices(
            adapter_ids=jnp.asarray(routing.adapter_ids),
            ranks=tuple(None if own is None else jnp.asarray(own) for own in ranks),
            layer=None if layer is None else jnp.asarray(layer, jnp.int32),
            tiles=_fitting(tiles.get(platform, tiles.get("default")), path, top_k),
        )
        for platform, path in chosen.items()
    }
    operands, indices = vary_together((operands, indices))
    with jax.named_scope(f"lora_delta_{strategy}"):
        ys = _update(_Paths(tuple(chosen.items())), operands, indices)
    return tuple(y.reshape(*x.shape[:-1], y.shape[1]) for y in ys)


def make_plan(
    routing: Routing,
    num_slots: int,
    *,
    strategy: str = "auto",
    backend: str = "auto",
    block: int | None = None,
) -> DispatchPlan | None:
    """What projections that share a routing decision share of the work; None where it is nothing.

    Pass it to every `lora_delta` of the decision, with the same `strategy` and `backend`. `grouped`
    shares its sort. The others need no plan; what `auto` then does not use is dead code in `jit`.

    Args:
      routing: ids and gates (N, k), of which the plan depends on the ids alone.
      num_slots: K of the stacks that it will be used with.
      strategy: as in `lora_delta`.
      backend: as in `lora_delta`.
      block: rows of a tile, at most 128 in a kernel; chosen by the sizes where None.

    Raises:
      ValueError, NotImplementedError: as `lora_delta`.

        >>> x, a, b = jnp.ones((3, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 4, 6))
        >>> routing = Routing(jnp.array([[0], [1], [-1]]), jnp.ones((3, 1)))
        >>> plan = make_plan(routing, num_slots=2, strategy="grouped")
        >>> lora_delta(x, a, b, routing, plan=plan).shape
        (3, 6)
    """
    check_routing(routing, num_slots)
    strategies.check_names(strategy, backend)
    num_tokens, top_k = routing.adapter_ids.shape
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"block is {block!r}; expected a number of rows, 1 or more")
    if strategy not in ("auto", "grouped") or (strategy == "auto" and num_slots == 1):
        return None
    size = ProblemSize(
        num_tokens=num_tokens, top_k=top_k, num_slots=num_slots, rank=16, d_in=1, d_out=1
    )
    chosen = strategies.paths("grouped", backend, size)
    if block is not None:
        chosen = {
            name: dataclasses.replace(
                path, block=block if path.backend == "xla" else min(block, 128)
            )
            for name, path in chosen.items()
        }
    ids = jnp.asarray(routing.adapter_ids)
    tiles = {}
    for platform, path in chosen.items():
        if platform == "cuda":  # never to be run elsewhere, where the same sort is XLA's
            elsewhere = dataclasses.replace(path, backend="xla")
            tiles[platform] = lax.platform_dependent(
                ids,
                cuda=functools.partial(sort, path, num_slots=num_slots),
                default=functools.partial(sort, elsewhere, num_slots=num_slots),
            )
        else:
            tiles[platform] = sort(path, ids, num_slots)
    return DispatchPlan(tiles=tiles, adapter_ids=ids, num_slots=num_slots, strategy=strategy)


@dataclasses.dataclass(frozen=True)
class _Paths:
    by_platform: tuple[tuple[str, Path], ...]

    def run(self, function, *operands):
        """`function(path, platform, *operands)` for the platform that it is compiled for."""
        if len({path for _, path in self.by_platform}) == 1:
            platform, path = self.by_platform[0]
            return function(path, platform, *operands)
        branches = {
            platform: functools.partial(function, path, platform)
            for platform, path in self.by_platform
        }
        return lax.platform_dependent(*operands, **branches)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _update(paths: _Paths, operands: Operands, indices: Mapping[str, Indices]):
    return paths.run(
        lambda path, platform, operands, indices: forward(path, operands, indices[platform]),
        operands,
        indices,
    )


def _update_forward(paths, operands, indices):
    return _update(paths, operands, indices), (operands, indices)


def _update_backward(paths, saved, dy):
    operands, indices = saved
    gradients = paths.run(
        lambda path, platform, operands, indices, dy: backward(
            path, operands, indices[platform], dy
        ),
        operands,
        indices,
        dy,
    )
    return gradients, None


_update.defvjp(_update_forward, _update_backward)


def _fitting(tiles: Tiles | None, path: Path, top_k: int) -> Tiles | None:
    """The plan's tiles, where the path sorts."""
    if path.strategy != "grouped":
        return None
    check_tiles(tiles, path.backend, top_k)
    return tiles
