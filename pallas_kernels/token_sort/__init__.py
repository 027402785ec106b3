"""Adapter ids → rows sorted by adapter or by set of adapters, cut into tiles."""

from pallas_kernels.token_sort.api import (
    LAYOUTS,
    adapter_order,
    num_groups,
    num_tiles,
    token_sort,
)

__all__ = ["LAYOUTS", "adapter_order", "num_groups", "num_tiles", "token_sort"]
