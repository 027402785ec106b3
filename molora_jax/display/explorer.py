"""An analysis as one HTML page that needs nothing else: read a text, ask every token for its gates.

The page is explorer.html with explorer.css, explorer.js and the data written into it. Its state
stands in the address behind #, so that a view can be linked:

    text     index of the text              layer   main | word | all | a layer's number
    token    index of the token, or none    colour  adapter | entropy | loss | forced
    forced   index of the adapter, or base  view    a | b | both, with two routers

Numbers are rounded to 1/4000 and packed as two characters each, so that 4,000 tokens over 30 layers
and two routers take about four megabytes.
"""

import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from molora_jax.display.text import adapter_color, printable_pieces

if TYPE_CHECKING:
    from molora_jax.analysis import Analysis, RouterTrace, TextAnalysis

STEPS = 4000  # of the unit interval; what is left of 64² says "not a number"
_DIGITS = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", np.uint8
)
# They would turn the letters that follow around, past the end of their token.
_TURNS_TEXT = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def explorer_page(
    analysis: "Analysis", *, title: str = "Routing, token by token", note: str = ""
) -> str:
    """The page of an analysis with one router or two, the text of which cannot leave its place.

    Raises ValueError for more routers than two.
    """
    counts = {len(text.routers) for text in analysis.texts}
    if not counts <= {1, 2}:
        raise ValueError(f"{max(counts)} routers: the page shows one, or two side by side")
    data = {
        "title": title,
        "adapters": list(analysis.adapters),
        "colors": [adapter_color(index) for index in range(len(analysis.adapters))],
        "steps": STEPS,
        "texts": [_text(text, len(analysis.adapters)) for text in analysis.texts],
    }
    files = resources.files("molora_jax.display")
    page = (files / "explorer.html").read_text(encoding="utf-8")
    parts = {
        "{{title}}": html.escape(title),
        "{{note}}": html.escape(note),
        "{{css}}": (files / "explorer.css").read_text(encoding="utf-8"),
        "{{js}}": (files / "explorer.js").read_text(encoding="utf-8"),
        "{{data}}": _embedded(data),
    }
    # One pass, so that a text that holds a placeholder stays as it is.
    return re.sub("|".join(parts), lambda match: parts[match.group()], page)


def _embedded(data: Any) -> str:
    """JSON for a script element: no character in it can end the element or begin another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII alone
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _text(text: "TextAnalysis", num_adapters: int) -> dict[str, Any]:
    pieces = [_TURNS_TEXT.sub("\ufffd", each) for each in printable_pieces(text.pieces)]
    words = [_TURNS_TEXT.sub("\ufffd", each) for each in printable_pieces(text.word_texts)]
    return {
        "pieces": pieces,
        "ids": list(text.token_ids),
        "words": text.words.tolist(),
        "wordTexts": words,
        "forced": None if text.forced is None else [_nats(row) for row in text.forced],
        "routers": [_router(trace, text.words, num_adapters) for trace in text.routers],
    }


def _router(trace: "RouterTrace", words: np.ndarray, num_adapters: int) -> dict[str, Any]:
    low, high = min(0.0, trace.gates.min()), max(1.0, trace.gates.max())
    p = trace.probabilities
    return {
        "name": trace.name,
        "decision": trace.decision,
        "k": trace.top_k,
        "layers": len(trace.gates),
        "choices": packed(trace.adapter_ids + 1),
        "gates": packed(np.round((trace.gates - low) / (high - low) * STEPS)),
        "range": [float(low), float(high)],
        "logitLayers": 0 if p is None else len(p),
        "probabilities": "" if p is None else packed(np.round(p * STEPS)),
        "main": trace.main.tolist(),
        "wordMain": trace.of_words(words).tolist(),
        "loss": _nats(trace.loss),
    }


def packed(numbers: np.ndarray) -> str:
    """Whole numbers from 0 to 4094 as two characters each, in C order; 4095 where one is NaN."""
    flat = np.ravel(numbers)
    whole = np.where(np.isfinite(flat), flat, 4095).astype(np.int64)
    assert whole.min(initial=0) >= 0
    assert whole.max(initial=0) <= 4095
    return _DIGITS[np.stack([whole // 64, whole % 64], axis=1)].tobytes().decode("ascii")


def _nats(row: np.ndarray) -> list[float | None]:
    return [round(float(value), 3) if np.isfinite(value) else None for value in row]
