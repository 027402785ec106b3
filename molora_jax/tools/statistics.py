"""`statistics`: what a router must know of an adapter's data, left beside the adapter."""

import argparse
import os

from molora_jax.adapters import load_adapter
from molora_jax.adapters.peft_folder import find_peft_folder
from molora_jax.display import warn
from molora_jax.models import load_base
from molora_jax.routing.statistics import few_tokens
from molora_jax.routing.statistics_file import STATISTICS_FILE, save_statistics
from molora_jax.training import gather_statistics, read_windows


def run(args: argparse.Namespace) -> int:
    """Gathers, writes and returns 0; errors are raised."""
    folder, _ = find_peft_folder(args.adapter)
    path = folder / STATISTICS_FILE
    if path.exists() and not args.overwrite:
        raise ValueError(f"{path} exists already: --overwrite replaces it")
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} cannot be written: copy the adapter to a folder of your own")
    base = load_base(args.base)
    adapter, report = load_adapter(folder, config=base.config, base_name=base.name)
    for text in report.warnings:
        if STATISTICS_FILE not in text:  # those are replaced now
            warn(f"adapter {adapter.name!r}: {text}")
    windows, _ = read_windows(args.data, base.tokenizer, seq_len=args.seq_len)
    found = gather_statistics(base, windows, num_features=args.features, max_rows=args.rows)
    save_statistics(found, folder, base_digest=base.digest, adapter_digest=adapter.digest)
    print(
        f"{path}: {found.count} tokens (those behind text of the base's own), "
        f"{found.num_features or 'all'} features of {len(found.moments)} layers, "
        f"{path.stat().st_size:,} bytes, for adapter "
        f"{adapter.digest[:12]} under base {base.digest[:12]}"
    )
    if warning := few_tokens(found.count, found.num_features or found.d_model):
        warn(warning)
    return 0
