"""Small tables for a notebook and a terminal alike: what a bank, a composition or a loss shows."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molora_jax.adapters import AdapterBank, Composition, LoadReport
    from molora_jax.training import Evaluation

_RIGHT = "text-align:right;padding:2px 8px"
_LEFT = "text-align:left;padding:2px 8px"


@dataclass(frozen=True)
class Table:
    """Rows that a notebook shows as HTML, `print` as aligned text, and `show` as a terminal can.

    header  (C,) names of the columns; where all are empty there is no line for them, and the first
            column names the facts in the second
    rows    each (C,) of text or numbers; None is shown as "–". Numbers of a column have as many
            decimals as its largest needs for four digits. A cell `(text, share)` is shaded by its
            share, 0 to 1
    title   a line above
    right   names of columns of text that are set to the right, as columns of numbers are

    Raises ValueError for a row of another length.

        >>> print(Table(["arm", "loss"], [["base", 2.409], ["routed", 2.061]], title="Held out"))
        Held out
        arm      loss
        base    2.409
        routed  2.061
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    right: Collection[str] = ()

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"a row has {len(row)} cells and the header {len(self.header)}: {row!r}"
                )

    def __str__(self) -> str:
        head = [[str(name) for name in self.header]] if any(self.header) else []
        cells = [*head, *self._texts()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._to_the_right(), strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *lines] if self.title else lines)

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """What rich prints: a rule below the header, and cells that fold where it is narrow."""
        from rich.text import Text

        from molora_jax.display import layout

        if self.title:
            yield Text(self.title, "bold")
        yield layout.table(
            [Text(str(name)) for name in self.header],
            [
                [Text(text, _emphasis(cell)) for cell, text in zip(row, texts, strict=True)]
                for row, texts in zip(self.rows, self._texts(), strict=True)
            ],
            right=self._to_the_right(),
            width=options.max_width,
        )

    def _texts(self) -> list[list[str]]:
        columns = [_column([row[c] for row in self.rows]) for c in range(len(self.header))]
        return [list(row) for row in zip(*columns, strict=True)]

    def _to_the_right(self) -> list[bool]:
        return [
            name in self.right or _is_numeric([row[c] for row in self.rows])
            for c, name in enumerate(self.header)
        ]

    def _repr_html_(self) -> str:
        styles = [_RIGHT if each else _LEFT for each in self._to_the_right()]
        head = "".join(
            f"<th style='{style}'>{html.escape(str(name))}</th>"
            for name, style in zip(self.header, styles, strict=True)
        )
        body = "".join(
            "<tr>" + "".join(map(_html, row, texts, styles)) + "</tr>"
            for row, texts in zip(self.rows, self._texts(), strict=True)
        )
        title = f"<div>{html.escape(self.title)}</div>" if self.title else ""
        return (
            f"<div>{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def bank_table(bank: AdapterBank) -> Table:
    """A row a slot: who lies there, its rank, projections and identity."""
    held = {each.slot: each for each in bank.list()}
    rows: list[list[Any]] = []
    for slot in range(bank.num_slots):
        each = held.get(slot)
        if each is None:
            rows.append([slot, "(free)", None, "", ""])
        else:
            what = ", ".join(each.adapter.projections)
            rows.append([slot, each.name, each.adapter.rank, what, each.digest[:12]])
    return Table(
        ["slot", "adapter", "rank", "projections", "sha256"], rows, title=str(bank).splitlines()[0]
    )


def composition_table(composition: Composition) -> Table:
    """A row a router column: its adapter, and the slot in which that lies now."""
    router = composition.router
    names = composition.column_names
    slots = composition.column_to_slot
    rows = [
        [column, name or "(not resident)", int(slot) if slot >= 0 else None, digest[:12]]
        for column, (name, slot, digest) in enumerate(
            zip(names, slots, composition.column_digests, strict=True)
        )
    ]
    told = {True: "told whose data a token was", False: "not told whose data a token was"}
    labels = told.get(composition.labels_used)  # type: ignore[arg-type]
    title = (
        f"composition on {composition.base_name}: {type(router).__name__}, "
        f"k = {router.top_k}, decision {router.decision!r}" + (f", {labels}" if labels else "")
    )
    return Table(["column", "adapter", "slot", "sha256"], rows, title=title)


def report_table(report: LoadReport) -> Table:
    """What a load found, line by line, warnings last."""
    lines = str(report).splitlines()
    rows = []
    for line in lines[1:]:
        name, rest = line.split(maxsplit=1)
        if name in report.ranks:
            rest = "layers {}, rank {}, scale {}".format(*rest.split())
        if name != "module":  # the header of the text's own columns
            rows.append([name, rest])
    return Table(["", lines[0].strip()], rows)


def loss_table(
    arms: Mapping[str, Evaluation],
    *,
    labels: Any = None,
    names: Sequence[str] = (),
    title: str = "Held-out loss, nats a token",
) -> Table:
    """A row an arm, a column a domain, and the mean over all tokens.

    labels  (W, S) domain of each position, `Batch.labels`; without them there is the mean alone
    names   (G,) of the domains, by label

        >>> from molora_jax import Evaluation
        >>> nll = np.array([[1.25, 3.5, 0.0]])
        >>> base = Evaluation(nll, weights=np.array([[1.0, 1.0, 0.0]]))
        >>> loss_table({"base": base}, labels=np.array([[0, 1, 1]]), names=["code", "math"])
        Held-out loss, nats a token
        arm   code  math    all  tokens
        base  1.25   3.5  2.375       2
    """
    import numpy as np  # a tenth of a second that a list of experiments need not wait for

    rows = []
    for arm, measured in arms.items():
        of_domain = [measured.mean(np.asarray(labels) == g) for g in range(len(names))]
        rows.append([arm, *of_domain, measured.nll, measured.tokens])
    return Table(["arm", *names, "all", "tokens"], rows, title=title)


def _is_numeric(cells: Sequence[Any]) -> bool:
    return bool(cells) and all(isinstance(c, int | float | tuple) or c is None for c in cells)


def _column(cells: Sequence[Any]) -> list[str]:
    """Texts of a column's cells, its floats with one number of decimals."""
    floats = [abs(c) for c in cells if isinstance(c, float) and math.isfinite(c) and c]
    decimals = max(0, min(6, 3 - math.floor(math.log10(max(floats)))) if floats else 0)
    # Where the smallest would be lost, each has four digits of its own.
    alike = not floats or min(floats) >= 10.0**-decimals
    while alike and decimals and all(f"{f:.{decimals}f}".endswith("0") for f in floats):
        decimals -= 1
    style = f".{decimals}f" if alike else ".4g"
    return [_text(cell, style) for cell in cells]


def _text(cell: Any, style: str) -> str:
    if cell is None:
        return "–"
    text = str(cell[0]) if isinstance(cell, tuple) else str(cell)
    text = format(cell, style) if isinstance(cell, float) else text
    # A line break would end the row, and other control characters write to the terminal.
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(letter: str) -> str:
    return letter if letter.isprintable() else repr(letter)[1:-1]


def _emphasis(cell: Any) -> str:
    """Bold for a share of more than half: what is behind the text is the terminal's own."""
    return "bold" if isinstance(cell, tuple) and cell[1] > 0.5 else ""


def _html(cell: Any, text: str, style: str) -> str:
    if isinstance(cell, tuple):
        strength = min(max(float(cell[1]), 0.0), 1.0) if math.isfinite(cell[1]) else 0.0
        style += f";background:rgba(0,114,178,{0.6 * strength:.2f})"
    return f"<td style='{style}'>{html.escape(text)}</td>"
