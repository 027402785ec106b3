"""`serve`: a base, its adapters and routing profiles over HTTP."""

import argparse
import dataclasses
import importlib.util
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molora_jax.adapters import PROJECTIONS, Adapter, AdapterBank, HotSet, load_adapter
from molora_jax.adapters.composition_record import ADAPTERS_FOLDER
from molora_jax.adapters.slot_format import SlotFormat, readable_size
from molora_jax.display import warn
from molora_jax.files import parse_json
from molora_jax.generation import Engine, Profile
from molora_jax.hub import same_model
from molora_jax.models import BaseModel, load_base
from molora_jax.serving import profiles as profile_files
from molora_jax.tools.arguments import Misuse, named_paths
from molora_jax.tools.report import check_there

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
DEFAULT_SLOTS, DEFAULT_RANK, DEFAULT_CONTEXT = 8, 16, 1024


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"the server needs {', '.join(missing)}, of the extra serve: pip install "
            '"molora-jax[serve]"'
        )
    # Behind the check: they import these packages.
    from molora_jax.serving.app import Service
    from molora_jax.serving.catalog import Catalog
    from molora_jax.serving.server import Server, bind, is_loopback, run_until_signal

    if args.allow_runtime_lora_updates != (args.adapter_root is not None):
        raise Misuse("--allow_runtime_lora_updates and --adapter_root DIR belong together")
    if args.adapter_root is not None and not args.adapter_root.is_dir():
        raise Misuse(f"--adapter_root {args.adapter_root} is no folder")
    paths = adapter_paths(args.adapters, args.model)
    check_there(paths.values(), args.composition)
    logging.getLogger("absl").setLevel(logging.WARNING)
    sock = bind(args.host, args.port)
    with sock:
        base = load_base(args.model, dtype=args.dtype)
        given = _read(args, base, paths)
        engine = _engine(args, base, given)
        catalog = Catalog(
            engine,
            base_id=args.served_model_name or _base_id(args.model),
            base_root=args.model,
            profiles=given.profiles,
            sources=given.sources,
            adapter_root=args.adapter_root,
        )
        _say(f"adapters: {', '.join(catalog.adapters) or 'none'}")
        if given.profiles:
            _say(f"routing profiles: {', '.join(given.profiles)}")
        start = time.monotonic()
        _say("warming up: a program for each length of prompts, and the step")
        count = engine.warm_up()
        _say(f"{count} programs compiled in {time.monotonic() - start:.1f} s")
        host, port = sock.getsockname()[:2]
        if not is_loopback(sock):
            print(
                f"note: {host} is no loopback address: whoever reaches it may use the model, since "
                "nobody is asked for a password",
                file=sys.stderr,
            )
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        server = Server(
            Service(engine, catalog),
            grace_seconds=args.grace,
            on_ready=lambda: _say(f"ready: {catalog.base_id} at {address}/v1, until Ctrl+C"),
        )
        run_until_signal(server, sock)
        _say("stopped")
    return 0


@dataclasses.dataclass
class _Given:
    """Adapters, profiles, and where the adapters lie, by the names of the command line."""

    adapters: dict[str, Adapter]
    profiles: dict[str, Profile]
    sources: dict[str, str]


def adapter_paths(items: Sequence[str], model: str) -> dict[str, str]:
    """{name: path} of `NAME=PATH`, of several with commas between, and of vLLM's JSON form.

    Raises Misuse, also for a base_model_name that is not the model's.
    """
    plain: list[str] = []
    for item in items:
        if item.lstrip().startswith("{"):
            plain.append(_of_json(item, model))
        elif "," in item and not Path(item.partition("=")[2] or item).exists():
            plain += [part for part in item.split(",") if part]
        else:
            plain.append(item)
    return named_paths(plain)


def _of_json(item: str, model: str) -> str:
    try:
        entry = parse_json(item, where="--adapters")
    except ValueError as error:
        raise Misuse(str(error)) from None
    known = {"name", "path", "base_model_name"}
    if not {"name", "path"} <= entry.keys() <= known or not all(
        isinstance(each, str) for each in entry.values()
    ):
        raise Misuse(f"--adapters {item}: expected name and path, and perhaps base_model_name")
    stated = entry.get("base_model_name", model)
    if not same_model(stated, model):
        raise Misuse(f"--adapters {item}: base_model_name is not --model {model}")
    return f"{entry['name']}={entry['path']}"


def _base_id(model: str) -> str:
    """What clients call the base: its name, or the last part of its path."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _read(args: argparse.Namespace, base: BaseModel, paths: dict[str, str]) -> _Given:
    """Everything that is to be served, read and checked against the base."""
    given = _Given({}, {}, dict(paths))
    for name, path in paths.items():
        adapter, report = load_adapter(path, name=name, config=base.config, base_name=base.name)
        for text in report.warnings:
            warn(f"adapter {name!r}: {text}")
        given.adapters[name] = adapter
    if args.composition is not None:
        profile, adapters = profile_files.read_composition(args.composition, base)
        given.profiles[args.composition_name] = profile
        for name, adapter in adapters.items():
            if name in given.adapters and given.adapters[name].digest != adapter.digest:
                raise ValueError(
                    f"--composition {args.composition} has another adapter {name!r} than "
                    "--adapters: give that one another name"
                )
            given.adapters[name] = adapter
            given.sources.setdefault(name, str(Path(args.composition) / ADAPTERS_FOLDER / name))
    for option, read in (
        ("vocab", profile_files.read_vocabulary),
        ("control", profile_files.read_control),
    ):
        file = args.vocab_routing if option == "vocab" else args.control_tokens
        if file is not None:
            if option in given.profiles:
                raise Misuse(f"--composition_name {option} is the name of another profile")
            given.profiles[option] = read(file, base)
    return given


def _engine(args: argparse.Namespace, base: BaseModel, given: _Given) -> Engine:
    """The bank, of which the size is said before it is allocated, and the engine around it."""
    hot_set = None
    if given.adapters or given.profiles or args.adapter_root is not None:
        rank = args.max_lora_rank or max(
            [DEFAULT_RANK, *(each.rank for each in given.adapters.values())]
        )
        slot = SlotFormat.of(
            base.config, max_rank=rank, projections=PROJECTIONS, dtype=args.dtype
        ).num_bytes
        size: dict[str, Any] = {"num_slots": args.max_loras}
        if args.max_loras is None:
            size = {"num_slots": max([DEFAULT_SLOTS, *map(_columns, given.profiles.values())])}
        if args.memory_budget is not None:
            if args.max_loras is not None:
                raise Misuse("--max_loras and --memory_budget both say how many slots: give one")
            size = {"memory_budget": args.memory_budget}
        slots = size.get("num_slots") or args.memory_budget // slot
        _say(
            f"adapter bank: {slots} slots of rank {rank}, {readable_size(slot)} a slot, "
            f"{readable_size(slots * slot)} in all"
        )
        bank = AdapterBank(
            base.config, max_rank=rank, dtype=args.dtype, base_name=base.name, **size
        )
        most = max(args.max_cpu_loras, len(given.adapters))
        hot_set = HotSet(bank, host_budget=most * slot)
        for name, adapter in given.adapters.items():
            hot_set.add(adapter, name=name)
    return Engine(
        base,
        hot_set,
        rows=args.rows,
        context=args.context or min(DEFAULT_CONTEXT, base.config.max_positions),
        profiles=given.profiles,
        max_waiting=args.max_waiting,
        pack=args.pack,
    )


def _columns(profile: Profile) -> int:
    return len(set(profile.adapters))


def _say(line: str) -> None:
    print(line, flush=True)
