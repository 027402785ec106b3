"""compose: adapters that were trained apart and a router that nobody trains, as one composition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import AdapterBank
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.names import PROJECTIONS
from molora_jax.routing import PrototypeRouter, StatisticsRouter
from molora_jax.routing.registry import Router

if TYPE_CHECKING:  # the decoder imports this package
    from molora_jax.models import BaseModel


def compose(
    base: BaseModel,
    adapters: Sequence[Adapter],
    *,
    router: Literal["statistics", "arrow"] = "statistics",
    top_k: int = 1,
    num_slots: int | None = None,
    dtype: str = "float32",
) -> Composition:
    """The adapters in a bank, in order, and a router made of what came with them.

    router     "statistics" solves a ridge regression from the statistics that lie beside each
               adapter (`StatisticsRouter`); "arrow" takes keys from the weights alone, which any
               adapter has, and routes worse (`PrototypeRouter`)
    num_slots  of the bank; None: as many as there are adapters
    dtype      of the bank

    To add or remove an adapter, compose again: no data is read and nothing is trained. Raises
    ValueError for adapters without statistics, or with those of another base or of other features,
    and for names or contents that repeat.

        >>> mj.compose(base, [code, math], router="arrow", top_k=1).column_to_slot.tolist()
        [0, 1]
    """
    makers = {"statistics": _solved, "arrow": _arrow}
    if router not in makers:
        raise ValueError(f"router {router!r} is unknown: expected one of {', '.join(makers)}")
    adapters = list(adapters)
    for each in adapters:
        if not isinstance(each, Adapter):
            raise ValueError(
                f"adapters holds a {type(each).__name__}: expected Adapter, the first of the two "
                "that load_adapter returns"
            )
    _check_distinct(adapters)
    projections = tuple(p for p in PROJECTIONS if any(p in each.projections for each in adapters))
    bank = AdapterBank(
        base.config,
        num_slots=len(adapters) if num_slots is None else num_slots,
        max_rank=max(each.rank for each in adapters),
        projections=projections,
        dtype=dtype,
        base_name=base.name,
    )
    made = makers[router](base, adapters, top_k)
    for each in adapters:
        bank.load(each)
    return Composition(
        base_name=base.name,
        base_digest=base.digest,
        bank=bank,
        router=made,
        column_digests=[each.digest for each in adapters],
        labels_used=router == "statistics",
    )


def _check_distinct(adapters: Sequence[Adapter]) -> None:
    """ValueError for fewer than two adapters, or two of one name or content."""
    if len(adapters) < 2:
        names = [each.name for each in adapters]
        raise ValueError(
            f"{names or 'no adapter'}: a router chooses among two adapters or more. A single one "
            "needs none"
        )
    for what in ("name", "digest"):
        seen: dict[str, str] = {}
        for each in adapters:
            value = getattr(each, what)
            if value in seen:
                same = repr(value) if what == "name" else f"{seen[value]!r} and {each.name!r}"
                raise ValueError(
                    f"two adapters have the same {what} ({same}): give each once"
                    + (", or rename one" if what == "name" else "")
                )
            seen[value] = each.name


def _solved(base: BaseModel, adapters: Sequence[Adapter], top_k: int) -> Router:
    parts = []
    for each in adapters:
        if each.statistics is None:
            raise ValueError(
                f"adapter {each.name!r} came without router statistics: gather them on some of its "
                "own data (`molora statistics`), or take router 'arrow', which "
                "reads the weights alone"
            )
        if each.statistics.base != base.digest:
            raise ValueError(
                f"adapter {each.name!r}: its router statistics were gathered under the base "
                f"sha256:{each.statistics.base[:12]}, not {base.name!r} "
                f"(sha256:{base.digest[:12]}): gather them anew"
            )
        parts.append(each.statistics)
    features = {each.name: part.num_features for each, part in zip(adapters, parts, strict=True)}
    if len(set(features.values())) > 1:
        shown = ", ".join(f"{name} {m or 'all'}" for name, m in features.items())
        raise ValueError(
            f"the router statistics have different numbers of features ({shown}): gather all with "
            "the same"
        )
    return StatisticsRouter.solve([part.unpack() for part in parts], top_k=top_k)


def _arrow(base: BaseModel, adapters: Sequence[Adapter], top_k: int) -> Router:
    from molora_jax.routing.prototypes import arrow_keys  # which imports this package

    norm = np.asarray(base.decoder.layers.input_norm[...], np.float32)
    return PrototypeRouter(arrow_keys(adapters, norm), top_k=top_k, similarity="absolute")
