"""Pictures and puzzles, split: Omniglot and ARC from MOLORA_DATA, or generated stand-ins."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from experiments.interleaved_data import Picture, Task, to_codes

Source = Literal["auto", "generated", "molora_data"]

HELD_OUT_DRAWERS = (17, 18, 19, 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Pictures and puzzles, split; `digest` is a sha256 over all of them in order."""

    train_pictures: Sequence[Picture]
    heldout_pictures: Sequence[Picture]
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    plain_text: str
    source: str

    @functools.cached_property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for pictures in (self.train_pictures, self.heldout_pictures):
            for each in pictures:
                digest.update(each.alphabet.encode() + each.codes.tobytes())
        tasks = [self.train_tasks, self.heldout_tasks]
        digest.update(json.dumps([tasks, self.plain_text]).encode())
        return digest.hexdigest()


def load_data(*, source: Source = "auto", seed: int = 0) -> Data:
    """Omniglot and ARC from the folder that MOLORA_DATA names, or what stands in for them.

    Held out are characters of their own by drawers of their own, and ARC's evaluation tasks.

    Raises:
      ValueError: MOLORA_DATA is unset or lacks a file, where source is "molora_data".
    """
    folder = os.environ.get("MOLORA_DATA")
    if source == "generated" or (source == "auto" and not folder):
        return _generated(seed)
    if not folder:
        raise ValueError("source 'molora_data': set MOLORA_DATA to the folder of data sets first")
    return _real(pathlib.Path(folder))


def _real(root: pathlib.Path) -> Data:
    packed = root / "omniglot_tokens" / "omniglot_7x7.npz"
    with np.load(_there(packed)) as arrays:
        codes, character, drawer = (arrays[n] for n in ("tokens", "character", "drawer"))
    captions = json.loads(_there(packed.with_name("captions.json")).read_text("utf-8"))
    pictures: dict[bool, list[Picture]] = {True: [], False: []}
    for each, name, which, who in zip(codes, captions, character, drawer, strict=True):
        new_character, new_drawer = which % 5 == 0, who in HELD_OUT_DRAWERS
        if new_character == new_drawer:  # one of the two alone is in neither split
            pictures[bool(new_drawer)].append(Picture(each, name))
    tasks = {
        name: [
            [(pair["input"], pair["output"]) for pair in (*task["train"], *task["test"])]
            for task in map(json.loads, _lines(root / "arc_agi" / f"{name}.jsonl"))
        ]
        for name in ("training", "evaluation")
    }
    return Data(
        train_pictures=pictures[False],
        heldout_pictures=pictures[True],
        train_tasks=tasks["training"],
        heldout_tasks=tasks["evaluation"],
        plain_text="".join(_lines(root / "wikitext2" / "test.txt")[:200]),
        source="Omniglot as 7×7 codes (MIT), ARC-AGI (Apache-2.0), WikiText-2 (CC BY-SA)",
    )


def _generated(seed: int) -> Data:
    """Strokes in two invented alphabets, and puzzles that mirror or recolour."""
    rng = np.random.default_rng(seed)
    alphabets: dict[str, Callable] = {"Strokes": _strokes, "Boxes": _box}

    def pictures(count: int) -> list[Picture]:
        names = list(alphabets)
        return [
            Picture(to_codes(alphabets[names[at % 2]](rng)), names[at % 2]) for at in range(count)
        ]

    def task() -> Task:
        recolour, mirror = rng.permutation(10), bool(rng.integers(2))
        pairs = []
        for _ in range(4):
            grid = rng.choice(rng.permutation(10)[:3], tuple(rng.integers(2, 5, 2)))
            output = grid[:, ::-1] if mirror else recolour[grid]
            pairs.append((grid.tolist(), output.tolist()))
        return pairs

    words = ("ink", "paper", "a line", "a box", "the grid", "a row", "black", "blue")
    return Data(
        train_pictures=pictures(200),
        heldout_pictures=pictures(60),
        train_tasks=[task() for _ in range(60)],
        heldout_tasks=[task() for _ in range(30)],
        plain_text="".join(f"Here is {words[rng.integers(8)]}.\n" for _ in range(60)),
        source="generated stand-ins: strokes and boxes for letters, recoloured and mirrored grids",
    )


def _strokes(rng: np.random.Generator) -> np.ndarray:
    bits = np.zeros((14, 14), int)
    for _ in range(2):
        (y, x), (v, u) = rng.integers(2, 12, (2, 2))
        for t in np.linspace(0, 1, 24):
            bits[round(y + t * (v - y)), round(x + t * (u - x))] = 1
    return bits


def _box(rng: np.random.Generator) -> np.ndarray:
    bits = np.zeros((14, 14), int)
    (y, x), (h, w) = rng.integers(1, 5, 2), rng.integers(5, 9, 2)
    bits[y : y + h, x : x + w] = 1
    bits[y + 1 : y + h - 1, x + 1 : x + w - 1] = 0
    return bits


def _lines(path: pathlib.Path) -> list[str]:
    return _there(path).read_text(encoding="utf-8").splitlines(keepends=True)


def _there(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise ValueError(f"{path} is missing: MOLORA_DATA must name a folder that has it")
    return path
