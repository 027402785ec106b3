"""Routing rules that requests may name, and what a request means in the slots of a lease."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from molora_jax.adapters.hot_set import Lease
from molora_jax.adapters.names import nearest, shortened
from molora_jax.generation import programs
from molora_jax.generation.request import Request
from molora_jax.models.config import ModelConfig
from molora_jax.routing import ControlTokenRouter, Router, VocabularyRouter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A routing rule that requests may name.

    router    VocabularyRouter, ControlTokenRouter, or a router with logits (LearnedRouter)
    adapters  the name of each of its columns' adapter
    digests   what those adapters must be, where the router was made for just these

        >>> table = np.zeros(260, int)  # every token id to column 0
        >>> mj.Profile(router=mj.VocabularyRouter(table), adapters=["code"]).num_columns
        1
    """

    router: Router
    adapters: Sequence[str]
    digests: Sequence[str] | None = None

    def __post_init__(self):
        for field, value in (("adapters", self.adapters), ("digests", self.digests)):
            if value is not None and len(value) != self.num_columns:
                raise ValueError(
                    f"{field} has {len(value)} entries; the router has {self.num_columns} "
                    "columns: give one for each, in order"
                )

    @property
    def num_columns(self) -> int:
        return self.router.num_columns  # type: ignore[attr-defined]

    @property
    def reads_tokens(self) -> bool:
        """Whether the rule is a table of token ids, and not a router with logits."""
        return isinstance(self.router, VocabularyRouter | ControlTokenRouter)


class Profiles:
    """All profiles of an engine, as the arrays of its programs and the settings of its rows.

    learned      the one router with logits, or None
    tables       (P, V) what each token switches to, by table; the first switches nothing
    num_columns  M, of the map from a row's own columns to slots
    """

    def __init__(self, profiles: Mapping[str, Profile], config: ModelConfig):
        self._profiles = dict(profiles)
        self.learned = _one_learned(self._profiles, config)
        self.tables, self._table_of = _tables(self._profiles, config.vocab_size)
        self.num_columns = max([1, *(each.num_columns for each in self._profiles.values())])

    def __getitem__(self, name: str) -> Profile:
        """KeyError, with the nearest names, where there is none."""
        if name not in self._profiles:
            near = nearest(name, self._profiles)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise KeyError(
                f"no routing profile {name!r}.{hint} Known are: "
                + (shortened(self._profiles) or "none")
            )
        return self._profiles[name]

    def names(self, request: Request) -> list[str]:
        """The adapters that a request needs resident, all of them together."""
        if request.profile is None:
            return [] if request.adapter is None else [request.adapter]
        profile = self[request.profile]
        if request.among is None:
            return list(profile.adapters)
        if profile.reads_tokens:
            raise ValueError(
                f"profile {request.profile!r} reads tokens; among is for learned profiles"
            )
        unknown = [name for name in request.among if name not in profile.adapters]
        if unknown:
            raise ValueError(
                f"among names {unknown[0]!r}; profile {request.profile!r} has "
                f"{shortened(profile.adapters)}"
            )
        return [name for name in profile.adapters if name in request.among]

    def check_digests(self, request: Request, lease: Lease) -> None:
        """ValueError where a profile was made for another content of an adapter than is leased."""
        if request.profile is None:
            return
        profile = self[request.profile]
        for name, digest in zip(profile.adapters, profile.digests or (), strict=False):
            version = lease.versions.get(name)
            if version is not None and version.digest != digest:
                raise ValueError(
                    f"adapter {name!r} is now sha256:{version.digest[:12]}; the router was made "
                    f"for sha256:{digest[:12]}. Load that one, or make the router anew"
                )

    def settings(self, request: Request, slots: Mapping[str, int]) -> programs.RowSettings:
        """The row's settings, where its adapters lie in these slots."""
        columns = np.full(self.num_columns, -1, np.int32)
        common: dict[str, Any] = {
            "sampling": request.sampling,
            "seed": request.seed,
            "logprobs": request.logprobs is not None,
        }
        if request.profile is not None:
            profile = self[request.profile]
            columns[: len(profile.adapters)] = [slots.get(n, -1) for n in profile.adapters]
            return programs.row_settings(
                columns,
                table=self._table_of.get(request.profile, 0),
                initial=getattr(profile.router, "initial", -1),
                learned=not profile.reads_tokens,
                **common,
            )
        if request.adapter is None:
            return programs.row_settings(columns, **common)
        columns[0] = slots[request.adapter]
        return programs.row_settings(columns, initial=0, **common)


def _one_learned(profiles: Mapping[str, Profile], config: ModelConfig) -> Router | None:
    """The one router with logits that the compiled step runs, if any profile has one."""
    found = {id(p.router): p.router for p in profiles.values() if not p.reads_tokens}
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} routers with logits: a compiled step runs one. Make an engine for each"
        )
    for router in found.values():
        width = getattr(router, "d_model", config.hidden_size)
        if width != config.hidden_size:
            raise ValueError(
                f"the router reads {width} numbers a token, the base has "
                f"{config.hidden_size}: it was made for another base"
            )
        return router
    return None


def _tables(profiles: Mapping[str, Profile], vocab_size: int) -> tuple[np.ndarray, dict]:
    """(P, V) tables, the first of which switches nothing, and the row of each profile's."""
    tables, table_of = [programs.keep_table(vocab_size)], {}
    for name, profile in profiles.items():
        if not profile.reads_tokens:
            continue
        table = np.asarray(profile.router.table[...])  # type: ignore[attr-defined]
        if len(table) != vocab_size:
            raise ValueError(
                f"profile {name!r} has a table of {len(table)} token ids and the model "
                f"{vocab_size}: give every id a column, -1 for none"
            )
        table_of[name] = len(tables)
        tables.append(table.astype(np.int16))
    return np.stack(tables), table_of
