"""Adapter ids → stable order by adapter, offsets, tile → adapter map."""

from pallas_kernels.token_sort.xla import num_tiles, token_sort

__all__ = ["num_tiles", "token_sort"]
