"""Composition: a base, its bank of adapters and a router, as one thing to save, load and serve."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging
from jaxtyping import Int
from safetensors.numpy import save as safetensors_bytes

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.bank import AdapterBank
from molora_jax.adapters.composition_record import (
    ADAPTERS_FOLDER,
    FORMAT_VERSION,
    RECORD_FILE,
    ROUTER_FILE,
    Record,
    SavedAdapter,
    check_router,
    read_record,
    read_router,
    seal,
)
from molora_jax.adapters.folders import new_folder
from molora_jax.adapters.names import shortened
from molora_jax.adapters.peft_load import load_adapter
from molora_jax.adapters.peft_save import write_adapter
from molora_jax.adapters.report import LOCAL_PATH, public_base_name
from molora_jax.files import inside
from molora_jax.routing.registry import Router, router_arrays, router_config

if TYPE_CHECKING:  # the decoder imports this package
    from molora_jax.models import BaseModel


@dataclass(kw_only=True)
class Composition:
    """What a routed model is, beside the base's weights.

    A router's columns belong to adapters by their digest. Where those lie in the bank is asked of
    the bank each time, so eviction, reloading and swapping cannot make a column point at another
    adapter: it is −1 while its own is not resident, and found again wherever that is loaded.

    base_name, base_digest  of the base that adapters and router were trained on
    column_digests          of each router column's adapter, in order; "" for a column without one
    labels_used             whether the router's training was told whose own data a token came from
    metrics                 numbers worth keeping with it; one that is not finite is saved as null

        >>> router = mj.PrototypeRouter(np.ones((4, 64, 2)), top_k=1)
        >>> composition = mj.Composition.of(base, bank, router)
        >>> folder = composition.save(tmp / "composition")
        >>> mj.Composition.load(folder, base).column_names
        ('code', 'math')
    """

    base_name: str
    base_digest: str
    bank: AdapterBank
    router: Router
    column_digests: Sequence[str]
    labels_used: bool | None = None
    metrics: Mapping[str, int | float | None] = field(default_factory=dict)

    def __post_init__(self):
        self.column_digests = tuple(self.column_digests)
        wanted = getattr(self.router, "num_columns", len(self.column_digests))
        if wanted != len(self.column_digests):
            raise ValueError(
                f"the router has {wanted} columns and column_digests {len(self.column_digests)}: "
                "give the digest of one adapter for each column, in order"
            )

    @classmethod
    def of(
        cls,
        base: BaseModel,
        bank: AdapterBank,
        router: Router,
        *,
        labels_used: bool | None = None,
    ) -> Composition:
        """A router whose columns are the adapters in the bank, in the order of `bank.list()`.

        That is the order in which `train_router` makes them. Raises ValueError for another number
        of columns than of adapters.
        """
        return cls(
            base_name=base.name,
            base_digest=base.digest,
            bank=bank,
            router=router,
            column_digests=[each.digest for each in bank.list()],
            labels_used=labels_used,
        )

    @property
    def routed(self) -> dict[str, Any]:
        """What decoder, `generate` and `evaluate` take: `generate(..., **composition.routed)`.

        Taken anew for every call: a load or unload moves what is in it.
        """
        return {
            "adapters": self.bank.stacks,
            "router": self.router,
            "column_to_slot": self.column_to_slot,
        }

    def __str__(self) -> str:
        from molora_jax.display.tables import composition_table

        return str(composition_table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from molora_jax.display.tables import composition_table

        return composition_table(self)._repr_html_()

    @property
    def column_to_slot(self) -> Int[np.ndarray, " C"]:
        """(C,) slot of each column's adapter now, −1 where it is not resident."""
        return self.bank.column_to_slot(self.column_digests)

    @property
    def column_names(self) -> tuple[str | None, ...]:
        """The name of each column's adapter in the bank, None where it is not resident."""
        names = {each.digest: each.name for each in self.bank.list()}
        return tuple(names.get(digest) for digest in self.column_digests)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes a folder, whole or not at all; `load` gives back the same numbers.

        adapters/NAME/      a plain PEFT folder for each adapter in the bank
        router.safetensors  the router's arrays
        molora.json         everything else

        Raises ValueError where a router column's adapter is not in the bank, since it could not be
        saved with it.
        """
        if absent := self._absent():
            raise ValueError(
                f"the composition cannot be saved: the bank does not hold the adapter of "
                f"{shortened(absent)}. Load it again before saving"
            )
        arrays = router_arrays(self.router)
        check_router(arrays)
        record = {
            "format_version": FORMAT_VERSION,
            "base": {"name": _saved_name(self.base_name), "sha256": self.base_digest},
            "bank": {
                "num_slots": self.bank.num_slots,
                "max_rank": self.bank.max_rank,
                "projections": list(self.bank.projections),
                "dtype": self.bank.dtype.name,
            },
            "adapters": [
                {"name": each.name, "slot": each.slot, "sha256": each.digest}
                for each in self.bank.list()
            ],
            "router": router_config(self.router),
            "columns": list(self.column_digests),
            "labels_used": self.labels_used,
            "metrics": {
                name: value if value is not None and math.isfinite(value) else None
                for name, value in self.metrics.items()
            },
        }
        record["sha256"] = seal(record, arrays)
        owned = {ROUTER_FILE, RECORD_FILE, ADAPTERS_FOLDER}
        with new_folder(path, owned=owned, overwrite=overwrite) as folder:
            for each in self.bank.list():
                target = folder / ADAPTERS_FOLDER / each.name
                target.mkdir(parents=True)
                write_adapter(each.adapter, target)
            (folder / ROUTER_FILE).write_bytes(safetensors_bytes(arrays))
            text = json.dumps(record, indent=2, allow_nan=False)
            (folder / RECORD_FILE).write_text(text + "\n", encoding="utf-8")
        return Path(path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        base: BaseModel | None = None,
        *,
        allow_missing: bool = False,
        allow_other_base: bool = False,
    ) -> Composition:
        """Reads a folder that `save` wrote, for the base it was made with.

        base              None: the base that the record names, from `models.load_base`, which may
                          download it. A path is not saved, so a base of one must be given
        allow_missing     an adapter that is gone or changed becomes a warning: its column is never
                          chosen, so tokens go to the others, or to the base where none is left
        allow_other_base  takes a base with other weights, with a warning

        Raises ValueError, naming what is wrong, for either of these by default, and for a record or
        router that was edited or damaged; FileNotFoundError where there is no composition.
        """
        folder = Path(path)
        if not (base is None or hasattr(base, "digest")):
            raise ValueError(
                f"base is {base!r}: pass load_base(NAME), or nothing where it is known"
            )
        record = read_record(folder)
        router = read_router(folder, record)
        if base is None:
            base = _load_base(record, folder)
        _check_base(record, base, allow_other_base=allow_other_base)
        _check_fits(router, base)
        bank = AdapterBank(base.config, **record.bank, base_name=base.name)
        problems = []
        for entry in record.adapters:
            try:
                bank.load(_read_adapter(folder, entry, base), slot=entry.slot)
            except (FileNotFoundError, ValueError) as error:
                problems.append(str(error))
        composition = cls(
            base_name=base.name,
            base_digest=base.digest,
            bank=bank,
            router=router,
            column_digests=record.columns,
            labels_used=record.labels_used,
            metrics=record.metrics,
        )
        problems += [f"{column} has no adapter" for column in composition._absent()]
        if problems:
            text = f"composition {folder}: {'; '.join(problems)}"
            if not allow_missing:
                raise ValueError(
                    f"{text}. Put the saved files back; in Python allow_missing=True runs without"
                )
            logging.warning("%s", text)
        return composition

    def _absent(self) -> list[str]:
        """The columns whose adapter the bank does not hold."""
        columns = enumerate(zip(self.column_digests, self.column_to_slot, strict=True))
        return [
            f"column {column} (sha256:{digest[:12]})"
            for column, (digest, slot) in columns
            if slot < 0 and digest
        ]


def _saved_name(name: str | None) -> str | None:
    """The base's name where it is one, None where it is a path, which may be private."""
    return name if public_base_name(name) == name and name != LOCAL_PATH else None


def _load_base(record: Record, folder: Path) -> BaseModel:
    name = _saved_name(record.base_name)
    if name is None:
        raise ValueError(
            f"composition {folder}: its base was a folder or file of another machine or place, "
            f"which is not saved (sha256:{record.base_sha256[:12]}). Pass base=load_base(PATH)"
        )
    from molora_jax.models import load_base  # the decoder imports this package

    return load_base(name)


def _check_base(record: Record, base: BaseModel, *, allow_other_base: bool) -> None:
    if record.base_sha256 == base.digest:
        return
    name = _saved_name(record.base_name)
    text = (
        f"this composition was made for the base {repr(name) if name else 'of a path, not saved,'} "
        f"(sha256:{record.base_sha256[:12]}), not for {base.name!r} (sha256:{base.digest[:12]})"
    )
    if not allow_other_base:
        raise ValueError(
            f"{text}: its adapters and router were trained on other weights. Load that base; in "
            "Python allow_other_base=True tries this one"
        )
    logging.warning("%s", text)


def _check_fits(router: Router, base: BaseModel) -> None:
    """ValueError where a router was made for other sizes, which the first step would stumble on."""
    sizes = {"d_model": base.config.hidden_size, "num_layers": base.config.num_layers}
    for name, expected in sizes.items():
        if getattr(router, name, None) not in (None, expected):
            raise ValueError(
                f"the router's {name} is {getattr(router, name)}; the base {base.name!r} has "
                f"{expected}: it was trained for another base"
            )


def _read_adapter(folder: Path, entry: SavedAdapter, base: BaseModel) -> Adapter:
    adapter, _ = load_adapter(
        inside(folder / ADAPTERS_FOLDER / entry.name, folder),
        name=entry.name,
        config=base.config,
        base_name=base.name,
    )
    if adapter.digest != entry.sha256:
        raise ValueError(
            f"adapter {entry.name!r} is not the one the router was trained with: its content is "
            f"sha256:{adapter.digest[:12]}, expected sha256:{entry.sha256[:12]}"
        )
    return adapter
