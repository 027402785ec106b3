"""Tiles of one adapter each: gather on load, shrink, expand, scatter on store."""

from pallas_kernels.grouped_gemm.xla import grouped

__all__ = ["grouped"]
