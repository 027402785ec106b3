"""molora.json and router.safetensors of a saved composition, read with every field checked."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.adapters.names import PROJECTIONS, brief, check_label, nearest, shortened
from molora_jax.adapters.peft_folder import CONFIG_FILE
from molora_jax.files import near_path, read_json, read_safetensors
from molora_jax.routing.registry import (
    Router,
    build_router,
    router_arrays,
    router_config,
)

FORMAT_VERSION = 2
ROUTER_FILE, RECORD_FILE, ADAPTERS_FOLDER = "router.safetensors", "molora.json", "adapters"
_FIELDS = ("base", "bank", "adapters", "router", "columns", "labels_used", "metrics", "sha256")
_DTYPES = ("float32", "bfloat16", "float16")
_MOST = 2**16  # slots and rank: more is a damaged number, not a bank
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """An adapter of the record: its folder's name, its slot and the sha256 of its content."""

    name: str
    slot: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """What molora.json says, and `content`, the whole of it as it stands there.

    base_name is None where the base was a path, which is not saved; sha256 is its `seal`.
    """

    base_name: str | None
    base_sha256: str
    bank: dict[str, Any]
    adapters: tuple[SavedAdapter, ...]
    router: dict[str, Any]
    columns: tuple[str, ...]
    labels_used: bool | None
    metrics: dict[str, int | float | None]
    sha256: str
    content: Mapping[str, Any]


def seal(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 over the record, its metrics and this number left out, and the router's arrays.

    It binds them: a router's columns mean adapters by their order, so a router of another save, or
    columns in another order, would route well and to the wrong adapters.
    """
    content = {name: value for name, value in record.items() if name not in ("metrics", "sha256")}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f" {name} {array.dtype.name} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def read_record(folder: Path) -> Record:
    """Reads molora.json. Raises FileNotFoundError, or ValueError naming the field and its value."""
    file = folder / RECORD_FILE
    if not file.is_file():
        if (folder / CONFIG_FILE).is_file():
            raise FileNotFoundError(
                f"no composition at {folder}: it is an adapter, which --adapter and load_adapter "
                "take. `molora compose` makes a composition of several"
            )
        raise FileNotFoundError(
            f"no composition at {folder}: expected a folder with {RECORD_FILE}{near_path(folder)}"
        )
    record = read_json(file, where=str(file), root=folder)
    version = record.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format_version is {brief(version)}; this version reads {FORMAT_VERSION}. "
            "Read it with the version of molora_jax that wrote it"
        )
    if missing := [name for name in _FIELDS if name not in record]:
        raise ValueError(f"{file} lacks {', '.join(missing)}; copy the folder again")
    check = _Check(str(file))
    check.keys("", record, {"format_version", *_FIELDS})
    bank = _bank(check, record["bank"])
    metrics = check.object("metrics", record["metrics"])
    for name, value in metrics.items():
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise check.wrong(f"metrics[{brief(name)}]", value, "a number or null")
    if record["labels_used"] is not None and type(record["labels_used"]) is not bool:
        raise check.wrong("labels_used", record["labels_used"], "true, false or null")
    router = check.object("router", record["router"])
    if not isinstance(router.get("kind"), str):
        raise check.wrong("router['kind']", router.get("kind"), "the name of a router")
    base = check.object("base", record["base"], {"name", "sha256"})
    if base["name"] is not None and not isinstance(base["name"], str):
        raise check.wrong("base['name']", base["name"], "a text or null")
    columns = check.list("columns", record["columns"])
    return Record(
        base_name=base["name"],
        base_sha256=check.digest("base['sha256']", base["sha256"]),
        bank=bank,
        adapters=_adapters(check, record["adapters"], bank["num_slots"]),
        router=router,
        columns=tuple(
            check.digest(f"columns[{i}]", each) if each != "" else ""
            for i, each in enumerate(columns)
        ),
        labels_used=record["labels_used"],
        metrics=metrics,
        sha256=check.digest("sha256", record["sha256"]),
        content=record,
    )


def _bank(check: "_Check", value: Any) -> dict[str, Any]:
    bank = check.object("bank", value, {"num_slots", "max_rank", "projections", "dtype"})
    for name in ("num_slots", "max_rank"):
        check.integer(f"bank[{name!r}]", bank[name], 1, _MOST)
    projections = check.list("bank['projections']", bank["projections"])
    if not projections or [p for p in PROJECTIONS if p in projections] != projections:
        raise check.wrong(
            "bank['projections']", projections, f"some of {', '.join(PROJECTIONS)}, in this order"
        )
    if not isinstance(bank["dtype"], str) or bank["dtype"] not in _DTYPES:
        raise check.wrong("bank['dtype']", bank["dtype"], f"one of {', '.join(_DTYPES)}")
    return bank


def _adapters(check: "_Check", value: Any, num_slots: int) -> tuple[SavedAdapter, ...]:
    found: list[SavedAdapter] = []
    for index, entry in enumerate(check.list("adapters", value)):
        here = f"adapters[{index}]"
        entry = check.object(here, entry, {"name", "slot", "sha256"})
        # The name becomes a path: checked, so that an edited record cannot lead out of the folder.
        try:
            name = check_label(entry["name"])
        except ValueError as error:
            raise ValueError(f"{check.where}: {here}: {error}") from None
        check.integer(f"{here}['slot']", entry["slot"], 0, num_slots - 1)
        check.digest(f"{here}['sha256']", entry["sha256"])
        for other in found:
            for field in ("name", "slot", "sha256"):
                if getattr(other, field) == entry[field]:
                    raise ValueError(
                        f"{check.where}: {here} has the {field} {brief(entry[field])} of an "
                        "adapter before it; every adapter has its own"
                    )
        found.append(SavedAdapter(name=name, slot=entry["slot"], sha256=entry["sha256"]))
    return tuple(found)


def read_router(folder: Path, record: Record) -> Router:
    """The router of a folder.

    Raises ValueError where its arrays and settings do not make one, and where it, or the record, is
    not what was saved together.
    """
    config = record.router
    file = folder / ROUTER_FILE
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no {ROUTER_FILE}; copy it again")
    stored = read_safetensors(file, where=str(file), root=folder)
    arrays = {key: stored.get(key) for key in stored.keys()}  # noqa: SIM118 (no mapping)
    try:
        check_router(arrays)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    saved = dict(arrays)
    where = f"{folder / RECORD_FILE}: the router {brief(config.get('kind'))}"
    shown = brief(dict(config), limit=300)
    try:
        router = build_router(dict(config), arrays)
    except KeyError as error:
        raise ValueError(
            f"{where} needs the array {error} of {ROUTER_FILE}, which lacks it"
        ) from None
    except (TypeError, AttributeError) as error:  # a setting unknown, missing or of another type
        raise ValueError(f"{where} cannot be built from {shown}: {_line(error)}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {_line(error)}") from error
    # What was read must be what would be written: nothing ignored, nothing converted.
    if (again := router_config(router)) != dict(config):
        raise ValueError(f"{where} has settings {shown}; understood was {again}")
    for name, array in router_arrays(router).items():
        got = arrays.pop(name, None)
        if got is None or (got.shape, got.dtype) != (array.shape, array.dtype):
            shown = "missing" if got is None else f"{got.dtype} {got.shape}"
            raise ValueError(
                f"{where}: array {name!r} of {ROUTER_FILE} is {shown}; expected "
                f"{array.dtype} {array.shape}"
            )
    if arrays:
        raise ValueError(
            f"{where} has no place for {shortened(map(repr, arrays))} of {ROUTER_FILE}"
        )
    if seal(record.content, saved) != record.sha256:
        raise ValueError(
            f"{folder}: {RECORD_FILE} and {ROUTER_FILE} are not those that were saved together: "
            "one was edited, or is of another composition. Copy both again; to change a setting, "
            "load the composition, change it there, and save it"
        )
    return router


def check_router(arrays: Mapping[str, np.ndarray]) -> None:
    """ValueError for NaN: such a router would send every token to the base without a word."""
    with np.errstate(invalid="ignore"):  # numpy warns of what it finds in the narrow types
        broken = [
            f"{name} ({int((~np.isfinite(array)).sum())} values)"
            for name, array in arrays.items()
            if not np.isfinite(array).all()
        ]
    if broken:
        raise ValueError(
            f"the router has NaN or infinite numbers in {shortened(broken)}: its training diverged "
            "or the file is damaged. Train it again or take an earlier save"
        )


def _line(error: Exception) -> str:
    """The error's text on one line."""
    return " ".join(str(error).split())[:400]


@dataclass(frozen=True)
class _Check:
    """Types of fields, with the file and the field in each message."""

    where: str

    def wrong(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {brief(value)}; expected {expected}")

    def object(self, name: str, value: Any, fields: set[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        if fields is not None:
            if missing := sorted(fields - set(value)):
                raise ValueError(f"{self.where}: {name} lacks {', '.join(missing)}")
            self.keys(f"{name}: ", value, fields)
        return value

    def keys(self, name: str, value: Mapping[str, Any], known: set[str]) -> None:
        if unknown := [key for key in value if key not in known]:
            near = nearest(unknown[0], known)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{self.where}: {name}unknown field {brief(unknown[0])}{hint}")

    def list(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def integer(self, name: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, value, f"an integer from {low} to {high}")
        return value

    def digest(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not _DIGEST.fullmatch(value):
            raise self.wrong(name, value, "a sha256 (64 hexadecimal digits)")
        return value
