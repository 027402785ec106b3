"""`probe`: does an adapter change the logits of a base, where and how much?"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import Adapter, AdapterBank, load_adapter
from molora_jax.display import Table, show, warn
from molora_jax.models import BaseModel, load_base
from molora_jax.routing import FixedRouter
from molora_jax.token_ids import check_token_ids
from molora_jax.tools.report import check_there, percent, print_json, relative_updates, text_of

_TEXT = """\
The river rose in the night, and by morning the lower fields were under water.
Question: Tom has 3 boxes of 12 pencils and gives away 7. How many are left? Answer: 29.
def mean(values):
    return sum(values) / len(values)
"""
_WINDOW = 256  # tokens read at once: two rows of logits of each are in memory


def run(args: argparse.Namespace) -> int:
    """Prints what the adapter does to the text; 1 where it does nothing."""
    text = text_of(args.text, args.prompt_file, _TEXT)
    check_there([args.adapter])
    base = load_base(args.base)
    adapter, report = load_adapter(args.adapter, config=base.config, base_name=base.name)
    found = probe(base, adapter, text, top=args.top)
    found = {
        "adapter": adapter.name,
        "digest": adapter.digest,
        "base": base.name,
        "warnings": list(report.warnings),
        **found,
    }
    if args.json:
        print_json(found)
    else:
        for text in report.warnings:
            warn(f"adapter {adapter.name!r}: {text}")
        show(*_shown(found))
    if found["max_logit_change"] > 0:
        return 0
    zero = not any(pair.b.any() for pair in adapter.modules.values())
    raise ValueError(
        f"adapter {adapter.name!r} changes nothing: all {found['positions']} positions have "
        f"exactly the logits of {base.name}"
        + (" (every lora_B is zero: it was never trained)" if zero else "")
    )


def probe(base: BaseModel, adapter: Adapter, text: str, *, top: int = 8) -> dict[str, Any]:
    """How the adapter, on every token of `text`, changes the base's next-token predictions.

    max_logit_change  largest |Δlogit| of any token at any position
    mean_kl           KL(base ‖ adapter) in nats, mean over positions
    top1_changed      share of positions whose most likely token is another one
    nll, nll_adapter  of the text, in nats a token; None for a text of one token
    positions_most    those of the largest KL: position, text of the token read there, KL, and the
                      most likely next token before and after
    relative_updates  {projection: {layer: ‖scale·B·A‖ / ‖W‖}}

        >>> found = mj.probe(base, code, "two words")
        >>> found["positions"], found["max_logit_change"] > 0
        (9, True)
    """
    ids = base.tokenizer.encode(text)
    if not ids:
        raise ValueError("the text has no tokens")
    check_token_ids(ids, base.config.vocab_size, name="the text")
    bank = AdapterBank(
        base.config, num_slots=1, max_rank=adapter.rank, projections=adapter.projections
    )
    bank.load(adapter)
    size = min(_WINDOW, base.config.max_positions, len(ids))
    parts = []
    for start in range(0, len(ids), size):
        window = ids[start : start + size]
        tokens, mask = np.zeros((1, size), np.int32), np.zeros((1, size), bool)
        tokens[0, : len(window)], mask[0, : len(window)] = window, True
        compared = _compare(base.decoder, bank.stacks, tokens, mask)
        parts.append([np.array(each)[: len(window)] for each in compared])
        for nll in parts[-1][4:]:
            nll[-1] = np.nan  # what follows a window is not in it
    change, kl, before, after, nll, nll_adapter = map(np.concatenate, zip(*parts, strict=True))
    if not np.isfinite(change).all():
        raise ValueError(
            f"adapter {adapter.name!r} on {base.name}: at {int((~np.isfinite(change)).sum())} of "
            f"{len(ids)} positions the logits are NaN or infinite, with or without it: it "
            "overflows, or the base does on this text"
        )
    pieces = base.tokenizer.pieces(ids)
    most = np.argsort(-kl, kind="stable")[:top]
    return {
        "positions": len(ids),
        "max_logit_change": float(change.max()),
        "mean_kl": float(kl.mean()),
        "top1_changed": float((before != after).mean()),
        "nll": float(np.nanmean(nll)) if len(ids) > 1 else None,
        "nll_adapter": float(np.nanmean(nll_adapter)) if len(ids) > 1 else None,
        "positions_most": [
            {
                "position": int(i),
                "token": pieces[i],
                "kl": float(kl[i]),
                "max_logit_change": float(change[i]),
                "next_base": base.tokenizer.decode([int(before[i])]),
                "next_adapter": base.tokenizer.decode([int(after[i])]),
            }
            for i in most
        ],
        "relative_updates": relative_updates(adapter, base.decoder),
    }


@jax.jit
def _compare(decoder, stacks, tokens, mask):
    """Per position: largest |Δlogit|, KL, most likely tokens, losses of the token that follows."""
    router = FixedRouter(jnp.zeros((*tokens.shape, 1), jnp.int32))
    off, on = (
        decoder.logits(decoder(tokens, mask, **routed).hidden)[0]
        for routed in ({}, {"adapters": stacks, "router": router})
    )
    log_off, log_on = jax.nn.log_softmax(off), jax.nn.log_softmax(on)
    following = jnp.roll(tokens[0], -1)[:, None]
    return (
        jnp.abs(on - off).max(axis=-1),
        jnp.maximum((jnp.exp(log_off) * (log_off - log_on)).sum(axis=-1), 0.0),
        off.argmax(axis=-1),
        on.argmax(axis=-1),
        -jnp.take_along_axis(log_off, following, axis=1)[:, 0],
        -jnp.take_along_axis(log_on, following, axis=1)[:, 0],
    )


def _shown(found: dict[str, Any]) -> list[Any]:
    """The same as text and tables."""
    updates = found["relative_updates"]
    layers = sorted({layer for each in updates.values() for layer in each})
    rows = [
        [layer, *(percent(u[layer]) if layer in u else "-" for u in updates.values())]
        for layer in layers
    ]
    facts = [
        ["largest change of a logit", f"{found['max_logit_change']:.4g}"],
        ["mean KL(base || adapter)", f"{found['mean_kl']:.4g} nats"],
        ["most likely token changed", f"{found['top1_changed']:.1%} of positions"],
    ]
    if found["nll"] is not None:
        nll = f"{found['nll']:.4f} base, {found['nll_adapter']:.4f} adapter"
        facts.append(["NLL of the text, nats a token", nll])
    most = [
        [m["position"], repr(m["token"]), f"{m['kl']:.4g}", f"{m['max_logit_change']:.4g}",
         f"{m['next_base']!r} -> {m['next_adapter']!r}"]
        for m in found["positions_most"]
    ]  # fmt: skip
    head = f"adapter {found['adapter']!r} on {found['base']}, {found['positions']} positions"
    numbers = ["KL", "max|d|"]
    return [
        Table(["", ""], facts, title=head),
        "",
        Table(["position", "token", *numbers, "most likely next"], most, right=numbers,
              title="positions that change most"),
        "",
        Table(["layer", *updates], rows, right=list(updates), title="|BA| / |W|, with its scale"),
    ]  # fmt: skip
