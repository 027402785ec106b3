"""`merge`: adapters into one adapter, or into a base, written as a plain model folder."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import Adapter, AdapterBank, load_adapter, save_adapter
from molora_jax.adapters.folders import new_folder
from molora_jax.adapters.lowrank import total_error
from molora_jax.adapters.merge import (
    common_base_name,
    layers_of_base,
    merge_adapters,
    merge_into,
)
from molora_jax.display import Table, show, warn
from molora_jax.models import BaseModel, load_base
from molora_jax.models.export import MODEL_FILES, decoder_arrays, write_model
from molora_jax.models.lookup import base_path
from molora_jax.routing import FixedRouter
from molora_jax.tools.arguments import Misuse, hint, named_paths
from molora_jax.tools.report import check_free, percent

_TEXT = "The quick brown fox jumps over the lazy dog. 12 * 7 = 84.\ndef f(x):\n    return x + 1\n"
# Of the largest logit; what float32 sums in another order differ by is some hundred times less.
_TOLERANCE = 1e-3


def run(args: argparse.Namespace) -> int:
    """Merges and returns 0; errors are raised."""
    paths = named_paths(args.adapters)
    for name in args.weights:
        if name not in paths:
            raise Misuse(
                f"--weights: no adapter is called {name!r}{hint(name, paths)} "
                f"(they are {', '.join(paths)}; NAME=ADAPTER gives one another name)"
            )
    if args.base and args.rank is not None:
        raise Misuse("--rank is of an adapter, and with --base a model is written: leave one out")
    if not args.base and args.dtype is not None:
        raise Misuse("--dtype is of a model: give --base, or see 'convert --dtype' for adapters")
    check_free(args.out, overwrite=args.overwrite, sources=paths.values())
    base = load_base(args.base) if args.base else None
    loaded = [
        load_adapter(path, name=name, config=base and base.config, base_name=base and base.name)
        for name, path in paths.items()
    ]
    adapters = [adapter for adapter, _ in loaded]
    weights = {name: args.weights.get(name, 1.0) for name in paths}
    rows = [[a.name, f"{weights[a.name]:g}", a.rank, a.digest[:12]] for a in adapters]
    show(Table(["adapter", "weight", "rank", "digest"], rows, right=("weight",)))
    for adapter, report in loaded:
        for text in report.warnings:
            warn(f"adapter {adapter.name!r}: {text}")
    if base is None:
        return _one_adapter(args, adapters, weights)
    return _model(args, base, adapters, weights)


def _one_adapter(
    args: argparse.Namespace, adapters: Sequence[Adapter], weights: Mapping[str, float]
) -> int:
    merged, errors = merge_adapters(
        adapters,
        weights=weights,
        name=Path(args.out).expanduser().resolve().name,
        rank=args.rank,
        base_name=common_base_name(adapters),
        num_layers=layers_of_base(adapters),
    )
    save_adapter(merged, args.out, overwrite=args.overwrite)
    cut = {module: error for module, error in errors.items() if error}
    lost = "exact (nothing truncated)"
    if args.rank is not None:
        worst = max(errors, key=errors.__getitem__)
        lost = (
            f"relative error {total_error(merged, errors):.3e}; {len(cut)} of {len(errors)} "
            f"modules truncated, worst {worst} {errors[worst]:.3e}"
        )
    print(f"{args.out}: one adapter of rank {merged.rank}, {2 * len(merged.modules)} tensors")
    print(f"  {lost}\n  digest sha256:{merged.digest}")
    return 0


def _model(
    args: argparse.Namespace,
    base: BaseModel,
    adapters: Sequence[Adapter],
    weights: Mapping[str, float],
) -> int:
    dtype = args.dtype or "float32"
    arrays, changes = merge_into(
        decoder_arrays(base.decoder), base.config, adapters, weights=weights, dtype=dtype
    )
    settings = base_path(base.name)
    with new_folder(args.out, owned=MODEL_FILES, overwrite=args.overwrite) as folder:
        write_model(
            folder,
            base.config,
            arrays,
            base.tokenizer,
            dtype=dtype,
            settings_from=settings if settings and settings.is_dir() else None,
        )
        del arrays
        difference, largest, moved = _compare(base, adapters, weights, folder)
        if not np.isfinite(difference):
            raise ValueError(
                "nothing was written: the logits of the merged model or of base and adapters are "
                "not finite. Use smaller weights"
            )
        # In a narrower dtype the weights were rounded, and how far that carries is the user's call.
        if difference > (_TOLERANCE if dtype == "float32" else np.inf) * largest:
            raise ValueError(
                f"nothing was written: the merged model's logits differ from those of base and "
                f"adapters by {difference:.3g}, with logits up to {largest:.3g}"
            )
    read = load_base(str(args.out))
    shares = ["|dW|/|W|", f"|dW| lost to {dtype}"]
    rows = [[c.projection, c.modules, percent(c.relative), percent(c.rounding)] for c in changes]
    show(Table(["projection", "modules", *shares], rows, right=shares))
    tied = " (tied to the output)" if base.config.tie_word_embeddings else ", output"
    print(f"  unchanged: embedding{tied}, norms and biases")
    print(
        f"  logits read back: differ by at most {difference:.3g} from base + adapters, "
        f"which moved them by up to {moved:.3g}"
    )
    print(f"{args.out}: model in {dtype}, digest sha256:{read.digest} (base {base.digest[:12]})")
    return 0


def _compare(
    base: BaseModel, adapters: Sequence[Adapter], weights: Mapping[str, float], folder: Path
) -> tuple[float, float, float]:
    """The merged folder against the base with the adapters routed, on a short text.

    The largest difference of two logits, the largest logit, and the largest change that the
    adapters make.
    """
    bank = AdapterBank(
        base.config, num_slots=len(adapters), max_rank=max(each.rank for each in adapters)
    )
    for each in adapters:
        bank.load(each)
    # A tokenizer may have more ids than the base; a look-up of those gives NaN for any weights.
    size = base.config.vocab_size
    ids = [each for each in base.tokenizer.encode(_TEXT) if each < size] or [*range(min(size, 32))]
    tokens = jnp.asarray([ids[: base.config.max_positions]])
    slots = np.array([bank.slot_of(each.name) for each in adapters])
    gates = np.array([weights[each.name] for each in adapters], np.float32)
    shape = (*tokens.shape, len(adapters))
    router = FixedRouter(np.broadcast_to(slots, shape), np.broadcast_to(gates, shape))
    logits = jax.jit(lambda decoder, **routed: decoder.logits(decoder(tokens, **routed).hidden))
    merged = np.asarray(logits(load_base(str(folder)).decoder))
    routed = np.asarray(logits(base.decoder, adapters=bank.stacks, router=router))
    moved = np.abs(routed - np.asarray(logits(base.decoder))).max()
    return float(np.abs(merged - routed).max()), float(np.abs(routed).max()), float(moved)
