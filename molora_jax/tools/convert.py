"""`convert`: a training checkpoint into a PEFT folder, a PEFT folder into one or a smaller one."""

import argparse
from pathlib import Path

import numpy as np

from molora_jax.adapters import Adapter, LoraPair, load_adapter, save_adapter
from molora_jax.adapters.lowrank import total_error
from molora_jax.adapters.merge import layers_of_base, truncate_adapter
from molora_jax.adapters.report import public_base_name
from molora_jax.display import warn
from molora_jax.models.weights import DTYPES
from molora_jax.tools.arguments import Misuse
from molora_jax.tools.report import check_free
from molora_jax.training.adapter_checkpoint import read_adapter_checkpoint, write_adapter_checkpoint
from molora_jax.training.checkpoint import find_checkpoints

PEFT, CHECKPOINT = "peft", "checkpoint"


def run(args: argparse.Namespace) -> int:
    """Converts, says what went in, came out and was left out, and returns 0."""
    check_free(args.out, overwrite=args.overwrite, sources=[args.source])
    source = Path(args.source).expanduser()
    kind = PEFT if find_checkpoints(source) is None else CHECKPOINT
    changed = args.max_rank is not None or args.dtype is not None
    to = args.to or (CHECKPOINT if kind == PEFT and not changed else PEFT)
    if to == CHECKPOINT and args.dtype is not None:
        raise Misuse("--dtype is of a PEFT folder: a checkpoint holds float32, as training does")
    if kind == to and not changed:
        what = {PEFT: "PEFT folder", CHECKPOINT: "checkpoint"}[to]
        raise Misuse(f"{source} is a {what} already: give --max_rank or --dtype, or another --to")
    if kind == CHECKPOINT:
        read = read_adapter_checkpoint(source, name=args.name)
        adapter = read.adapter
        taken = read.num_arrays - len(read.left_out)
        print(
            f"{source}: checkpoint of step {read.step}, {read.num_arrays} arrays: {taken} of the "
            f"adapter; left out: {len(read.left_out)} of the optimiser"
        )
    else:
        adapter, report = load_adapter(args.source, name=args.name)
        print(f"{source}: PEFT folder, {len(report.matched)} LoRA tensors")
        for text in (*report.warnings, *(f"left out: {key}" for key in report.unmatched)):
            warn(f"adapter {adapter.name!r}: {text}")
    print(f"  {_described(adapter)}")
    had_statistics = adapter.statistics is not None
    if args.max_rank is not None and adapter.rank > args.max_rank:
        adapter = _truncated(adapter, args.max_rank)
    elif args.max_rank is not None:
        print(f"  --max_rank {args.max_rank}: its rank is {adapter.rank}; nothing truncated")
    if args.dtype is not None:
        adapter = cast(adapter, args.dtype)
    if to == CHECKPOINT:
        _, trainable = write_adapter_checkpoint(adapter, args.out, overwrite=args.overwrite)
        count = len(trainable.lora_a) + len(trainable.lora_b)
        print(
            f"{args.out}: checkpoint of step 0 without an optimiser, {count} arrays for "
            f"{2 * len(adapter.modules)} tensors"
        )
        if had_statistics:
            print("  router statistics have no place in a checkpoint: not copied")
        print(f"  start from it: train_adapter.Config.init_from = '{args.out}'")
    else:
        save_adapter(adapter, args.out, overwrite=args.overwrite)
        if had_statistics and adapter.statistics is None:
            print(
                "  its router statistics are of the adapter before and not copied: gather them anew"
            )
        print(
            f"{args.out}: PEFT folder, {2 * len(adapter.modules)} tensors, "
            f"digest sha256:{adapter.digest}"
        )
    return 0


def cast(adapter: Adapter, dtype: str) -> Adapter:
    """The adapter with every tensor in `dtype`.

    Raises ValueError, naming the tensor, where one overflows or becomes all zero there.
    """
    modules = {}
    for module, pair in adapter.modules.items():
        matrices = []
        for label, matrix in (("A", pair.a), ("B", pair.b)):
            with np.errstate(over="ignore"):
                stored = matrix.astype(DTYPES[dtype])
            problem = (
                "overflows" if np.isfinite(matrix).all() and not np.isfinite(stored).all()
                else "becomes all zero in" if matrix.any() and not stored.any() else ""
            )  # fmt: skip
            if problem:
                raise ValueError(
                    f"lora_{label} of {module} {problem} {dtype}; take another --dtype"
                )
            matrices.append(stored)
        a, b = matrices
        modules[module] = LoraPair(a, b, pair.scale)
    return Adapter(adapter.name, modules, adapter.config)


def _truncated(adapter: Adapter, rank: int) -> Adapter:
    smaller, errors = truncate_adapter(adapter, rank, num_layers=layers_of_base([adapter]))
    cut = [module for module, pair in adapter.modules.items() if pair.rank > rank]
    worst = max(errors, key=errors.__getitem__)
    print(
        f"  truncated to rank {rank}: {len(cut)} of {len(errors)} modules, relative error "
        f"{total_error(smaller, errors):.3e}, worst {worst} {errors[worst]:.3e}"
    )
    return smaller


def _described(adapter: Adapter) -> str:
    ranks = sorted({pair.rank for pair in adapter.modules.values()})
    scales = sorted({pair.scale for pair in adapter.modules.values()})
    base = public_base_name(adapter.config.get("base_model_name_or_path"))
    return (
        f"adapter {adapter.name!r} of base {base or '(not stated)'}: rank "
        f"{', '.join(map(str, ranks))}, scale {', '.join(f'{s:.6g}' for s in scales)}, "
        f"on {', '.join(adapter.projections)}"
    )
