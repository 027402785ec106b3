"""A user's JSON lines: what is read, cut, dropped with a count, and refused with its line."""

import json

import numpy as np
import pytest

from molora_jax.models import load_base
from molora_jax.training import read_windows


@pytest.fixture(scope="module")
def tokenizer():
    return load_base("tiny-random").tokenizer


def write(path, *entries) -> str:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def chat(*texts: str) -> dict:
    roles = ["user", "assistant"] * len(texts)
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ]
    }


def test_texts_are_packed_with_an_end_and_lose_nothing(tmp_path, tokenizer, capsys):
    path = write(tmp_path / "a.jsonl", {"text": "abc"}, "", {"text": "défg", "id": 7})
    windows, report = read_windows(path, tokenizer, seq_len=6)
    end = tokenizer.eos_ids[0]
    expected = [*b"abc", end, *"défg".encode(), end]
    assert windows.tokens[windows.mask].tolist() == expected
    assert (report.texts, report.dropped, report.windows, report.targets) == (2, 0, 2, 8)
    assert "2 texts in 2 windows of 6 tokens, 8 targets; nothing cut or dropped" in (
        capsys.readouterr().out
    )


def test_responses_only_takes_the_assistants_tokens_as_targets(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", chat("hi?", "yes", "and?", "no"))
    windows, report = read_windows(path, tokenizer, seq_len=200, responses_only=True)
    targets = windows.tokens[0, 1:][windows.weights[0, :-1] > 0].tolist()
    end_of_turn = tokenizer.eos_ids[1]
    assert targets == [*b"yes", end_of_turn, *b"no", end_of_turn]
    everything, _ = read_windows(path, tokenizer, seq_len=200)
    assert everything.weights.sum() == everything.mask.sum() - 1
    np.testing.assert_array_equal(everything.tokens, windows.tokens)
    assert report.targets == len(targets)


def test_cut_rows_are_counted_and_rows_without_a_target_dropped(tmp_path, tokenizer, capsys):
    """A prompt longer than the window leaves nothing to learn."""
    path = write(
        tmp_path / "a.jsonl",
        chat("x" * 60, "never seen"),
        chat("hi", "y" * 60),
        chat("hi", "ok"),
        {"messages": [{"role": "user", "content": "no answer"}]},
    )
    windows, report = read_windows(path, tokenizer, seq_len=48, responses_only=True)
    assert (report.conversations, report.truncated, report.dropped) == (4, 1, 2)
    assert windows.num_rows == 2
    assert (windows.weights.sum(axis=1) > 0).all()
    said = capsys.readouterr().out
    assert "1 conversations cut at 48 tokens, 2 lines dropped that left no target" in said

    path = write(
        tmp_path / "b.jsonl",
        chat("x" * 60, "never seen"),
        {"messages": [{"role": "user", "content": "no answer"}]},
    )
    with pytest.raises(ValueError, match=r"no target is left .*raise seq_len \(here 40\)"):
        read_windows(path, tokenizer, seq_len=40, responses_only=True)
    path = write(tmp_path / "c.jsonl", {"text": ""}, {"text": "abc"})
    assert read_windows(path, tokenizer, seq_len=40)[1].dropped == 1
    with pytest.raises(ValueError, match="seq_len must be at least 2"):
        read_windows(path, tokenizer, seq_len=1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"', r"Expecting ',' delimiter at column 13 of '\{\"text\": \"a\"'"),
        ("[1, 2]", "is a JSON array; write its entries one a line"),
        ("null", "found null"),
        ('{"prompt": "a"}', r"neither 'text' nor 'messages' \(its keys: \['prompt'\]\)"),
        ('{"text": "a", "messages": []}', "has 'text' and 'messages' too: keep one"),
        ('{"text": 5}', "'text' is 5, no string"),
        ('{"messages": []}', "no list with messages"),
        (
            '{"messages": [{"role": "user"}]}',
            r"messages\[0\] is .* without a text role and content",
        ),
        ('{"text": "half \\ud83d"}', "surrogates not allowed"),
        ("[" * 100_000, "recursion"),
        (
            '{"messages": [{"role": "assistnat", "content": "a"}]}',
            r"messages\[0\] has the role 'assistnat', .*none of system, .*assistant",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', r"messages\[0\]"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, tokenizer, line, problem):
    path = write(tmp_path / "a.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(ValueError, match=rf"a\.jsonl:3: .*{problem}.*expected one JSON object"):
        read_windows(path, tokenizer, seq_len=8)


def test_a_json_array_over_several_lines_is_named(tmp_path, tokenizer):
    path = tmp_path / "a.json"
    for text in ('[\n{"text": "a"}\n]', '[{"text": "a"},\n {"text": "b"}]', '[{"text": "a"}]'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json:1: the .* is a JSON array; write its"):
            read_windows(path, tokenizer, seq_len=8)


def test_other_encodings_and_texts_without_responses_are_named(tmp_path, tokenizer):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl:1: .*utf-8"):
        read_windows(path, tokenizer, seq_len=8)
    path = write(tmp_path / "a.jsonl", {"text": "fine"})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 'text' has no responses"):
        read_windows(path, tokenizer, seq_len=8, responses_only=True)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_called_empty(tmp_path, tokenizer, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"a\.jsonl is empty.*expected one JSON object"):
        read_windows(path, tokenizer, seq_len=8)
