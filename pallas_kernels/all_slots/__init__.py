"""No sort: every slot at once, each token keeping what it is routed to."""

from pallas_kernels.all_slots.xla import all_slots

__all__ = ["all_slots"]
