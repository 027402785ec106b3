"""`compose`: adapters trained apart and a router that nobody trains, as one folder."""

import argparse
from pathlib import Path

from molora_jax.adapters import compose, load_adapter
from molora_jax.adapters.composition_record import ADAPTERS_FOLDER, read_record
from molora_jax.models import load_base
from molora_jax.tools.arguments import Misuse, hint, named_paths
from molora_jax.tools.report import check_free, table


def run(args: argparse.Namespace) -> int:
    """Composes, saves and returns 0; errors are raised."""
    paths, sources = _paths(args), [args.add_to] if args.add_to else []
    check_free(args.out, overwrite=args.overwrite, sources=[*paths.values(), *sources])
    base = load_base(args.base)
    loaded = [
        load_adapter(path, name=name, config=base.config, base_name=base.name)
        for name, path in paths.items()
    ]
    adapters = [adapter for adapter, _ in loaded]
    made = compose(base, adapters, router=args.router, top_k=args.top_k, dtype=args.dtype)
    made.save(args.out, overwrite=args.overwrite)
    tokens = [a.statistics.count if a.statistics else "none" for a in adapters]
    rows = [(a.name, a.rank, n, a.digest[:12]) for a, n in zip(adapters, tokens, strict=True)]
    print(table([("adapter", "rank", "statistics of tokens", "digest"), *rows]))
    for adapter, report in loaded:
        for text in report.warnings:
            print(f"  warning: {adapter.name}: {text}")
    print(
        f"{args.out}: composition of {len(adapters)} adapters for {base.name}, router "
        f"'{args.router}', k = {args.top_k}; nothing was trained"
    )
    return 0


def _paths(args: argparse.Namespace) -> dict[str, str]:
    """{name: PEFT folder} of the composition to add to, and of those given."""
    if args.without and not args.add_to:
        raise Misuse("--without leaves out adapters of a composition: name one with --add_to")
    found = {}
    if args.add_to:
        folder = Path(args.add_to)
        names = [each.name for each in read_record(folder).adapters]
        for name in args.without:
            if name not in names:
                raise Misuse(
                    f"--without: the composition has no adapter {name!r}{hint(name, names)} (it "
                    f"has {', '.join(names)})"
                )
        found = {
            name: str(folder / ADAPTERS_FOLDER / name) for name in names if name not in args.without
        }
    for name, path in named_paths(args.adapters).items():
        if name in found:
            raise Misuse(
                f"the composition has an adapter {name!r} already: --without {name} leaves it out, "
                f"OTHER={path} gives the new one another name"
            )
        found[name] = path
    return found
