"""The text domains: splits without overlap, determinism, digests, and problems that add up."""

import collections
import itertools
import json
import math
import random
import re

import pytest

from experiments import domains, reference_text, word_problems


@pytest.fixture(scope="module")
def embedded() -> list[domains.Domain]:
    return domains.load_domains(source="embedded")


def check(loaded):
    for domain in loaded:
        train, heldout = set(domain.train_docs), set(domain.heldout_docs)
        assert not train & heldout
        assert len(train) == len(domain.train_docs)
        assert len(heldout) == len(domain.heldout_docs)
        assert sum(map(len, domain.train_docs)) > 500_000
        assert sum(map(len, domain.heldout_docs)) > 50_000
        assert domain.source
        assert domain.licence
    assert len({domain.digest for domain in loaded}) == len(loaded)


def test_embedded_domains(embedded):
    assert [domain.name for domain in embedded] == ["code", "math", "scripture", "chess"]
    check(embedded)
    by_name = {domain.name: domain for domain in embedded}
    everything = {
        name: "\n".join(each.train_docs + each.heldout_docs) for name, each in by_name.items()
    }
    assert everything["code"].count("\ndef ") > 1000
    assert everything["scripture"].count("In the beginning God created the heaven") == 1
    assert "1. e4 c5" in everything["chess"]
    whole_bible = by_name["scripture"].train_docs + by_name["scripture"].heldout_docs
    assert len(whole_bible) == 1189


def test_a_seed_decides(embedded):
    digests = [domain.digest for domain in embedded]
    assert [each.digest for each in domains.load_domains(source="embedded")] == digests
    other = domains.load_domains(source="embedded", seed=1)
    assert all(each.digest != digest for each, digest in zip(other, digests, strict=True))


def test_the_digest_sees_one_character_and_the_border_between_splits():
    def made(train, heldout):
        return domains.Domain(
            name="x", train_docs=train, heldout_docs=heldout, source="s", licence="l"
        ).digest

    one = made(("a", "b"), ("c",))
    assert one == made(("a", "b"), ("c",))
    assert one != made(("a", "b"), ("C",))
    assert one != made(("a",), ("b", "c"))


def test_overlapping_splits_are_caught():
    with pytest.raises(AssertionError, match="1 documents are in both"):
        domains.Domain(
            name="x", train_docs=("a b", "c"), heldout_docs=("a  b",), source="s", licence="l"
        )
    with pytest.raises(ValueError, match="no documents"):
        domains.Domain(name="x", train_docs=("a",), heldout_docs=(), source="s", licence="l")


def test_domains_can_be_told_apart(embedded):
    """Words alone, from 60 characters, decide nearly always: the router has something to learn."""
    counts = {}
    for domain in embedded:
        words = re.findall(r"\w+|\S", " ".join(domain.train_docs[:200]))
        counts[domain.name] = collections.Counter(words)
    totals = {name: sum(count.values()) for name, count in counts.items()}
    r = random.Random(0)
    right, asked = 0, 0
    for domain in embedded:
        for doc in domain.heldout_docs[:50]:
            start = r.randrange(max(1, len(doc) - 60))
            words = re.findall(r"\w+|\S", doc[start : start + 60])
            score = {
                name: sum(math.log((count[word] + 0.1) / totals[name]) for word in words)
                for name, count in counts.items()
            }
            right += max(score, key=score.get) == domain.name
            asked += 1
    assert right / asked > 0.93


def test_held_out_chess_families_share_no_line_with_training(embedded):
    def entries(docs):
        return {tuple(entry.split("\n")[:2]) for doc in docs for entry in doc.split("\n\n")}

    chess = next(domain for domain in embedded if domain.name == "chess")
    assert not entries(chess.train_docs) & entries(chess.heldout_docs)


def test_real_sets(molora_data, monkeypatch):
    monkeypatch.setenv("MOLORA_DATA", str(molora_data))
    loaded = domains.load_domains()
    assert [domain.name for domain in loaded] == ["code", "math", "shakespeare", "wikitext"]
    check(loaded)
    by_name = {domain.name: domain for domain in loaded}
    train, heldout = ("\n".join(docs) for docs in _splits(by_name["math"]))
    first = json.loads((molora_data / "gsm8k" / "test.jsonl").read_text().splitlines()[0])
    assert first["question"] in heldout
    assert first["question"] not in train
    assert "<<" not in heldout
    train, heldout = ("\n".join(docs) for docs in _splits(by_name["code"]))
    lines = (molora_data / "mbpp" / "mbpp.jsonl").read_text().splitlines()
    for row in map(json.loads, lines[:600:100]):
        inside, outside = (heldout, train) if 11 <= row["task_id"] <= 510 else (train, heldout)
        assert row["text"] in inside
        assert row["text"] not in outside
    assert "\r" not in heldout


def _splits(domain):
    return domain.train_docs, domain.heldout_docs


def test_sources_are_chosen_and_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("MOLORA_DATA", raising=False)
    assert domains.load_domains()[-1].name == "chess"
    with pytest.raises(ValueError, match="set MOLORA_DATA"):
        domains.load_domains(source="molora_data")
    with pytest.raises(ValueError, match="expected 'auto'"):
        domains.load_domains(source="real")
    monkeypatch.setenv("MOLORA_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"mbpp\.jsonl is missing: MOLORA_DATA"):
        domains.load_domains()


def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match="pip install no-such-package"):
        domains._packaged("no-such-package", "x.txt")


# "3 × $4 = $12", where neither side goes on.
NUMBER = r"\$?\d[\d./]*"
NOT_WITHIN, NOT_GOING_ON = r"(?<![\w./$])(?<![)×÷+−] )", r"(?![\d/(]| [×÷+−])"
EQUATION = re.compile(
    rf"{NOT_WITHIN}((?:{NUMBER} [×÷+−] )+{NUMBER}) = \$?(\d+(?:\.\d+)?){NOT_GOING_ON}"
)


@pytest.mark.parametrize("kind", word_problems.kinds(), ids=lambda kind: kind.name)
def test_every_equation_of_every_problem_adds_up(kind):
    r = random.Random(0)
    seen = 0
    for _ in range(40):
        text = word_problems.written(r, kind)
        assert "{" not in text
        assert "-" not in re.sub(r"[a-z]-[a-z]", "", text), text  # no negative number
        for left, right in EQUATION.findall(text):
            python = left.replace("$", "").replace("×", "*").replace("÷", "/").replace("−", "-")
            digits = len(right.partition(".")[2])
            assert round(eval(python), digits) == float(right), f"{left} = {right} in {text}"
            seen += 1
    assert seen or kind.name in ("chance", "painting", "buses")


def test_held_out_kinds_never_show_in_training():
    names = {kind.name for kind in word_problems.kinds() if kind.held_out}
    assert {"recipe", "tank", "theatre"} <= names
    train = list(itertools.islice(word_problems.problems(random.Random(0), held_out=False), 500))
    heldout = list(itertools.islice(word_problems.problems(random.Random(0), held_out=True), 100))
    assert not any("water tank" in text or "theatre" in text for text in train)
    assert any("water tank" in text for text in heldout)
    assert len(set(train)) > 480


def test_content_types_share_the_documents_of_the_domains(embedded, monkeypatch):
    monkeypatch.setattr(domains, "load_domains", lambda **_: embedded)
    types = domains.load_types(source="embedded")
    names = ["code", "math", "creative", "technical", "encyclopedic"]
    assert [each.name for each in types] == names
    check(types)
    code, math_type, creative, technical, encyclopedic = types
    same = zip((code, math_type, creative, encyclopedic), embedded, strict=True)
    assert all(one.digest == other.digest for one, other in same)
    assert technical.digest == domains.load_types(source="embedded")[3].digest
    assert technical.digest != domains.load_types(source="embedded", seed=1)[3].digest
    text = "\n".join(technical.train_docs + technical.heldout_docs)
    assert ">>>" not in text
    # Prose about arrays and estimators, hardly a line of code.
    assert text.count("array") > 1000
    assert len(re.findall(r"(?m)^\s*(def|import|return) ", text)) < 100


def test_reference_prose_leaves_examples_and_short_docstrings_out():
    long = "Explains how the thing behaves in every case that anybody has asked about. " * 5
    source = (
        f'"""{long}\n\nFor instance::\n\n    x = thing(1)\n\nand so on.\n\nExamples\n--------\n'
        f'>>> thing(1)\n2\n"""\ndef short():\n    """Says little."""\n'
        f'class Thing:\n    def method(self):\n        """{long}"""\n'
    )
    first, second = reference_text.prose(source).rsplit("\n\n", 1)
    assert first == f"{long.strip()}\n\nFor instance::\n\nand so on."
    assert second == long.strip()
