"""Interleaved generation through the engine: captions, pictures and grids in one pass, and what of
them is whole."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.interleaved_data import (
    CODES,
    GRID,
    MODALITIES,
    Grid,
    Layout,
    Task,
    Writer,
    small,
    to_bits,
)

LOOKS = ("wide and dark", "narrow and light")
PROFILE = "vocabulary"
LONGEST_ANSWER = 128  # ids of a puzzle's answer


@dataclasses.dataclass
class Found:
    """What stands between begin and end tokens; nothing is filled up or cut to fit.

    pictures   14×14 bits of each that has 49 codes in seven marked rows and nothing else
    malformed  pictures with another number of codes, or with something else among them
    cut        pictures that the end of the answer left unfinished
    """

    pictures: list[np.ndarray] = dataclasses.field(default_factory=list)
    malformed: int = 0
    cut: int = 0

    @property
    def begun(self) -> int:
        return len(self.pictures) + self.malformed + self.cut


def pictures_in(ids: Sequence[int], layout: Layout) -> Found:
    """The pictures of an answer, and how many are none."""
    begin, end = layout.picture, layout.grid - 1
    found = Found()
    inside: list[int] | None = None
    for token in ids:
        if token == begin:
            found.malformed += inside is not None  # the one before never ended
            inside = []
        elif token == end and inside is not None:
            codes = layout.codes(inside)
            if codes is not None and len(codes) == CODES:
                found.pictures.append(to_bits(codes))
            else:
                found.malformed += 1
            inside = None
        elif inside is not None:
            inside.append(token)
    if inside is not None:
        could_be = layout.codes(inside) is not None
        found.cut += could_be
        found.malformed += not could_be
    return found


def grids_in(ids: Sequence[int], layout: Layout) -> list[Grid | None]:
    """The grids of an answer that ended; None for one whose rows differ or hold something else."""
    begin, row, end = layout.grid, layout.grid + 11, layout.grid + 12
    grids: list[Grid | None] = []
    rows: list[list[int]] | None = None
    for token in ids:
        if token == begin:
            rows = [[]]
        elif rows is None:
            continue
        elif token == row:
            rows.append([])
        elif token == end:
            cells = [cell for each in rows for cell in each]
            whole = len({len(each) for each in rows}) == 1 and bool(cells)
            grids.append(rows if whole and all(0 <= cell <= 9 for cell in cells) else None)
            rows = None
        else:
            rows[-1].append(token - begin - 1)
    return grids


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """A prompt of one solved pair and an input; the output is not shown."""

    shown: tuple[Grid, Grid]
    given: Grid
    wanted: Grid
    prompt: list[int]


def puzzles(writer: Writer, tasks: Sequence[Task], count: int, room: int) -> list[Puzzle]:
    """The first held-out tasks whose prompt fits `room` ids."""
    found: list[Puzzle] = []
    for task in tasks:
        pairs = [pair for pair in task if small(pair)]
        if len(pairs) < 2 or len(found) == count:
            continue
        shown, (given, wanted) = pairs[0], pairs[-1]
        prompt = writer.pair(shown) + writer.grid("Input", given)
        if len(prompt) <= room and len(writer.grid("Output", wanted)) <= 100:
            found.append(Puzzle(shown, given, wanted, prompt))
    return found


@dataclasses.dataclass(frozen=True)
class Generated:
    """Answers by arm: "vocabulary", "base", or the name of the one adapter that every token has.

    answers  {arm: [(caption, Generation)]}
    solved   [(Puzzle, Generation)]
    programs that the engine compiled
    """

    answers: dict[str, list[tuple[str, Any]]]
    solved: list[tuple[Puzzle, Any]]
    programs: int


def generate(base, adapters, writer: Writer, data, config) -> Generated:
    """Lets one engine answer all prompts together, whoever they are for.

    adapters  {modality: PEFT folder}
    """
    from molora_jax.adapters import AdapterBank
    from molora_jax.adapters.hot_set import HotSet
    from molora_jax.generation import Sampling
    from molora_jax.generation.engine import Engine
    from molora_jax.generation.profiles import Profile
    from molora_jax.generation.request import Request
    from molora_jax.routing import VocabularyRouter

    layout = writer.layout
    router = VocabularyRouter.from_ranges(layout.ranges(), vocab_size=layout.vocab_size)
    hot_set = HotSet(AdapterBank(base.config, num_slots=len(adapters), max_rank=config.rank))
    for name, folder in adapters.items():
        hot_set.add(folder, name=name)
    engine = Engine(
        base,
        hot_set,
        rows=config.engine_rows,
        context=config.seq_len + max(config.max_new_tokens, LONGEST_ANSWER),
        buckets=config.buckets,
        max_waiting=100_000,
        profiles={PROFILE: Profile(router=router, adapters=MODALITIES)},
    )
    sampling = Sampling(temperature=config.temperature, top_k=config.sample_top_k)
    # A letter of the alphabet is shown, and another one asked for: the first picture of a document
    # has nothing to be like, and seldom comes out whole.
    shown = {picture.alphabet: picture for picture in reversed(data.heldout_pictures)}

    def request(alphabet: str, look: str, seed: int, **who) -> Request:
        return Request(
            prompt=[*writer.picture(shown[alphabet]), *writer.encode(f"{alphabet}, {look}:")],
            max_tokens=config.max_new_tokens,
            sampling=sampling,
            seed=seed,
            ignore_eos=True,
            **who,
        )

    arms: dict[str, dict[str, str]] = {PROFILE: {"profile": PROFILE}, "base": {}}
    arms |= {name: {"adapter": name} for name in ("text", "picture")}
    asked: list[tuple[str, str, Any]] = []
    for arm, who in arms.items():
        looks = LOOKS if arm == PROFILE else LOOKS[:1]
        for _ in range(config.samples if arm == PROFILE else 1):
            for alphabet, look in itertools.product(sorted(shown), looks):
                asked_for = request(alphabet, look, len(asked), **who)
                asked.append((arm, f"{alphabet}, {look}:", engine.submit(asked_for)))
    found = puzzles(writer, data.heldout_tasks, config.puzzles, config.seq_len)
    solved = [
        (
            each,
            engine.submit(
                Request(
                    prompt=each.prompt,
                    max_tokens=LONGEST_ANSWER,
                    profile=PROFILE,
                    stop=[GRID[-1]],  # an added token is a part of the text
                )
            ),
        )
        for each in found
    ]
    engine.run()
    answers: dict[str, list[tuple[str, Any]]] = {arm: [] for arm in arms}
    for arm, text, generation in asked:
        answers[arm].append((text, generation))
    return Generated(answers, solved, engine.warm_up())


def columns_of(generation) -> np.ndarray:
    """Column of MODALITIES of every token that was read: by layer they agree, decided once."""
    column_of_slot = {slot: MODALITIES.index(name) for name, slot in generation.slots.items()}
    return np.array(
        [column_of_slot.get(int(slot), -1) for slot in generation.routing.adapter_ids[0, :, 0]]
    )


# Do they look like letters?


@dataclasses.dataclass(frozen=True)
class Likeness:
    """Of one set of pictures: mean share of ink, and mean distance in cells to the nearest letter.

    nearest  over the held-out letters;  copies  share that equals a training picture, None of those
    """

    ink: float
    nearest: float
    copies: float | None


def likeness(pictures: np.ndarray, heldout: np.ndarray, train: np.ndarray | None) -> Likeness:
    """pictures (n, 14, 14) bits against two sets of real ones; no `train` where they are of it."""
    flat, real = (each.reshape(len(each), -1) for each in (pictures, heldout))
    copies = None
    if train is not None:
        to_train = distances(flat, train.reshape(len(train), -1))
        copies = float((to_train == 0).any(axis=1).mean())
    return Likeness(
        ink=float(flat.mean()),
        nearest=float(distances(flat, real).min(axis=1).mean()),
        copies=copies,
    )


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n, m) cells that differ."""
    one, other = one.astype(np.int32), other.astype(np.int32)
    return one.sum(1)[:, None] + other.sum(1)[None] - 2 * one @ other.T


def shuffled(pictures: np.ndarray, seed: int) -> np.ndarray:
    """Noise with the ink of each picture: its cells in a random order."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(each.ravel()).reshape(each.shape) for each in pictures])
