"""Past one device: a mesh, one table of sharding rules, and several processes that run in step."""

from molora_jax.parallel.mesh import (
    check_rows,
    computing,
    current_mesh,
    make_mesh,
    parse_mesh,
    place,
    place_rows,
    tell_pass,
    token_shards,
    use_mesh,
    whole,
)
from molora_jax.parallel.processes import (
    broadcast,
    check_same,
    fetch,
    gather,
    is_primary,
    start_processes,
    together,
)
from molora_jax.parallel.rules import AXES, RULES, TOKENS, RowData, check_fits

__all__ = [
    "AXES",
    "RULES",
    "TOKENS",
    "RowData",
    "broadcast",
    "check_fits",
    "check_rows",
    "check_same",
    "computing",
    "current_mesh",
    "fetch",
    "gather",
    "is_primary",
    "make_mesh",
    "parse_mesh",
    "place",
    "place_rows",
    "start_processes",
    "tell_pass",
    "together",
    "token_shards",
    "use_mesh",
    "whole",
]
