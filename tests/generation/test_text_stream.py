"""Text that may be shown already: whole characters, and nothing of a stop string."""

import numpy as np
import pytest

from molora_jax.generation.text_stream import TextStream
from molora_jax.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()  # one token a byte


def stream(text, stop=()):
    """The parts that a stream shows of a text, the last of them at its end."""
    tokens = TOKENIZER.encode(text) if isinstance(text, str) else list(text)
    parts = TextStream(TOKENIZER, stop=stop)
    shown = []
    for token in tokens:
        shown.append(parts.push(token))
        if parts.stopped:
            return shown, True
    return [*shown, parts.finish()], parts.stopped


@pytest.mark.parametrize("text", ["plain", "Grüße 🙂 日本語", "a\n\nb  c", ""])
def test_the_parts_are_the_text_and_each_is_whole(text):
    parts, stopped = stream(text)
    assert "".join(parts) == text and not stopped
    assert "\ufffd" not in "".join(parts)


def test_a_character_comes_with_its_last_byte():
    assert stream("ü🙂")[0] == ["", "ü", "", "", "", "🙂", ""]


def test_broken_bytes_are_shown_at_the_end():
    broken = [0xF0, 0x9F, 0x99]  # a smile without its last byte
    parts, _ = stream([*b"ab", *broken])
    assert "".join(parts[:-1]) == "ab"
    assert parts[-1] == TOKENIZER.decode([*b"ab", *broken])[2:] != ""


def test_a_stop_text_ends_before_itself_and_is_never_shown_in_part():
    parts, stopped = stream("one END two", stop=("END",))
    assert stopped and "".join(parts) == "one "
    parts, stopped = stream("one EN two E", stop=("END",))
    assert not stopped and "".join(parts) == "one EN two E"
    assert "".join(parts[:6]) == "one "  # EN is held back until a space follows it
    parts, stopped = stream("aabaac", stop=("aac", "zz"))
    assert stopped and "".join(parts) == "aab"


def test_the_first_of_several_stop_texts_counts():
    assert "".join(stream("x yy zz", stop=("zz", "yy"))[0]) == "x "


def test_random_texts_are_cut_where_a_search_of_the_whole_would():
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("abü"), rng.integers(0, 12)))
        stop = tuple("".join(rng.choice(list("abü"), rng.integers(1, 4))) for _ in range(2))
        found = [at for each in stop if (at := text.find(each)) >= 0]
        # The one that is complete first ends the text; of these, the earliest.
        expected = text
        if found:
            end = min(text.find(each) + len(each) for each in stop if each in text)
            done = [each for each in stop if each in text[:end]]
            expected = text[: min(text.find(each) for each in done)]
        parts, stopped = stream(text, stop=stop)
        assert "".join(parts) == expected, (text, stop)
        assert stopped == bool(found)


@pytest.mark.parametrize("stop", [("",), ("a", "")])
def test_an_empty_stop_text_is_refused(stop):
    with pytest.raises(ValueError, match="not empty"):
        TextStream(TOKENIZER, stop=stop)
