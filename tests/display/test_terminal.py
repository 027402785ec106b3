"""What is printed: laid out on a terminal, plain everywhere else, and no letter of it lost."""

import io
import re
import time

import pytest

from molora_jax.display import Table, progress, show, show_report, terminal, warn
from molora_jax.display.progress import Progress, waiting

TABLE = Table(
    ["arm", "loss", "where"],
    [["base", 2.409, "/a/folder/with/a/long/name" * 3], ["[bold]routed", 2.061, "here"]],
    title="Held out",
)
FACTS = Table(["", ""], [["type", "LORA"], ["digest", "sha256:" + "0123456789" * 6]])
PLAIN = f"""\
Held out
arm            loss  where
base          2.409  {"/a/folder/with/a/long/name" * 3}
[bold]routed  2.061  here
"""
REPORT = """\
# Losses

Of **two** arms, with `code`.

| arm | loss | sha256 |
| --- | --- | --- |
| base | 2.409 | 0123456789012345678901234567890123456789 |
| routed | 2.06 | - |

![loss](loss.png)
"""


class Stream(io.StringIO):
    def __init__(self, tty):
        super().__init__()
        self.tty = tty

    def isatty(self):
        return self.tty


@pytest.fixture(autouse=True)
def a_terminal_of_80_columns(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def shown(*parts, tty=True, make=show, raw=False):
    stream = Stream(tty)
    make(*parts, stream=stream)
    text = stream.getvalue()
    return text if raw else re.sub(r"\x1b\[[0-9;]*m", "", text)


def letters(text):
    """What a reader reads, whatever the layout."""
    return sorted(re.sub(r"[\s─]", "", text))


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_a_file_gets_the_same_bytes_whatever_the_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert shown(TABLE, "a line", tty=False, raw=True) == PLAIN + "a line\n"
    assert shown(REPORT, tty=False, make=show_report, raw=True) == REPORT + "\n"
    facts = shown(FACTS, tty=False, raw=True)
    assert facts == "type    LORA\ndigest  sha256:" + "0123456789" * 6 + "\n"


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_a_terminal_folds_cells_and_loses_no_letter(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for part in (TABLE, FACTS):
        text = shown(part)
        assert max(map(len, text.splitlines())) <= columns
        assert letters(text) == letters(str(part))
    table = shown(TABLE)
    assert "─" * 10 in table
    assert "2.409" in table and "2.061" in table  # a number stays whole
    assert "─" not in shown(FACTS)


def test_a_terminal_is_told_what_is_a_header_and_a_file_is_not():
    assert "\x1b[1m" in shown(TABLE, raw=True)
    assert "\x1b[1mtype" in shown(FACTS, raw=True)
    stream = Stream(True)
    show("head", style="bold", stream=stream)
    assert stream.getvalue() == "\x1b[1mhead\x1b[0m\n"


def test_a_report_has_tables_and_names_its_pictures():
    text = shown(REPORT, make=show_report)
    assert "|" not in text
    assert re.search(r"^arm +loss +sha256", text, re.MULTILINE)
    assert re.search(r"^base +2.409 +0123", text, re.MULTILINE)
    assert re.search(r"^routed +2.06 ", text, re.MULTILINE)
    assert "[picture: loss.png]" in text
    assert text.startswith("Losses")


def test_a_report_cuts_no_cell(monkeypatch):
    monkeypatch.setenv("COLUMNS", "36")
    text = shown(REPORT, make=show_report)
    assert "…" not in text
    assert "".join(re.findall(r"\d{5,}", text)).count("0123456789") >= 3


def test_a_command_in_a_report_stays_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    command = "molora run --experiment=analyse " + "texts='The cat sat.' " * 5 + "base=tiny-random"
    lines = shown(f"Made by:\n\n    {command}\n", make=show_report).splitlines()
    assert f"    {command}" in lines


def test_environment_variables_are_heeded(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert shown(TABLE, raw=True) == PLAIN
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown(TABLE, raw=True) == PLAIN  # no escape codes where none are understood
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1m" in shown(TABLE, tty=False, raw=True)
    assert "\x1b[33m" in terminal.painted("x", "yellow", Stream(True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in terminal.painted("x", "yellow", Stream(True))
    assert not terminal.use_color(Stream(True))
    assert not re.search(r"\x1b\[[0-9;]*(3[0-9]|4[0-9])[0-9;]*m", shown(REPORT, make=show_report,
                                                                    raw=True))  # fmt: skip


def test_warnings_are_a_line_on_standard_error(monkeypatch, capsys):
    warn("something " * 30)
    assert capsys.readouterr() == ("", f"warning: {'something ' * 30}\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    warn("careful")
    terminal.fail("molora inspect", "no")
    said = capsys.readouterr().err
    assert said == "\x1b[33mwarning:\x1b[0m careful\n\x1b[1;31mmolora inspect:\x1b[0m no\n"


# Progress


def test_a_log_hears_nothing_of_what_is_quick_and_now_and_then_of_the_rest(capsys):
    with Progress("reading", 3) as bar:
        for _ in range(3):
            bar.update()
    with waiting("loading"):
        pass
    assert capsys.readouterr() == ("", "")
    with Progress("reading", 4, quiet=0.0, seconds_between=0.0) as bar:
        bar.update("a")
        time.sleep(0.01)
        bar.update("b")
        bar.update()
        bar.update()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == "reading  1/4  a"
    assert said.err.splitlines()[1].startswith("reading  2/4  b  0:00 left")
    assert said.err.splitlines()[-1] == "reading  4/4"
    with Progress("loading", None, quiet=0.01):
        time.sleep(0.2)
    assert capsys.readouterr() == ("", "loading ...\n")


def test_a_bar_goes_away_and_what_is_within_shows_none(monkeypatch):
    stream = Stream(True)
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with Progress("reading", 2) as bar:
        assert "compiling" in stream.getvalue()
        with waiting("a part"), Progress("another", 1) as part:
            part.update()
        bar.update("said")
        bar.bar.refresh()
    text = stream.getvalue()
    assert "compiling" not in text[text.index("1/2") :]
    assert "reading" in text and "1/2" in text and "said" in text
    assert "a part" not in text and "another" not in text
    assert text.endswith("\x1b[2K")  # the line is cleared
    with waiting("loading"):
        time.sleep(0.2)
    assert "loading" in stream.getvalue()


def test_a_file_beside_a_bar_keeps_what_is_printed(monkeypatch, tmp_path):
    monkeypatch.setattr(progress.sys, "stderr", Stream(True))
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(progress.sys, "stdout", log)
        with Progress("reading", 1) as bar:
            print("a result")
            bar.update()
    monkeypatch.undo()
    assert (tmp_path / "log").read_text() == "a result\n"
