"""Text coloured by the adapter of each token, for a terminal."""

import codecs
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from molora_jax.display.terminal import painted, use_color
from pallas_kernels.notebook import PALETTE, slot_color

# By adapter: of a terminal of 16 colours, where the nearest to the palette's would coincide.
# Adapters past the seventh take the colours again, underlined.
_OF_16 = ("blue", "yellow", "green", "magenta", "cyan", "red", "bright_white")
_DARK = (0, 5)  # the backgrounds on which white reads better than black
_BASE_ONLY = "base only"


def adapter_color(index: int) -> str:
    """Colour of an adapter, the same in every picture; grey for −1, the base alone."""
    return slot_color(index)


def printable_pieces(tokens: Sequence[str | bytes]) -> list[str]:
    """The text of each token, so that joined they read as the text.

    A token may hold a part of a character: bytes, or a string with the surrogates of
    "surrogateescape". The character then goes to the token that completes it and the others are
    empty; bytes that never become a character turn into U+FFFD. Control characters except tab and
    newline are shown as their Unicode pictures, so that no token can write to the terminal.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces = [decoder.decode(_as_bytes(token)) for token in tokens]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return [_CONTROL.sub(_picture, piece) for piece in pieces]


def terminal_text(
    tokens: Sequence[str | bytes],
    adapters: Int[ArrayLike, " N"],
    *,
    adapter_names: Sequence[str],
    num_prompt_tokens: int = 0,
    stream: Any = None,
    color: bool | None = None,
) -> str:
    """The text with each token on the colour of its adapter, and a legend with the shares.

    adapters           (N,) adapter of each token, −1 for the base alone, which stays uncoloured
    num_prompt_tokens  so many at the beginning are a prompt, and stand apart from the answer
    color              None: where `stream` (standard output) is a terminal and NO_COLOR is not set.
                       Without colour every stretch of one adapter is a line that begins with its
                       name

        >>> adapters, names = np.array([0, 1, -1]), ["code", "math"]
        >>> text = terminal_text(
        ...     ["two", " words", "!"], adapters, adapter_names=names, color=False
        ... )
        >>> print(text)
             code | two
             math |  words
        base only | !
        <BLANKLINE>
        adapters: code 33%, math 33%, base only 33%
    """
    ids = adapter_list(tokens, adapters, adapter_names)
    pieces = printable_pieces(tokens)
    stream = sys.stdout if stream is None else stream
    color = use_color(stream) if color is None else color
    parts = {"": slice(None)}
    if 0 < num_prompt_tokens < len(ids):
        parts = {"prompt": slice(num_prompt_tokens), "answer": slice(num_prompt_tokens, None)}
    width = max((len(name) for _, name, _ in adapter_shares(ids, adapter_names)), default=0)
    lines, legend = [], []
    for what, part in parts.items():
        runs = _runs(pieces[part], ids[part])
        if what:
            lines.append(_paint_heading(what, stream) if color else f"{what}:")
        if color:
            lines.append("".join(_paint(text, i, stream) for i, text in runs))
        else:
            lines += [
                f"{adapter_name(i, adapter_names):>{width}} | {show_breaks(text)}"
                for i, text in runs
            ]
        shares = [
            f"{_paint(f' {name} ', i, stream) if color else name} {share:.0%}"
            for i, name, share in adapter_shares(ids[part], adapter_names)
        ]
        of = f" of the {what}" if what else ""
        head = f"adapters{of}:" if what or not color else ""
        legend.append(f"{head} {('  ' if color else ', ').join(shares)}".strip())
    return "\n".join([*lines, "", *legend])


def _as_bytes(token: str | bytes) -> bytes:
    # "surrogatepass" would write bytes that are no UTF-8; a lone surrogate that is not one of
    # surrogateescape's becomes a question mark.
    if isinstance(token, bytes):
        return token
    try:
        return token.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


# Also what breaks a line or turns the direction of what follows.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\ufffd"


def show_breaks(piece: str) -> str:
    """Line breaks and tabs as visible signs."""
    return piece.replace("\n", "⏎").replace("\t", "⇥")


def adapter_list(
    tokens: Sequence[str | bytes], adapters: Any, adapter_names: Sequence[str]
) -> list[int]:
    """The adapter of each token as a list; ValueError where it does not fit tokens or names."""
    ids = [int(i) for i in np.ravel(adapters)]
    if len(ids) != len(tokens):
        raise ValueError(f"adapters has {len(ids)} entries for {len(tokens)} tokens")
    if ids and max(ids) >= len(adapter_names):
        raise ValueError(f"adapter {max(ids)} has no name: adapter_names has {len(adapter_names)}")
    return ids


def adapter_name(adapter: int, adapter_names: Sequence[str]) -> str:
    """Its name, or what the base alone is called."""
    return _BASE_ONLY if adapter < 0 else adapter_names[adapter]


def adapter_shares(
    ids: Sequence[int], adapter_names: Sequence[str]
) -> list[tuple[int, str, float]]:
    """(adapter, name, share of the tokens) of all adapters, and of the base alone if it occurs.

    What has no name, a free slot, is left out.
    """
    total = max(len(ids), 1)
    named = [i for i, name in enumerate(adapter_names) if name]
    known = [*named, *([-1] if any(i < 0 for i in ids) else [])]
    count = {i: sum(max(j, -1) == i for j in ids) / total for i in known}
    return [(i, adapter_name(i, adapter_names), count[i]) for i in known]


def _runs(pieces: Sequence[str], ids: Sequence[int]) -> list[tuple[int, str]]:
    """Neighbours with the same adapter, joined."""
    runs: list[tuple[int, str]] = []
    for piece, adapter in zip(pieces, ids, strict=True):
        if runs and runs[-1][0] == adapter:
            runs[-1] = (adapter, runs[-1][1] + piece)
        elif piece:
            runs.append((adapter, piece))
    return runs


def _paint(text: str, adapter: int, stream: Any) -> str:
    if adapter < 0:
        return text
    index = adapter % len(PALETTE)
    ink = "#ffffff" if index in _DARK else "#000000"
    underline = " underline" if adapter >= len(PALETTE) else ""
    return painted(
        text,
        f"{ink} on {PALETTE[index]}{underline}",
        stream,
        of_16=f"{'bright_white' if index in _DARK else 'black'} on {_OF_16[index]}{underline}",
        force=True,
    )


def _paint_heading(text: str, stream: Any) -> str:
    return painted(text, "dim", stream, force=True)
