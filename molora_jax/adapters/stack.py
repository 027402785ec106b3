"""AdapterStack: one projection's A and B over all layers and slots, as the step reads them."""

import dataclasses
import typing

import jax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
@typing.no_type_check  # tree.map also builds one of shapes, shardings or gradients
class AdapterStack:
    """The adapters of one projection, zero-padded to the rank R of the bank.

    In the paper's symbols A (K, d, r) and B (K, r, d). `lora_a` is kept with the contraction last,
    because every path then reads it without a transpose. The scale alpha/r is folded into `lora_b`
    when a slot is written, so no path can apply it twice or forget it. Rows past an adapter's own
    rank, and modules it does not adapt, are zero.

    lora_a  (L, K, R, D)    lora_b  (L, K, R, F)    ranks  (L, K) int32, 0 where not adapted

    A scan over layers, or an index, slices the leading axis off all three.

        >>> stack = bank.stacks["k_proj"]
        >>> stack.lora_a.shape, stack.lora_b.shape, stack.ranks.shape
        ((4, 2, 4, 64), (4, 2, 4, 32), (4, 2))
    """

    lora_a: Float[Array, "*L K R D"]
    lora_b: Float[Array, "*L K R F"]
    ranks: Int[Array, "*L K"]


Stacks = dict[str, AdapterStack]  # by projection
