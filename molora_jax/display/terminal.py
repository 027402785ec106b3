"""What is printed: with rich on a terminal, and as plain text everywhere else.

A log file and `| grep` get aligned text without frames or escape codes, never wrapped or cut and
the same whatever the width. NO_COLOR leaves a terminal its layout and takes the colours;
FORCE_COLOR makes a terminal of any stream; with TERM=dumb all is plain.

rich is imported where something is printed on a terminal, and nothing else of weight at all.
"""

import os
import sys
from typing import Any

WARNING, FAILED, GOOD = "yellow", "bold red", "green"


def show(*parts: Any, style: str = "", stream: Any = None) -> None:
    """Prints tables (`display.Table`) and texts, one below the other.

    style   of the texts, in rich's words, such as "bold red"
    stream  standard output, if it is not given

        >>> show("two arms", Table(["arm", "loss"], [["base", 2.409], ["routed", 2.061]]))
        two arms
        arm      loss
        base    2.409
        routed  2.061
    """
    stream = sys.stdout if stream is None else stream
    for part in parts:
        if isinstance(part, str):
            print(painted(part, style, stream), file=stream)
        elif is_terminal(stream):
            console(stream).print(part)
        else:
            print(part, file=stream)
    stream.flush()


def show_report(markdown: str, *, stream: Any = None) -> None:
    """Prints a report: on a terminal with its tables as tables, elsewhere as it is written.

    >>> show_report("# Losses")
    # Losses
    """
    stream = sys.stdout if stream is None else stream
    if is_terminal(stream):
        from molora_jax.display import layout

        console(stream).print(layout.report(markdown), crop=False)
    else:
        print(markdown, file=stream)
    stream.flush()


def warn(text: str) -> None:
    """One line on standard error, which begins with `warning:`."""
    print(f"{painted('warning:', WARNING, sys.stderr)} {text}", file=sys.stderr, flush=True)


def fail(name: str, text: str) -> None:
    """One line on standard error, which begins with the name of what failed."""
    print(f"{painted(f'{name}:', FAILED, sys.stderr)} {text}", file=sys.stderr, flush=True)


def painted(text: str, style: str, stream: Any, *, of_16: str = "", force: bool = False) -> str:
    """`text` in a style of rich's, with as many colours as the stream shows.

    of_16  the style on a terminal of 16 colours, where the nearest of them would not do
    force  as on a terminal, whatever the stream
    """
    if not style or not (force or is_terminal(stream)):
        return text
    from rich.console import COLOR_SYSTEMS

    target = console(stream)
    system = target.color_system or "256"
    chosen = target.get_style(of_16 if of_16 and system == "standard" else style)
    if target.no_color and not force:
        chosen = chosen.without_color
    # A colour that is open across a line break fills the rest of the line in many terminals.
    lines = [chosen.render(each, color_system=COLOR_SYSTEMS[system]) for each in text.split("\n")]
    return "\n".join(lines)


def is_terminal(stream: Any) -> bool:
    """Whether to lay out for a terminal: it is one, or FORCE_COLOR is set; never a dumb one."""
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(getattr(stream, "isatty", lambda: False)())


def use_color(stream: Any) -> bool:
    """Whether `stream` is a terminal and the user has not set NO_COLOR."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def console(stream: Any) -> Any:
    """rich's, which takes what it is given for a terminal."""
    from rich.console import Console

    from molora_jax.display.layout import THEME

    # In a notebook too, what is printed is text: tables there have their own HTML.
    return Console(
        file=stream, force_terminal=True, force_jupyter=False, highlight=False, markup=False,
        emoji=False, theme=THEME,
    )  # fmt: skip
