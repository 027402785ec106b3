"""Documents of three modalities in one vocabulary: captions, pictures as codes, grids of colours.

A picture is 14×14 ink bits as 7×7 codes, each of a 2×2 patch, with a mark before each row, for a
model does not count to 49; a grid is rows of ten colours. The text between them says what comes
next: an alphabet and its look, the size and colours of a grid.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

SIDE = 7  # codes along an edge of a picture
CODES = SIDE * SIDE
BODY = CODES + SIDE - 1  # ids of a picture between begin and end: a mark begins rows 2 to 7
PICTURE = (
    "<|pic_begin|>",
    *(f"<|pic_{code}|>" for code in range(16)),
    *(f"<|pic_row_{row}|>" for row in range(2, SIDE + 1)),
    "<|pic_end|>",
)
GRID = ("<|grid_begin|>", *(f"<|color_{at}|>" for at in range(10)), "<|grid_row|>", "<|grid_end|>")
MODALITIES = ("text", "picture", "grid")
COLORS = (
    *("black", "blue", "red", "green", "yellow"),
    *("grey", "pink", "orange", "cyan", "brown"),
)
LONGEST_EDGE = 10  # of the grids that are used


@dataclasses.dataclass(frozen=True)
class Picture:
    """49 codes of 0 to 15, and the alphabet of what they show."""

    codes: np.ndarray
    alphabet: str


Grid = Sequence[Sequence[int]]
Task = Sequence[tuple[Grid, Grid]]  # pairs of input and output; the last is what a prompt leaves


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the modalities lie in a vocabulary whose first `num_text` ids are the base's own."""

    num_text: int

    @property
    def picture(self) -> int:
        """Id of <|pic_begin|>; code c is 1 + c behind it, the mark of row r is 15 + r."""
        return self.num_text

    @property
    def grid(self) -> int:
        return self.num_text + len(PICTURE)

    @property
    def vocab_size(self) -> int:
        return self.grid + len(GRID)

    def ranges(self) -> list[tuple[int, int, int]]:
        """(start, stop, column) of text, pictures and grids, as `VocabularyRouter` takes them."""
        edges = [0, self.picture, self.grid, self.vocab_size]
        return [(edges[at], edges[at + 1], at) for at in range(len(MODALITIES))]

    def modality(self, ids: Any) -> np.ndarray:
        """Index into MODALITIES of each id."""
        return np.searchsorted([self.picture, self.grid], np.asarray(ids), side="right")

    def picture_ids(self, codes: np.ndarray) -> list[int]:
        """Begin, seven rows of codes with the mark of the row before each but the first, end."""
        body = []
        for at, code in enumerate(codes):
            if at and at % SIDE == 0:
                body.append(self.picture + 16 + at // SIDE)
            body.append(self.picture + 1 + int(code))
        return [self.picture, *body, self.grid - 1]

    def codes(self, body: Sequence[int]) -> list[int] | None:
        """The codes in what stands behind begin, or None where it is not how a picture goes on.

        Fewer than 49 where it breaks off.
        """
        codes = []
        for at, token in enumerate(body):
            row, column = divmod(at, SIDE + 1)
            if column == SIDE:
                if token != self.picture + 17 + row or row == SIDE - 1:
                    return None
            elif not self.picture < token <= self.picture + 16:
                return None
            else:
                codes.append(token - self.picture - 1)
        return codes

    def grid_ids(self, grid: Grid) -> list[int]:
        begin, row, end = self.grid, self.grid + 11, self.grid + 12
        ids = [begin]
        for at, cells in enumerate(grid):
            ids += ([row] if at else []) + [begin + 1 + int(cell) for cell in cells]
        return [*ids, end]


# Bits and codes.


def to_codes(bits: np.ndarray) -> np.ndarray:
    """14×14 bits → 49 codes: 8·top-left + 4·top-right + 2·bottom-left + bottom-right."""
    patches = bits.reshape(SIDE, 2, SIDE, 2).transpose(0, 2, 1, 3).reshape(CODES, 4)
    return (patches @ [8, 4, 2, 1]).astype(np.uint8)


def to_bits(codes: Sequence[int] | np.ndarray) -> np.ndarray:
    """49 codes → 14×14 bits. ValueError for another number of codes: nothing is filled up."""
    codes = np.asarray(codes, np.int64)
    if codes.shape != (CODES,) or (codes < 0).any() or (codes > 15).any():
        raise ValueError(f"{codes.size} codes are no picture; expected {CODES} of 0 to 15")
    patches = (codes[:, None] >> np.array([3, 2, 1, 0])) & 1
    return patches.reshape(SIDE, SIDE, 2, 2).transpose(0, 2, 1, 3).reshape(2 * SIDE, 2 * SIDE)


# Text, and documents as lists of ids.


def caption(picture: Picture) -> str:
    """The alphabet, and how the picture looks: its width and how much ink it has."""
    bits = to_bits(picture.codes)
    columns = np.flatnonzero(bits.any(axis=0))
    width = columns[-1] - columns[0] + 1 if columns.size else 0
    look = f"{'wide' if width > 8 else 'narrow'} and {'dark' if bits.sum() > 30 else 'light'}"
    return f"{picture.alphabet}, {look}:"


def grid_caption(what: str, grid: Grid) -> str:
    """Which grid, its height and width, and its colours in the order of their numbers."""
    names = [COLORS[color] for color in sorted({cell for row in grid for cell in row})]
    return f"{what}, {len(grid)} by {len(grid[0])}, {' '.join(names)}:"


@dataclasses.dataclass(frozen=True)
class Writer:
    """Documents of at most `seq_len` ids; `encode` is the tokenizer's."""

    layout: Layout
    encode: Callable[[str], list[int]]
    seq_len: int

    def picture(self, picture: Picture) -> list[int]:
        """Caption, picture and a line break."""
        text = self.encode(caption(picture))
        return [*text, *self.layout.picture_ids(picture.codes), *self.encode("\n")]

    def grid(self, what: str, grid: Grid) -> list[int]:
        text = self.encode(grid_caption(what, grid))
        return [*text, *self.layout.grid_ids(grid), *self.encode("\n")]

    def pair(self, pair: tuple[Grid, Grid]) -> list[int]:
        return [*self.grid("Input", pair[0]), *self.grid("Output", pair[1])]

    def picture_documents(self, pictures: Sequence[Picture], seed: int) -> Iterator[list[int]]:
        """Pictures one after another, as many as fit; each is used once, in a shuffled order."""
        document: list[int] = []
        for at in np.random.default_rng(seed).permutation(len(pictures)):
            part = self.picture(pictures[at])
            if document and len(document) + len(part) > self.seq_len:
                yield document
                document = []
            document += part

    def grid_documents(self, tasks: Sequence[Task], seed: int) -> Iterator[list[int]]:
        """The pairs of one task, as many as fit, of grids of at most 10×10; tasks shuffled."""
        for at in np.random.default_rng(seed).permutation(len(tasks)):
            document: list[int] = []
            for pair in filter(small, tasks[at]):
                part = self.pair(pair)
                if len(document) + len(part) > self.seq_len:
                    break
                document += part
            if document:
                yield document

    def mixed_documents(
        self, pictures: Sequence[Picture], tasks: Sequence[Task], seed: int
    ) -> Iterator[list[int]]:
        """A pair of a task between two pictures: all three modalities in one document."""
        rng = np.random.default_rng(seed)
        order = iter(rng.permutation(len(pictures)))
        for at in rng.permutation(len(tasks)):
            pairs = [self.pair(pair) for pair in tasks[at] if small(pair)]
            first, second = next(order, None), next(order, None)
            if first is None or second is None:
                return
            before, behind = self.picture(pictures[first]), self.picture(pictures[second])
            room = self.seq_len - len(before) - len(behind)
            if fitting := [pair for pair in pairs if len(pair) <= room]:
                yield before + fitting[0] + behind


def small(pair: tuple[Grid, Grid]) -> bool:
    return all(max(len(grid), len(grid[0])) <= LONGEST_EDGE for grid in pair)
