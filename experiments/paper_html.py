"""The page of the whole paper as one HTML file: tables and pictures inside, nothing loaded."""

import base64
import html
import pathlib
import re

from experiments.gallery import FoundRun, small_png
from experiments.paper_page import (
    CLAIM_HEADER,
    VERDICTS,
    Page,
    Section,
    claim_cells,
    lead,
    missing_lines,
    run_line,
)
from experiments.run_folder import show

MOST_PICTURES = 2  # of one experiment
MOST_BYTES = 80_000
_CLASSES = {"holds": "yes", "does not hold": "no", "not said here": "open"}
_SIGNS = {"holds": "✓", "does not hold": "✗", "not said here": "–"}


def html_page(page: Page) -> str:
    """The whole page. A picture stands under the first section that its run answers."""
    drawn: set[str] = set()
    sections = "".join(_section(section, drawn) for section in page.sections)
    rows = "".join(
        f'<tr><td><a href="#{s.entry.id}">{s.entry.label}</a></td>'
        f"<td>{html.escape(s.entry.measured)}</td><td>{_marks(s)}</td></tr>"
        for s in page.sections
        if s.entry
    )
    body = (
        f"<p>{html.escape(lead(page))}</p><table><thead><tr><th></th><th>what is measured</th>"
        f"<th>claims</th></tr></thead><tbody>{rows}</tbody></table>{sections}"
    )
    frame = pathlib.Path(__file__).with_name("paper_page.html")
    return frame.read_text(encoding="utf-8").replace("{{body}}", body)


def _marks(section: Section) -> str:
    if not section.runs:
        return '<span class="open">missing</span>'
    marks = [
        f'<span class="{_CLASSES[said]}" title="{said}">{_SIGNS[said]} '
        f"{section.count(verdict)}</span>"
        for verdict, said in VERDICTS.items()
        if section.count(verdict)
    ]
    return " ".join(marks) or '<span class="open">no claim</span>'


def _section(section: Section, drawn: set[str]) -> str:
    name = section.entry.id if section.entry else "beyond"
    parts = [f'<section id="{name}"><h2>{html.escape(section.title)}</h2>']
    if section.entry:
        parts.append(f'<p class="paper">The paper: {html.escape(section.entry.numbers)}.</p>')
    if section.claims:
        head = "".join(f"<th>{each}</th>" for each in CLAIM_HEADER)
        body = "".join(_row(claim_cells(run, claim)) for run, claim in section.claims)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    for run in section.runs:
        parts.append(f'<p class="run">{_line(run_line(run))}</p>')
        if run.experiment not in drawn:
            drawn.add(run.experiment)
            parts.append(_pictures(run) + _numbers(run))
    parts += [f'<p class="open">{_line(line)}</p>' for line in missing_lines(section)]
    return "".join([*parts, "</section>"])


def _line(text: str) -> str:
    """Escaped, with what stands between backquotes as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _row(cells: list[str]) -> str:
    *_, verdict, _, _ = cells
    shown = [html.escape(cell) for cell in cells]
    shown[3] = f'<span class="{_CLASSES[verdict]}">{_SIGNS[verdict]} {verdict}</span>'
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in shown) + "</tr>"


def _pictures(run: FoundRun) -> str:
    pictures = [
        f'<img alt="{html.escape(f"{run.experiment}: {path.stem}", quote=True)}" '
        f'src="data:image/png;base64,{_encoded(path)}">'
        for path in run.pictures()[:MOST_PICTURES]
    ]
    return f'<div class="pictures">{"".join(pictures)}</div>' if pictures else ""


def _encoded(path) -> str:
    return base64.b64encode(small_png(path, most=MOST_BYTES)).decode("ascii")


def _numbers(run: FoundRun) -> str:
    """Every metric of the run, folded away."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{show(value)}</td></tr>"
        for name, value in run.result["metrics"].items()
    )
    title = f"all {len(run.result['metrics'])} numbers of {run.experiment}"
    return f"<details><summary>{title}</summary><table>{rows}</table></details>"
