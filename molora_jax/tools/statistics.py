"""`statistics`: what a router must know of an adapter's data, left beside the adapter."""

import argparse
import os
import shutil
from pathlib import Path

from molora_jax.adapters import load_adapter
from molora_jax.adapters.folders import new_folder
from molora_jax.adapters.peft_folder import ADAPTER_FILES, PEFT_FILES, find_peft_folder
from molora_jax.display import warn
from molora_jax.files import near_path
from molora_jax.models import load_base
from molora_jax.routing.statistics import few_tokens
from molora_jax.routing.statistics_file import STATISTICS_FILE, save_statistics
from molora_jax.tools.report import check_free, next_step
from molora_jax.training import gather_statistics, read_windows


def run(args: argparse.Namespace) -> int:
    """Gathers, writes and returns 0; errors are raised."""
    folder, _ = find_peft_folder(args.adapter)
    out = folder if args.out is None else Path(args.out)
    if args.out is not None:
        check_free(out, overwrite=args.overwrite, sources=[folder])
    elif (path := folder / STATISTICS_FILE).exists() and not args.overwrite:
        raise ValueError(f"{path} exists already: --overwrite replaces it")
    elif not os.access(folder, os.W_OK):
        raise OSError(
            f"{folder} cannot be written: --out DIR writes a copy of the adapter there, "
            "statistics and all"
        )
    if not Path(args.data).is_file():
        raise ValueError(
            f"--data {args.data}: there is no such file; expected JSON lines{near_path(args.data)}"
        )
    base = load_base(args.base)
    adapter, report = load_adapter(folder, config=base.config, base_name=base.name)
    for text in report.warnings:
        if STATISTICS_FILE not in text:  # those are replaced now
            warn(f"adapter {adapter.name!r}: {text}")
    windows, _ = read_windows(args.data, base.tokenizer, seq_len=args.seq_len)
    found = gather_statistics(base, windows, num_features=args.features, max_rows=args.rows)
    if warning := few_tokens(found.count, found.num_features or found.d_model):
        warn(warning)
    digests = {"base_digest": base.digest, "adapter_digest": adapter.digest}
    if args.out is None:
        save_statistics(found, out, **digests)
    else:
        with new_folder(out, owned=ADAPTER_FILES, overwrite=args.overwrite) as copy:
            for name in PEFT_FILES:
                if (folder / name).exists():  # a link of the hub's cache is followed
                    shutil.copyfile(folder / name, copy / name)
            save_statistics(found, copy, **digests)
    path = out / STATISTICS_FILE
    rows = min(windows.num_rows, args.rows)
    left = f" of {windows.num_rows} (--rows reads more)" if rows < windows.num_rows else ""
    print(
        f"{path}: {found.count} of the adapter's own tokens, {found.num_features or 'all'} "
        f"features of {len(found.moments)} layers, {path.stat().st_size:,} bytes\n"
        f"  from {rows} windows{left}, of each what fits behind a beginning that the base wrote\n"
        f"  for adapter sha256:{adapter.digest[:12]} under base sha256:{base.digest[:12]}; no "
        "text is in it"
    )
    others = [str(out), "OTHER", "--base", args.base, "--out", "DIR"]
    next_step(args, "compose", *others, why="when another adapter has its statistics too")
    return 0
