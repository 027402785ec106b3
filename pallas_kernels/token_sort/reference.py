"""The definition of a dispatch plan, entry by entry on the host."""

import numpy as np

from pallas_kernels.token_sort.xla import num_tiles


def token_sort_reference(adapter_ids: np.ndarray, num_slots: int, *, block: int) -> dict:
    """The arrays of a DispatchPlan by name, from ids (N, k)."""
    num_tokens, top_k = adapter_ids.shape
    tiles = num_tiles(num_tokens * top_k, num_slots, block=block)
    order = np.full(tiles * block, num_tokens)
    position = np.full((num_tokens, top_k), tiles * block)
    tile_adapter = np.full(tiles, -1)
    offsets = [0]
    tile = 0
    for slot in range(num_slots):
        entries = [(n, j) for n in range(num_tokens) for j in range(top_k)]
        entries = [entry for entry in entries if adapter_ids[entry] == slot]
        for i, entry in enumerate(entries):
            row = tile * block + i
            order[row], position[entry] = entry[0], row
        used = -(-len(entries) // block)
        tile_adapter[tile : tile + used] = slot
        tile += used
        offsets.append(offsets[-1] + len(entries))
    return {
        "order": order,
        "position": position,
        "offsets": np.array(offsets),
        "tile_adapter": tile_adapter,
    }
