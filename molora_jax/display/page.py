"""Text coloured by the adapter of each token, as an HTML page that needs nothing else."""

import html
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from molora_jax.display.text import (
    adapter_color,
    adapter_list,
    adapter_name,
    adapter_shares,
    printable_pieces,
)
from pallas_kernels.notebook import PALETTE

_UNDERLINES = ("solid", "dashed", "dotted", "double", "wavy")


def html_page(
    tokens: Sequence[str | bytes],
    adapters: Int[ArrayLike, " N"],
    *,
    adapter_names: Sequence[str],
    gates: Float[ArrayLike, "N K"] | None = None,
    token_ids: Sequence[int] | None = None,
    num_prompt_tokens: int = 0,
    title: str = "Tokens by adapter",
    note: str = "",
) -> str:
    """A page that needs nothing else: tokens on their adapter's colour, underlined in its style.

    adapters           (N,) adapter of each token, −1 for the base alone
    gates              (N, K); a token is as strong as its adapter's gate; hovering lists them all
    token_ids          (N,) shown on hovering
    num_prompt_tokens  the first so many are the prompt, set apart from the answer
    """
    ids = adapter_list(tokens, adapters, adapter_names)
    for name, given in (("gates", gates), ("token_ids", token_ids)):
        if given is not None and np.shape(given)[0] != len(tokens):
            raise ValueError(f"{name} has {np.shape(given)[0]} rows for {len(tokens)} tokens")
    dense = None if gates is None else np.asarray(gates, np.float64)
    spans = []
    for n, (piece, adapter) in enumerate(zip(printable_pieces(tokens), ids, strict=True)):
        about = [f"token {n}"]
        if token_ids is not None:
            about.append(f"id {int(token_ids[n])}")
        about.append(repr(tokens[n]))
        about.append(adapter_name(adapter, adapter_names))
        style = ""
        if dense is not None:
            order = np.argsort(-dense[n], kind="stable")
            used = [
                f"{adapter_name(int(k), adapter_names)} {dense[n, k]:.3f}"
                for k in order
                if dense[n, k]
            ]
            about.append("gates " + (", ".join(used) or "none"))
            if adapter >= 0:
                style = f' style="--g:{min(max(dense[n, adapter], 0.0), 1.0):.2f}"'
        # A token without text of its own (part of a character) still needs something to hover on.
        shown = html.escape(piece) if piece else '<i class="part">·</i>'
        shown = shown.replace("\n", '<i class="part">⏎</i>\n')
        about_text = html.escape(" · ".join(about), quote=True)
        spans.append(f'<span class="t {_css(adapter)}"{style} title="{about_text}">{shown}</span>')
    prompt, answer = "".join(spans[:num_prompt_tokens]), "".join(spans[num_prompt_tokens:])
    legend = "".join(
        f'<li><span class="t {_css(i)}">{html.escape(name)}</span> {share:.0%}</li>'
        for i, name, share in adapter_shares(ids[num_prompt_tokens:], adapter_names)
    )
    rules = "".join(
        f".{_css(i)}{{--c:{adapter_color(i)};text-decoration-style:"
        f"{_UNDERLINES[(i + i // len(PALETTE)) % len(_UNDERLINES)]}}}"
        for i in range(len(adapter_names))
    )
    return _PAGE.format(
        title=html.escape(title),
        note=f"<p>{html.escape(note)}</p>" if note else "",
        rules=rules,
        legend=legend,
        prompt=f'<h2>Prompt</h2><pre class="prompt">{prompt}</pre><h2>Answer</h2>'
        if prompt
        else "",
        answer=answer,
    )


def _css(adapter: int) -> str:
    return f"a{adapter}" if adapter >= 0 else "base"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #f4f4f2;
  --line: #d5d5d0; --muted: #6a6a6a; --strength: 48%; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ececec; --paper: #17181a; --soft: #202225;
  --line: #3a3d42; --muted: #9a9a9a; --strength: 36%; }} }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.3rem; }}
h2 {{ font-size: 0.9rem; font-weight: 600; color: var(--muted); margin: 1.2rem 0 0.3rem; }}
ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: 0.4rem 1.4rem; padding: 0; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 1rem;
  border: 1px solid var(--line); border-radius: 0.5rem;
  font: 0.95rem/1.9 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
pre.prompt {{ background: var(--soft); }}
.t {{ --g: 1; border-radius: 0.2rem; padding: 0.12rem 0; text-decoration: underline;
  text-decoration-color: var(--c); text-decoration-thickness: 2px; text-underline-offset: 0.25rem;
  text-decoration-skip-ink: none;
  background: color-mix(in srgb, var(--c) calc(var(--g) * var(--strength)), transparent); }}
.t:hover {{ outline: 2px solid var(--ink); }}
li .t {{ padding: 0.12rem 0.5rem; }}
.base {{ --c: transparent; text-decoration: none; }}
.part {{ font-style: normal; color: var(--muted); opacity: 0.7; }}
{rules}
</style>
</head>
<body>
<h1>{title}</h1>
{note}
<ul>{legend}</ul>
{prompt}<pre>{answer}</pre>
</body>
</html>
"""
