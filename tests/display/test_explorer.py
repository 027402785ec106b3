"""The page of an analysis: no text leaves its place, and headless Chromium shows what it should."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from molora_jax.analysis import Analysis, RouterTrace, TextAnalysis, words_of
from molora_jax.display.explorer import explorer_page, packed
from pallas_kernels.notebook import PALETTE

HOSTILE = "</script><script>document.title='in'</script>"
PIECES = ["def", " f", "\n", HOSTILE, "<!--", " \"q'&amp;", "é", "\u202edlrow", "{{js}}"]
NAMES = ("code", "<b>math</b>", "prose")
N, L = len(PIECES), 4


def trace(name, *, seed, top_k=2, logit_layers=L):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(3, 0.6), (L, N))
    ids = np.argsort(-p, axis=-1)[..., :top_k]
    gates = np.take_along_axis(p, ids, axis=-1)
    gates /= gates.sum(axis=-1, keepdims=True)
    loss = np.concatenate([[np.nan], rng.gamma(2, 1, N - 1)])
    return RouterTrace(
        name=name, decision="per_layer", top_k=top_k, adapter_ids=ids, gates=gates,
        probabilities=p[:logit_layers] if logit_layers else None, loss=loss,
    )  # fmt: skip


def analysed(*routers, pieces=PIECES, forced=True):
    words, texts = words_of(pieces)
    losses = np.random.default_rng(9).gamma(2, 1, (len(NAMES) + 1, len(pieces)))
    text = TextAnalysis(
        token_ids=tuple(range(100, 100 + len(pieces))), pieces=tuple(pieces), words=words,
        word_texts=tuple(texts), routers=routers, forced=losses if forced else None,
    )  # fmt: skip
    return Analysis(adapters=NAMES, texts=(text,))


A, B = trace("first", seed=1), trace("<i>second</i>", seed=2, top_k=1)


class Elements(html.parser.HTMLParser):
    """The tags of a page, and the text of its data element."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.data, self.inside = [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        self.data += data if self.inside else ""


def test_the_data_cannot_leave_its_element():
    page = explorer_page(analysed(A, B), title="a <title> & {{data}}", note="<p>")
    empty = explorer_page(analysed(A, B, pieces=["x"] * N))
    found = Elements(page)
    assert found.tags == Elements(empty).tags  # whatever the text, the same elements
    data = json.loads(found.data)
    assert "".join(data["texts"][0]["pieces"]) == "".join(PIECES).replace("\u202e", "\ufffd")
    assert data["adapters"] == list(NAMES)
    assert page.count("</script>") == 2
    assert "a &lt;title&gt; &amp; {{data}}" in page


def test_the_page_needs_nothing_else():
    page = explorer_page(analysed(A))
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=|@import|url\(|https?:", page)


def test_numbers_survive_packing():
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    text = packed(np.array([[0, 1, 63], [64, 4094, np.nan]]))
    pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
    assert [64 * digits.index(a) + digits.index(b) for a, b in pairs] == [0, 1, 63, 64, 4094, 4095]


def test_a_long_text_stays_small():
    rng, count, layers = np.random.default_rng(0), 4000, 30
    p = rng.dirichlet(np.ones(4), (layers, count))
    ids = np.argsort(-p, axis=-1)[..., :2]
    one = RouterTrace(
        name="r", decision="per_layer", top_k=2, adapter_ids=ids, gates=p[..., :2],
        probabilities=p, loss=rng.random(count),
    )  # fmt: skip
    text = TextAnalysis(
        token_ids=(1,) * count, pieces=(" word",) * count, words=np.arange(count),
        word_texts=("word",) * count, routers=(one, one), forced=rng.random((5, count)),
    )  # fmt: skip
    page = explorer_page(Analysis(adapters=("a", "b", "c", "d"), texts=(text,)))
    assert len(page) < 5e6


def test_three_routers_are_refused():
    with pytest.raises(ValueError, match="3 routers"):
        explorer_page(analysed(A, B, A))


# In Chromium

CHROMIUM = shutil.which("chromium")
browser = pytest.mark.browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """open_page(analysis, fragment) → the page as it is after its script ran."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian's package of that name)")
    folder = tmp_path_factory.mktemp("chromium")

    def start(url, *options):
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=5000", *options, url,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
        return done.stdout

    def open_page(analysis, fragment="", *, then="", screenshot=None, size="1200,900"):
        page = folder / "page.html"
        text = explorer_page(analysis) + (f"<script>{then}</script>" if then else "")
        page.write_text(text, encoding="utf-8")
        url = f"{page.as_uri()}#{fragment}"
        if screenshot:
            return start(url, f"--screenshot={screenshot}", f"--window-size={size}")
        return Dom(start(url, "--dump-dom", f"--window-size={size}"))

    return open_page


class Dom(html.parser.HTMLParser):
    """Attributes and text of each element that has a data- attribute or an id."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.found.append(element)
        if tag not in ("meta", "br", "input", "link"):
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, **wanted):
        """Elements whose attributes are these; `data_x` is data-x, True any value."""
        names = {name.replace("_", "-"): value for name, value in wanted.items()}
        return [
            each
            for each in self.found
            if all(n in each and value in (True, each[n]) for n, value in names.items())
        ]

    def tokens(self, router=0):
        return self.all(role="option", data_router=str(router))


def gates_said(router, layer, token):
    order = np.argsort(-router.gates[layer, token], kind="stable")
    pairs = zip(
        router.adapter_ids[layer, token][order], router.gates[layer, token][order], strict=True
    )
    return " · ".join(f"{NAMES[adapter]} {gate:.3f}" for adapter, gate in pairs)


@browser
def test_a_token_shows_its_gates_in_every_layer(chromium):
    dom = chromium(analysed(A), "layer=2&token=3")
    assert dom.all(data_ready="yes")
    (panel,) = dom.all(id="panel")
    assert panel["data-token"] == "3"
    cells = [each["data-gates"] for each in dom.all(data_gates=True)]
    for layer, said in enumerate(cells):
        names = re.sub(r" \d\.\d+", "", said)
        assert names == re.sub(r" \d\.\d+", "", gates_said(A, layer, 3))
        shown = [float(each) for each in re.findall(r" (\d\.\d+)", said)]
        np.testing.assert_allclose(shown, A.gates[layer, 3], atol=1e-3)
    assert len(cells) == L
    assert [each["data-layer"] for each in dom.all(tag="tr", **{"class": "now"})] == ["2"]
    assert f"{A.loss[3]:.3f} nats" in panel["text"]
    difference = analysed(A).texts[0].forced_difference()[:, 3]
    rows = [each["text"] for each in dom.all(tag="tr", data_forced=True)]
    for row, value in zip(rows, difference, strict=True):
        shown = float(re.search(r"[+−]?\d\.\d+$", row)[0].replace("−", "-"))
        assert shown == pytest.approx(value, abs=2e-3)
    # What the text holds came out as text, and as nothing else.
    text = "".join(each["text"] for each in dom.tokens())
    assert text.replace("⏎", "") == "".join(PIECES).replace("\u202e", "\ufffd")
    assert len([each for each in dom.found if each["tag"] == "script"]) == 2
    assert not [each for each in dom.found if each["tag"] == "b" and each["text"] == "math"]


@browser
def test_the_picked_layer_colours_the_text(chromium):
    shown = {}
    for layer in ("1", "main"):
        dom = chromium(analysed(A), f"layer={layer}")
        shown[layer] = [int(each["data-adapter"]) for each in dom.tokens()]
        for adapter, token in zip(shown[layer], dom.tokens(), strict=True):
            assert PALETTE[adapter].lower() in token["style"].lower()
    assert shown["1"] == A.by_layer[1].tolist()
    assert shown["main"] == A.main.tolist()
    assert shown["1"] != shown["main"]


@browser
def test_two_routers_stand_side_by_side_with_what_differs_marked(chromium):
    dom = chromium(analysed(A, B), "layer=0&view=both")
    expected = np.flatnonzero(A.by_layer[0] != B.by_layer[0]).tolist()
    assert 0 < len(expected) < N
    for router in (0, 1):
        marked = [
            int(each["data-token"])
            for each in dom.tokens(router)
            if "different" in each["class"].split()
        ]
        assert marked == expected
    assert dom.all(id="summary")[0]["data-differing"] == str(len(expected))
    one = chromium(analysed(A, B), "layer=0&view=b&colour=loss")
    assert not one.tokens(0)
    values = [each.get("data-value") for each in one.tokens(1)]
    assert values[0] is None
    np.testing.assert_allclose([float(v) for v in values[1:]], B.loss[1:], atol=1e-3)


@browser
def test_pointer_keys_and_layers_move_the_view_and_the_address_follows(chromium):
    hovering = """
        const token = (at) => document.querySelector(`[role=option][data-token="${at}"]`);
        token(5).dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));"""
    dom = chromium(analysed(A), "token=1", then=hovering)
    assert dom.all(id="panel")[0]["data-token"] == "5"
    acting = """
        const token = (at) => document.querySelector(`[role=option][data-token="${at}"]`);
        const press = (key) => document.activeElement.dispatchEvent(
            new KeyboardEvent("keydown", {key, bubbles: true}));
        token(1).click(); press("ArrowRight"); press("ArrowRight"); press("ArrowDown");
        document.querySelector("#gates tr[data-layer='3']").click();
        document.querySelector("#colour [data-value=loss]").click();
        document.body.append(Object.assign(document.createElement("p"),
            {id: "address", textContent: location.hash}));"""
    dom = chromium(analysed(A), "token=8", then=acting)
    assert dom.all(id="address")[0]["text"] == "#layer=3&token=3&colour=loss"
    assert dom.all(id="panel")[0]["data-token"] == "3"
    assert [each["data-token"] for each in dom.all(role="option", tabindex="0")] == ["3"]


@browser
def test_a_router_without_logits_or_losses_leaves_the_rest(chromium):
    plain = trace("table", seed=3, top_k=1, logit_layers=0)
    dom = chromium(analysed(plain, forced=False), "colour=entropy&token=99&layer=77&text=5&view=x")
    off = {each["data-value"] for each in dom.all(role="radio", disabled=True)}
    assert off == {"entropy", "forced"}
    checked = [each["data-value"] for each in dom.all(role="radio", aria_checked="true")]
    assert checked == ["adapter"]  # an address that asks for what is not there
    assert "data-token" not in dom.all(id="panel")[0]


@browser
@pytest.mark.parametrize("fragment", ["layer=all&token=4&view=both", "colour=forced&forced=base"])
def test_a_picture_of_the_page_has_colours(chromium, tmp_path, fragment):
    from matplotlib.image import imread

    file = tmp_path / "page.png"
    chromium(analysed(A, B), fragment, screenshot=file, size="480,800")
    pixels = (imread(file)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    colors, counts = np.unique(pixels // 16, axis=0, return_counts=True)
    strong = colors[(counts > 30) & (np.ptp(colors, axis=1) >= 3)]
    assert len(strong) >= 3, "ground and grey text alone"
