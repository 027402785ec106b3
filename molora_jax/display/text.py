"""Text coloured by the adapter of each token, for a terminal."""

import codecs
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int

from pallas_kernels.notebook import slot_color

# The nearest of the 256 colours that every terminal has. Adapters past the seventh take the colours
# again with another underline.
_TERMINAL_256 = (25, 214, 36, 175, 74, 166, 227)
_TERMINAL_DARK = (0, 5)  # the backgrounds on which white reads better than black
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
    stream: Any = None,
    color: bool | None = None,
) -> str:
    """The text with each token on the colour of its adapter, and a legend with the shares.

    adapters  (N,) adapter of each token, −1 for the base alone, which stays uncoloured
    color     None: where `stream` (standard output) is a terminal and NO_COLOR is not set. Without
              colour every stretch of one adapter is a line that begins with its name.
    """
    ids = adapter_list(tokens, adapters, adapter_names)
    pieces = printable_pieces(tokens)
    legend = adapter_shares(ids, adapter_names)
    if color is None:
        color = use_color(sys.stdout if stream is None else stream)
    runs = _runs(pieces, ids)
    if not color:
        width = max((len(name) for _, name, _ in legend), default=0)
        lines = [
            f"{adapter_name(i, adapter_names):>{width}} | {show_breaks(text)}" for i, text in runs
        ]
        shares = ", ".join(f"{name} {share:.0%}" for _, name, share in legend)
        return "\n".join([*lines, "", f"adapters: {shares}"])
    text = "".join(_paint(text, i) for i, text in runs)
    shares = "  ".join(f"{_paint(f' {name} ', i)} {share:.0%}" for i, name, share in legend)
    return f"{text}\n\n{shares}"


def use_color(stream: Any) -> bool:
    """Whether `stream` is a terminal that takes colour and the user has not set NO_COLOR."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def _as_bytes(token: str | bytes) -> bytes:
    # "surrogatepass" would write bytes that are no UTF-8; a lone surrogate that is not one of
    # surrogateescape's becomes a question mark.
    if isinstance(token, bytes):
        return token
    try:
        return token.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
    """(adapter, name, share of the tokens) of all adapters, and of the base alone if it occurs."""
    total = max(len(ids), 1)
    known = [*range(len(adapter_names)), *([-1] if any(i < 0 for i in ids) else [])]
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


def _paint(text: str, adapter: int) -> str:
    if adapter < 0:
        return text
    index = adapter % len(_TERMINAL_256)
    ink = 231 if index in _TERMINAL_DARK else 16
    underline = ";4" if adapter >= len(_TERMINAL_256) else ""
    begin, end = f"\x1b[38;5;{ink};48;5;{_TERMINAL_256[index]}{underline}m", "\x1b[0m"
    # A colour that is open across a line break fills the rest of the line in many terminals.
    return "\n".join(f"{begin}{line}{end}" if line else "" for line in text.split("\n"))
