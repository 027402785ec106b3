"""How rich lays out a table and a report in Markdown. Imported only where a terminal shows them."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.markdown import Heading, ImageItem, Markdown, TableElement, TextElement
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

# rich's own theme sets code on black, which is a patch on a light terminal.
THEME = Theme(
    {
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "italic",
        "markdown.code": "cyan",
        "markdown.table.border": "default",
        "markdown.table.header": "bold",
    }
)
_GAP = 2  # between columns
_LETTERS = 10  # that a column of text keeps
# With a sign, a unit or a deviation; a dash where there is none.
_NUMBER = re.compile(r"|[-–—]|[-+−±]?[\d.,]+(e[-+]?\d+)?( ?(%|s|ms|±.*))?")


def table(
    header: Sequence[Text],
    rows: Sequence[Sequence[Text]],
    *,
    right: Sequence[bool],
    width: int,
) -> Table:
    """Bold names above a thin rule; cells fold where `width` is too little, words last of all.

    Without a name in the header there is none, and the first column is bold.
    """
    named = any(each.plain for each in header)
    made = Table(
        box=box.SIMPLE_HEAD if named else None,
        show_header=named,
        show_edge=False,
        pad_edge=False,
        padding=(0, _GAP if not named else 1, 0, 0),
        header_style="bold",
    )
    columns = [(name, *cells) for name, *cells in zip(header, *rows, strict=True)]
    widths = _widths(columns, right, width)
    for at, (name, to_right) in enumerate(zip(header, right, strict=True)):
        made.add_column(
            name,
            justify="right" if to_right else "left",
            overflow="fold",
            width=widths[at] if widths else None,
            style="bold" if not named and at == 0 else "",
        )
    for row in rows:
        made.add_row(*row)
    return made


def _widths(
    columns: Sequence[Sequence[Text]], right: Sequence[bool], width: int
) -> list[int] | None:
    """Of columns that fit into `width`, the widest made narrower first; None where none would do.

    A number keeps its longest word, a text some letters.
    """
    widths = [max(each.cell_len for each in column) for column in columns]
    words = [
        max(len(word) for each in column for word in (each.plain.split() or [""]))
        for column in columns
    ]
    least = [w if r else min(w, _LETTERS) for w, r in zip(words, right, strict=True)]
    room = width - _GAP * (len(columns) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        loose = [at for at in range(len(widths)) if widths[at] > least[at]]
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def report(text: str) -> Markdown:
    """What `Console.print` takes."""
    return _Report(text, hyperlinks=False)


class _Heading(Heading):
    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Code(TextElement):
    """Lines as they are, however long: what is copied from a terminal has to be what was meant."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        for line in self.text.plain.rstrip("\n").split("\n"):
            yield Text(f"    {line}", "markdown.code", no_wrap=True, overflow="ignore")

    @classmethod
    def create(cls, markdown: Markdown, token: Any) -> "_Code":
        return cls()


class _Image(ImageItem):
    """A picture is named: the file lies beside the report."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        yield Text(f"[picture: {self.destination}] ", "dim", end="")


class _Table(TableElement):
    """rich's own cuts what is too long for its column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        if self.header is None or self.header.row is None:
            return
        header = [each.content for each in self.header.row.cells]
        rows = [[e.content for e in row.cells] for row in (self.body.rows if self.body else [])]
        for cell in (cell for row in [header, *rows] for cell in row):
            cell.justify = None  # the column's; rich sets "default", which is to the left
        right = [
            all(_NUMBER.fullmatch(each.plain) for each in column)
            for column in zip(*rows, strict=True)
        ]
        yield table(header, rows, right=right or [False] * len(header), width=options.max_width)


class _Report(Markdown):
    elements = {  # noqa: RUF012 (rich's own is a plain attribute)
        **Markdown.elements,
        "heading_open": _Heading,
        "image": _Image,
        "fence": _Code,
        "code_block": _Code,
        "table_open": _Table,
    }
