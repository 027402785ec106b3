"""Catalog: what the names under `model` mean, and the adapters that come and go while serving."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molora_jax.adapters.names import check_label, nearest, shortened
from molora_jax.files import inside, one_line
from molora_jax.generation import Engine, Profile
from molora_jax.serving.errors import ApiError, refused

OWNER = "molora-jax"
_SWITCH = (
    "start the server with --allow_runtime_lora_updates and --adapter_root DIR, the folder that "
    "adapters may be loaded from"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """What answers: the base, one adapter for every token, or a routing profile.

    label  a known name: of the base, the adapter or the profile
    """

    label: str
    adapter: str | None = None
    profile: str | None = None


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where an adapter was loaded from, what it is, and when."""

    root: str
    digest: str
    created: int


class Catalog:
    """The base, the adapters of an engine's hot set and its profiles, by the names of clients.

    base_id       the base's name over HTTP
    base_root     what it was loaded from
    profiles      those of the engine
    sources       where the adapters were loaded from, by name
    adapter_root  the folder that clients may load adapters from; None: loading is off
    """

    def __init__(
        self,
        engine: Engine,
        *,
        base_id: str,
        base_root: str | None = None,
        profiles: Mapping[str, Profile] | None = None,
        sources: Mapping[str, str] | None = None,
        adapter_root: str | Path | None = None,
    ):
        self.base_id, self.base_root = base_id, base_id if base_root is None else base_root
        self.profiles = dict(profiles or {})
        self.adapter_root = None if adapter_root is None else Path(adapter_root).resolve()
        self._hot_set = engine.hot_set
        self._started = int(time.time())
        self._loading = threading.Lock()
        self._adapters: dict[str, _Source] = {}
        for version in () if self._hot_set is None else self._hot_set.list():
            self._check_free(version.name)
            root = (sources or {}).get(version.name, version.name)
            self._adapters[version.name] = _Source(root, version.digest, self._started)
        self._check_profiles()
        if self.adapter_root is not None and self._hot_set is None:
            raise ValueError("adapter_root is set, but the engine has no hot set to load into")

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that are served now."""
        return list(self._adapters)

    def known(self, label: str) -> bool:
        """Whether a target of this label could be asked for now."""
        return label == self.base_id or label in self.profiles or label in self._adapters

    def target(self, model: str) -> Target:
        """What a client's `model` means. Raises ApiError 404, with the names that would."""
        if model == self.base_id:
            return Target(model)
        if model in self.profiles:
            return Target(model, profile=model)
        # An adapter's name has no colon, a base's may: the last one divides.
        base, colon, adapter = model.rpartition(":")
        name = adapter if colon and base == self.base_id else model
        if name in self._adapters:
            return Target(name, adapter=name)
        known = [self.base_id, *self.adapters, *self.profiles]
        near = nearest(name, known)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ApiError(
            404,
            f"the model {one_line(model)!r} does not exist.{hint} Known are: "
            + shortened(known, limit=20),
            param="model",
            code="model_not_found",
        )

    def models(self) -> list[dict[str, Any]]:
        """An entry for the base, and one for each adapter and profile as its child."""
        found = [self._entry(self.base_id, self.base_root, None, self._started)]
        for name, source in list(self._adapters.items()):
            entry = self._entry(name, source.root, self.base_id, source.created)
            found.append(entry | {"digest": f"sha256:{source.digest}"})
        for name, profile in self.profiles.items():
            entry = self._entry(name, name, self.base_id, self._started)
            found.append(entry | {"adapters": list(profile.adapters)})
        return found

    def load(self, name: str, path: str, *, inplace: bool = False) -> str:
        """Loads an adapter from the adapter root, and returns what vLLM says then.

        Reads and checks the whole adapter: call it in a thread of its own. Raises ApiError: 403
        where loading is off, 404 where nothing is there, 400 with the reason otherwise.
        """
        folder = self._folder(path)
        # One at a time: each takes an adapter's bytes several times over while it is read.
        with self._loading:
            assert self._hot_set is not None
            taken = name in self._adapters
            if taken and not inplace:
                raise refused(
                    f"The lora adapter {name!r} has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            try:
                check_label(name)
                if taken:
                    self._check_replaceable(name)
                    version = self._hot_set.replace(name, folder)
                else:
                    self._check_free(name)
                    version = self._hot_set.add(folder, name=name)
            except FileNotFoundError as error:
                raise ApiError(404, self._public(error), param="lora_path") from None
            except (ValueError, OSError) as error:
                words = self._public(error)
                raise refused(words, param="lora_path", code="adapter_refused") from None
            self._adapters[name] = _Source(path, version.digest, int(time.time()))
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Forgets an adapter, and returns what vLLM says then; requests that use it end with it.

        Raises ApiError: 403 where loading is off, 404 for an unknown name, 400 for an adapter that
        a routing profile needs.
        """
        self._check_on()
        with self._loading:
            if name not in self._adapters:
                known = shortened(self.adapters, limit=20) or "none"
                raise ApiError(
                    404,
                    f"The lora adapter {one_line(name)!r} cannot be found. Loaded are: {known}",
                    param="lora_name",
                )
            if users := [p for p, each in self.profiles.items() if name in each.adapters]:
                raise refused(
                    f"the adapter {name!r} belongs to the routing profile {users[0]!r} and stays "
                    "loaded while that is served",
                    param="lora_name",
                )
            assert self._hot_set is not None
            del self._adapters[name]
            self._hot_set.remove(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _entry(self, name: str, root: str, parent: str | None, created: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": OWNER,
            "root": root,
            "parent": parent,
        }

    def _check_profiles(self) -> None:
        for name, profile in self.profiles.items():
            if name == self.base_id:
                raise ValueError(f"the profile {name!r} has the name of the base: rename either")
            for each in profile.adapters:
                if each not in self._adapters:
                    near = nearest(each, self.adapters)
                    hint = f" Did you mean {near[0]!r}?" if near else ""
                    known = shortened(self.adapters, limit=20) or "none"
                    raise ValueError(
                        f"the profile {name!r} routes to the adapter {each!r}, which is not "
                        f"loaded.{hint} Loaded are: {known}"
                    )

    def _check_free(self, name: str) -> None:
        """ValueError where a name would mean two things."""
        if name == self.base_id or name in self.profiles or name in self._adapters:
            raise ValueError(
                f"the name {name!r} is taken: base, adapters and profiles are asked for by one name"
            )

    def _check_replaceable(self, name: str) -> None:
        for profile, each in self.profiles.items():
            if name in each.adapters and each.digests is not None:
                raise ValueError(
                    f"the router of the profile {profile!r} was trained with this content of "
                    f"{name!r}; load the other one under another name"
                )

    def _check_on(self) -> None:
        if self.adapter_root is None:
            raise ApiError(
                403,
                f"loading and unloading adapters at run time is switched off: {_SWITCH}",
                code="runtime_lora_updates_off",
            )

    def _public(self, error: Exception) -> str:
        """Its words, without where the adapter root lies or its links lead to."""
        words = str(error).replace(f"{self.adapter_root}{os.sep}", "")
        words = words.replace(str(self.adapter_root), "--adapter_root")
        return re.sub(r" \(to /[^)]*\)", "", words)

    def _folder(self, path: str) -> Path:
        """The folder that a client named, inside the adapter root with all links followed."""
        self._check_on()
        assert self.adapter_root is not None
        try:
            folder = inside(self.adapter_root / path, self.adapter_root)
        except ValueError:  # without the place that a link leads to, or the root itself
            raise refused(
                f"lora_path {one_line(path)!r} leads out of the folder that adapters may be "
                "loaded from (--adapter_root), or cannot be followed",
                param="lora_path",
                code="outside_adapter_root",
            ) from None
        if not os.path.isdir(folder):
            raise ApiError(
                404,
                f"lora_path {one_line(path)!r} is no folder in --adapter_root",
                param="lora_path",
            )
        return folder
