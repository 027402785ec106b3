"""The definition of the sorted tiles, row by row on the host."""

import numpy as np

from pallas_kernels.token_sort.api import num_groups, num_tiles


def token_sort_reference(
    adapter_ids: np.ndarray, num_slots: int, *, layout: str, block: int
) -> dict[str, np.ndarray]:
    """The arrays of `Tiles` by name, from ids (N, k)."""
    num_tokens, top_k = adapter_ids.shape
    num_entries = num_tokens * top_k
    known = {
        n * top_k + j: int(adapter_ids[n, j])
        for n in range(num_tokens)
        for j in range(top_k)
        if 0 <= adapter_ids[n, j] < num_slots
    }
    if layout == "entries":
        passes, width = [[[e] for e in range(num_entries)]], 1
    elif layout == "passes":
        passes, width = [[[n * top_k + j] for n in range(num_tokens)] for j in range(top_k)], 1
    else:
        passes, width = [[[n * top_k + j for j in range(top_k)] for n in range(num_tokens)]], top_k

    num_rows = len(passes[0])
    tiles = num_tiles(num_rows, num_groups(layout, num_slots=num_slots, top_k=top_k), block=block)
    entries = np.full((len(passes), num_rows, width), num_entries)
    start, rows = np.zeros((2, len(passes), tiles), int)
    adapters = np.full((len(passes), tiles, width), -1)
    for p, all_rows in enumerate(passes):
        live = [
            sorted((e for e in row if e in known), key=lambda e: (known[e], e)) for row in all_rows
        ]
        # By set, compared from its largest slot down, one that is missing counting as the largest.
        keyed = [
            (tuple(reversed([known[e] for e in row] + [num_slots] * (width - len(row)))), i)
            for i, row in enumerate(live)
            if row
        ]
        tile, tile_key = -1, None
        for position, (key, i) in enumerate(sorted(keyed)):
            entries[p, position, : len(live[i])] = live[i]
            if key != tile_key or rows[p, tile] == block:
                tile, tile_key = tile + 1, key
                start[p, tile] = position
                adapters[p, tile, : len(live[i])] = [known[e] for e in live[i]]
            rows[p, tile] += 1
    return {"entries": entries, "start": start, "rows": rows, "adapters": adapters}
