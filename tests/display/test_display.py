"""Pictures and coloured text: that they hold what was given, safely, and read without colour."""

import html.parser
import io
import pathlib
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest

from molora_jax import display

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ["code", "math", "prose"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


# Figures


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_figures_are_written_whatever_the_names(tmp_path):
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(3), (5, 2))
    shares[:, 1, :] = np.nan  # a domain without tokens
    names = {"domain_names": ["a $1 b $2", "b"], "adapter_names": NAMES}
    figures = {
        "share": display.share_figure(shares[0], **names),
        "layers": display.layer_share_figure(shares, **names),
        "tokens": display.token_figure(
            rng.random((6, 3)),
            ["$x$", b"\xf0\x9f", b"\x99\x82", "\n", "字", "é"],
            adapter_names=NAMES,
        ),
        "many": display.token_figure(rng.random((300, 3)), ["x"] * 300, adapter_names=NAMES),
        "curves": display.curve_figure(
            {"a": ([1, 2, 3], [3.0, 2.0, 1.5]), "b": ([3], [2.0])}, smooth=2, title="losses"
        ),
        "empty": display.curve_figure({}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # glyphs that the font lacks warn
        for name, figure in figures.items():
            path = display.save_figure(figure, tmp_path / "new" / f"{name}.png")
            assert min(png_size(path)) > 150


def test_drawing_sets_nothing_global_and_import_is_cheap(tmp_path):
    program = """
import sys
import numpy as np
import molora_jax.routing.metrics
from molora_jax import display
assert not {"matplotlib", "sklearn", "pandas"} & set(sys.modules)
figure = display.share_figure(np.eye(2), domain_names=["a", "b"], adapter_names=["x", "y"])
display.save_figure(figure, sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
"""
    path = tmp_path / "a.png"
    done = subprocess.run(
        [sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert png_size(path)[0] > 150


def test_figures_show_the_numbers():
    shares = np.array([[0.9, 0.1], [0.25, 0.75]])
    figure = display.share_figure(shares, domain_names=["a", "b"], adapter_names=["x", "y"])
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), shares)
    texts = {t.get_position(): t.get_text() for t in axes.texts}
    assert texts == {(0, 0): "90.0%", (1, 0): "10.0%", (0, 1): "25.0%", (1, 1): "75.0%"}
    layers = np.random.default_rng(0).random((4, 2, 3))
    figure = display.layer_share_figure(layers, domain_names=["a", "b"], adapter_names=NAMES)
    for g in range(2):
        np.testing.assert_array_equal(figure.axes[g].images[0].get_array(), layers[:, g].T)
    figure = display.curve_figure({"a": ([1, 2, 3, 4], [4.0, 2.0, 0.0, 8.0])}, smooth=2)
    raw, smooth = figure.axes[0].lines
    np.testing.assert_array_equal(raw.get_ydata(), [4, 2, 0, 8])
    np.testing.assert_array_equal(smooth.get_ydata(), [4, 3, 1, 4])
    with pytest.raises(ValueError, match="2 tokens for gates of 3"):
        display.token_figure(np.zeros((3, 2)), ["a", "b"], adapter_names=NAMES[:2])


# Pieces of text


def test_pieces_join_to_the_text_even_where_tokens_split_characters():
    text = "né 🙂\tab\n"
    raw = text.encode()
    for size in (1, 2, 3):
        tokens = [raw[i : i + size] for i in range(0, len(raw), size)]
        pieces = display.printable_pieces(tokens)
        assert len(pieces) == len(tokens)
        assert "".join(pieces) == text
    smile = "🙂".encode()
    # The character belongs to the token that completes it.
    assert display.printable_pieces([smile[:2], smile[2:], "x"]) == ["", "🙂", "x"]
    # The same in strings, as surrogateescape makes them.
    escaped = [part.decode("utf-8", "surrogateescape") for part in (smile[:3], smile[3:])]
    assert display.printable_pieces(escaped) == ["", "🙂"]
    # What never becomes a character is shown as such, at the end too.
    assert display.printable_pieces([b"\xff", "a", smile[:2]]) == ["\ufffd", "a", "\ufffd"]
    assert display.printable_pieces(["\ud800"]) == ["?"]
    assert display.printable_pieces([]) == []


def test_control_characters_cannot_reach_the_terminal():
    attack = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f"
    assert display.printable_pieces(["a\u202eb\u2028c"]) == ["a\ufffdb\ufffdc"]
    (piece,) = display.printable_pieces([attack])
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", piece)
    assert piece.startswith("␛]0;owned␇")
    text = display.terminal_text([attack], np.array([-1]), adapter_names=NAMES, color=True)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text


# Terminal


def test_terminal_colours_every_token_and_nothing_else():
    tokens, adapters = ["def", " f", "\n", " is", " x"], np.array([0, 0, 0, -1, 1])
    text = display.terminal_text(tokens, adapters, adapter_names=NAMES, stream=Terminal())
    body, _, legend = text.rpartition("\n\n")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", body)
    assert plain == "def f\n is x"
    first, second = body.split("\n")
    assert re.fullmatch(r"\x1b\[[0-9;]+mdef f\x1b\[0m", first)  # closed before the line ends
    assert re.fullmatch(r" is\x1b\[[0-9;]+m x\x1b\[0m", second)
    assert len({*re.findall(r"\x1b\[(38[0-9;]+)m", body)}) == 2
    for part in ("code", "60%", "math", "20%", "prose", "0%", "base only"):
        assert part in legend


def test_no_colour_gives_a_line_for_each_stretch(monkeypatch):
    tokens, adapters = ["def", " f\n", " is", " x"], np.array([0, 0, -1, 2])
    want = "     code | def f⏎\nbase only |  is\n    prose |  x\n\nadapters: "

    def text(stream):
        return display.terminal_text(tokens, adapters, adapter_names=NAMES, stream=stream)

    assert text(io.StringIO()).startswith(want)  # no terminal
    assert "\x1b" in text(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert text(Terminal()).startswith(want)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert text(Terminal()).startswith(want)
    forced = display.terminal_text(tokens, adapters, adapter_names=NAMES, color=True)
    assert "\x1b" in forced


def test_more_adapters_than_colours_stay_different():
    names = [f"a{i}" for i in range(14)]
    text = display.terminal_text(["x"] * 14, np.arange(14), adapter_names=names, color=True)
    body = text.split("\n\n")[0]
    assert len(set(re.findall(r"\x1b\[([0-9;]+)m", body)) - {"0"}) == 14
    page = display.html_page(["x"] * 14, np.arange(14), adapter_names=names)
    rules = re.findall(r"\.a\d+(\{--c:#\w+;text-decoration-style:\w+\})", page)
    assert len(rules) == len(set(rules)) == 14


def test_misfits_are_refused():
    for make in (display.terminal_text, display.html_page):
        with pytest.raises(ValueError, match="adapters has 1 entries for 2 tokens"):
            make(["a", "b"], np.array([0]), adapter_names=NAMES)
        with pytest.raises(ValueError, match=r"adapter 3 has no name.* has 3"):
            make(["a"], np.array([3]), adapter_names=NAMES)
    with pytest.raises(ValueError, match="token_ids has 2 rows for 1 tokens"):
        display.html_page(["a"], np.array([0]), adapter_names=NAMES, token_ids=[1, 2])


# HTML


class Page(html.parser.HTMLParser):
    """Spans with their attributes and text; fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.spans, self.links = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [value for name, value in attrs.items() if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)
        if tag == "span" and "title" in attrs:
            self.spans.append([attrs, ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "span" in self.open and self.spans:
            self.spans[-1][1] += data


def test_page_escapes_its_text_and_needs_nothing_else():
    smile = "🙂".encode()
    tokens = ["<script>alert(1)</script>", '" onmouseover="x', "\n", smile[:2], smile[2:], "&"]
    page = display.html_page(
        tokens,
        np.array([0, 1, -1, 2, 2, 0]),
        adapter_names=["<b>", "math", "prose"],
        title="<i>t</i>",
        note="a & b",
    )
    page.encode("utf-8")
    assert "<script" not in page
    assert "<b>" not in page
    parsed = Page(page)
    assert parsed.links == []
    assert "http" not in page
    assert "onmouseover" not in {name for attrs, _ in parsed.spans for name in attrs}
    texts = [text for _, text in parsed.spans]
    assert texts == ["<script>alert(1)</script>", '" onmouseover="x', "⏎\n", "·", "🙂", "&"]
    classes = [attrs["class"] for attrs, _ in parsed.spans]
    assert classes == ["t a0", "t a1", "t base", "t a2", "t a2", "t a0"]
    assert "prefers-color-scheme: dark" in page


def test_page_tells_ids_and_gates_on_hovering_and_sets_the_prompt_apart():
    gates = np.array([[0.0, 1, 0], [0.25, 0, 0.75], [0, 0, 0]])
    page = display.html_page(
        ["What", " is", " x"],
        np.array([1, 2, -1]),
        adapter_names=NAMES,
        gates=gates,
        token_ids=[17, 4, 99],
        num_prompt_tokens=1,
    )
    titles = [attrs["title"] for attrs, _ in Page(page).spans]
    assert titles == [
        "token 0 · id 17 · 'What' · math · gates math 1.000",
        "token 1 · id 4 · ' is' · prose · gates prose 0.750, code 0.250",
        "token 2 · id 99 · ' x' · base only · gates none",
    ]
    assert 'style="--g:0.75"' in page
    prompt = re.search(r'<pre class="prompt">(.*?)</pre>', page, re.DOTALL).group(1)
    assert "What" in prompt
    assert " is" not in prompt
    # The legend counts the answer alone.
    assert re.search(r"math</span> 0%", page)
    assert re.search(r"prose</span> 50%", page)


def test_text_is_readable_on_every_colour_in_both_schemes():
    page = display.html_page(["x"] * 7, np.arange(7), adapter_names=list("abcdefg"))
    colors = re.findall(r"\.a\d\{--c:#(\w{6})", page)
    assert len(set(colors)) == 7

    def rgb(text):
        return np.array([int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)])

    def luminance(c):
        linear = np.where(c <= 0.03928, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    schemes = re.findall(
        r"--ink: #(\w+); --paper: #(\w+); --soft: #(\w+);.*?--strength: (\d+)%", page, re.DOTALL
    )
    assert len(schemes) == 2
    for ink, *papers, strength in schemes:
        for paper in papers:
            for color in colors:
                share = int(strength) / 100
                behind = share * rgb(color) + (1 - share) * rgb(paper)
                low, high = sorted([luminance(behind), luminance(rgb(ink))])
                assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG AA
