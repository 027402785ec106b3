"""The routed low-rank update: its contract, and the way from a call to the path that runs it."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.all_slots import all_slots
from pallas_kernels.checks import check_operands, check_plan, check_routing
from pallas_kernels.grouped_gemm import grouped
from pallas_kernels.reference import reference
from pallas_kernels.strategy import block_rows, resolve
from pallas_kernels.token_sort import token_sort
from pallas_kernels.types import DispatchPlan, Routing


def lora_delta(
    x: Float[Array, "*batch D"],
    lora_a: Float[Array, "K R D"],
    lora_b: Float[Array, "K R F"],
    routing: Routing,
    *,
    base: Float[Array, "*batch F"] | None = None,
    ranks: Int[Array, " K"] | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    plan: DispatchPlan | None = None,
) -> Float[Array, "*batch F"]:
    """Adds to `base` what each token's adapters contribute.

        y[n] = base[n] + Σ_j gates[n, j] · B[id[n, j]]ᵀ · (A[id[n, j]] · x[n])

    from MoLoRA, arXiv 2603.15965. Sums are taken in float32 with exact float32 products and
    rounded once, to the dtype of `base` (of `x` without one). A token with id −1 alone gets its
    base unchanged; an id that stands twice counts twice. A token never sees the numbers of an
    adapter it is not routed to, overflow and NaN included. The exception is a `lora_b` that is
    itself not finite: `grouped` and `reference` keep it to its own tokens, `all_slots` cannot.
    Nor can `all_slots` in the gradient of a lora_a or an x that is not finite.

    Differentiable in reverse mode in x, lora_a, lora_b, base and the gates; an adapter that no
    token uses has gradients of exactly zero. Works under `jit`, `vmap`, `scan` and `shard_map`.

    Args:
      x: (..., D), N tokens in all.
      lora_a: (K, R, D), as PEFT stores A: contraction last.
      lora_b: (K, R, F), the transpose of PEFT's B, with the adapter's scale in it.
      routing: ids and gates (N, k). Inside `jit` an id outside [0, K) acts as −1.
      base: (..., F), the frozen projection's output; zero where None.
      ranks: (K,), the rows of each slot that count. Those past it must be finite, add nothing and
        have zero gradients. All R count where None.
      strategy: the algorithm: all_slots, grouped, reference; auto chooses by the sizes.
      backend: who runs it: xla; auto.
      plan: what `make_plan` made for this routing; made here where None.

    Raises:
      ValueError: shapes or dtypes that do not fit; outside `jit` also an id or a rank out of range,
        with its position; a plan for another strategy or other sizes.
      NotImplementedError: a strategy or backend that is not there yet.
    """
    check_operands(x, lora_a, lora_b, routing, base=base, ranks=ranks)
    num_tokens, top_k = routing.adapter_ids.shape
    num_slots, _, d_out = lora_b.shape
    if plan is not None and strategy == "auto":
        strategy = "grouped"  # the one strategy that plans
    strategy = resolve(strategy, backend, num_tokens=num_tokens, top_k=top_k, num_slots=num_slots)
    if plan is not None:
        check_plan(plan, routing, num_slots, strategy=strategy)

    operands = (x.reshape(num_tokens, x.shape[-1]), lora_a, lora_b, routing)
    flat_base = None if base is None else base.reshape(num_tokens, d_out)
    with jax.named_scope(f"lora_delta_{strategy}"):
        if strategy == "grouped":
            plan = make_plan(routing, num_slots, strategy="grouped") if plan is None else plan
            y = grouped(*operands, base=flat_base, ranks=ranks, plan=plan)
        elif strategy == "all_slots":
            y = all_slots(*operands, base=flat_base, ranks=ranks)
        else:
            y = reference(*operands, base=flat_base, ranks=ranks)
    dtype = x.dtype if base is None else base.dtype
    return y.astype(dtype).reshape(*x.shape[:-1], d_out)


def make_plan(
    routing: Routing, num_slots: int, *, strategy: str = "auto", block: int | None = None
) -> DispatchPlan | None:
    """What projections that share a routing decision share of the work; None where it is nothing.

    Pass it to every `lora_delta` of the decision, with the same `strategy`. `grouped` shares its
    sort. `all_slots` and `reference` need no plan.

    Args:
      routing: ids and gates (N, k), of which the plan depends on the ids alone.
      num_slots: K of the stacks that it will be used with.
      strategy: as in `lora_delta`; auto chooses by N, k and K as it does there.
      block: rows of a tile, chosen by the sizes where None.

    Raises:
      ValueError, NotImplementedError: as `lora_delta`.
    """
    check_routing(routing, num_slots)
    num_tokens, top_k = routing.adapter_ids.shape
    strategy = resolve(strategy, "auto", num_tokens=num_tokens, top_k=top_k, num_slots=num_slots)
    if strategy != "grouped":
        return None
    if block is None:
        block = block_rows(num_tokens * top_k, num_slots)
    elif block < 1:
        raise ValueError(f"block is {block}; expected a number of rows, 1 or more")
    return token_sort(routing.adapter_ids, num_slots, block=block)
