"""What ships beside a trained adapter, as an artifact of a run."""

import pathlib

from experiments.compose import digest_of_windows
from molora_jax.adapters import Adapter
from molora_jax.models import BaseModel
from molora_jax.routing import PackedStatistics
from molora_jax.routing.statistics_file import read_packed
from molora_jax.training import gather_statistics
from molora_jax.training.data import Batch


def statistics_of(
    run,
    base: BaseModel,
    adapter: Adapter,
    windows: Batch,
    *,
    features: int | None,
    rows: int = 64,
    seed: int,
) -> PackedStatistics:
    """Router statistics of an adapter's own windows, gathered or found, as their file has them.

    features  m; None: all channels        rows  windows read at most
    """

    def make(folder: pathlib.Path) -> None:
        found = gather_statistics(base, windows, num_features=features, max_rows=rows, seed=seed)
        packed = PackedStatistics.of(found, base_digest=base.digest, adapter_digest=adapter.digest)
        packed.write(folder)

    return run.artifact(
        "statistics",
        config={"features": features, "rows": rows, "seed": seed, "format": 2},
        digests={
            "base_digest": base.digest,
            "adapter_digest": adapter.digest,
            "data": digest_of_windows(windows),
        },
        make=make,
        load=read_packed,
        phase=f"statistics/{adapter.name}/{features or 'all'}",
    )
