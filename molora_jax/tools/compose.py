"""`compose`: adapters trained apart and a router that nobody trains, as one folder."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Literal

from molora_jax.adapters import Adapter, Composition, compose, load_adapter
from molora_jax.display import Table, show, warn
from molora_jax.models import BaseModel, load_base
from molora_jax.routing import PrototypeRouter
from molora_jax.routing.statistics import few_tokens
from molora_jax.routing.statistics_file import STATISTICS_FILE
from molora_jax.tools import compose_check
from molora_jax.tools.arguments import Misuse, hint, named_paths
from molora_jax.tools.report import check_free, check_there, next_step, percent

SIZES = ("median |BA| / |W|", "largest")


def run(args: argparse.Namespace) -> int:
    """Composes, saves and returns 0; errors are raised."""
    if args.without and not args.add_to:
        raise Misuse("--without leaves out adapters of a composition: name one with --add_to")
    paths = named_paths(args.adapters)
    before = [args.add_to] if args.add_to else []
    check_free(args.out, overwrite=args.overwrite, sources=[*paths.values(), *before])
    check_there(paths.values(), args.add_to)
    base = load_base(args.base)
    # Loaded whole, so that one which was edited or is of another base is refused.
    old = Composition.load(args.add_to, base) if args.add_to else None
    kind: Literal["statistics", "arrow"] = args.router or (
        "arrow" if old and isinstance(old.router, PrototypeRouter) else "statistics"
    )
    adapters = _kept(old, args.without) if old else []
    for name, path in paths.items():
        if any(name == each.name for each in adapters):
            raise Misuse(
                f"the composition has an adapter {name!r} already: --without {name} leaves it out; "
                f"another adapter needs another name, OTHER={path}"
            )
        adapters.append(_read(name, path, base, kind))
    texts = compose_check.read_checks(args.check, [each.name for each in adapters], base)
    made = compose(
        base,
        adapters,
        router=kind,
        top_k=args.top_k or (old.router.top_k if old else 1),
        dtype=args.dtype or (old.bank.dtype.name if old else "float32"),
    )
    made.save(args.out, overwrite=args.overwrite)
    _say(args.out, kind, made, old, compose_check.sizes(base, adapters))
    if texts:
        show("")
        compose_check.show_own_shares(base, made, texts)
    prompt = ["--composition", args.out, "--prompt", "TEXT"]
    next_step(args, "generate", "--base", args.base, *prompt)
    return 0


def _kept(old: Composition, without: Sequence[str]) -> list[Adapter]:
    names = [name for name in old.column_names if name is not None]
    for name in without:
        if name not in names:
            raise Misuse(
                f"--without: the composition has no adapter {name!r}{hint(name, names)} (it "
                f"has {', '.join(names)})"
            )
    adapters = {each.name: each.adapter for each in old.bank.list()}
    return [adapters[name] for name in names if name not in without]


def _read(name: str, path: str, base: BaseModel, router: str) -> Adapter:
    adapter, report = load_adapter(path, name=name, config=base.config, base_name=base.name)
    for text in report.warnings:
        if router == "statistics" and STATISTICS_FILE in text:
            raise ValueError(f"adapter {name!r}: {text}. Or take --router arrow")
        warn(f"adapter {name!r}: {text}")
    return adapter


def _say(
    out: str,
    kind: str,
    made: Composition,
    old: Composition | None,
    sizes: Mapping[str, tuple[float, float]],
) -> None:
    adapters = [each.adapter for each in made.bank.list()]
    head = ["adapter", "rank", "tokens of statistics", *SIZES, "digest"]
    rows = []
    for each in adapters:
        tokens = each.statistics.count if each.statistics else None
        rows.append([each.name, each.rank, tokens, *map(percent, sizes[each.name]),
                     each.digest[:12]])  # fmt: skip
    if kind != "statistics":  # nobody reads them
        head, rows = [*head[:2], *head[3:]], [[*row[:2], *row[3:]] for row in rows]
    show(Table(head, rows, right=SIZES))
    if kind == "statistics":
        for each in adapters:
            packed = each.statistics
            assert packed is not None
            if warning := few_tokens(packed.count, packed.num_features or packed.d_model):
                warn(f"adapter {each.name!r}: {warning}")
        compose_check.warn_of_size(sizes)
    if old is not None and type(old.router) is not type(made.router):
        print(
            f"the {type(old.router).__name__} of the composition before is replaced by a "
            f"{type(made.router).__name__}"
        )
    how = {"statistics": "solved from the statistics", "arrow": "read from the adapters' weights"}
    print(
        f"{out}: composition of {len(adapters)} adapters for {made.base_name}, {made.router.top_k} "
        f"a token, {made.bank.dtype.name}; the router is {how[kind]}, nothing was trained",
        flush=True,
    )
    if kind == "arrow" and all(each.statistics for each in adapters):
        print("every adapter has statistics, which were not read: --router statistics uses them")
