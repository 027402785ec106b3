"""What `table8` measured, as numbers, claims and a report."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.interleaved_data import CODES, GRID, PICTURE, Layout, to_bits
from experiments.interleaved_figures import whole_pictures
from experiments.interleaved_generation import (
    PROFILE,
    Found,
    Generated,
    Likeness,
    grids_in,
    likeness,
    pictures_in,
    shuffled,
)
from experiments.interleaved_sources import Data
from experiments.interleaved_timing import ARMS
from experiments.kernel_timing import device, milliseconds, ratio_claim, time_claim
from experiments.run_folder import Claim, markdown
from pallas_kernels.bench import Times


def introduction(config: Any, data: Data) -> str:
    return (
        "# Text, pictures and grids in one pass\n\n"
        f"Base {config.base}, frozen, with {len(PICTURE) + len(GRID)} added vocabulary rows, which "
        f"were trained alone for {config.row_steps} steps and are then frozen too. An adapter of "
        f"rank {config.rank} for each modality, trained on the loss of its own tokens; a token's "
        "id says whose it is. What an adapter's token is followed by, it foretells: a picture's "
        f"begin is the text's, what follows its end is the picture's. Data: {data.source}.\n\n"
    )


def example(generated: Generated) -> str:
    """The first answer as a client reads it: an added token is a part of the text."""
    prompt, generation = generated.answers[PROFILE][0]
    return f"\nThe first answer as text:\n\n```text\n{prompt}{generation.text.strip()}\n```\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """Numbers of what was generated.

    found     pictures of each arm's answers
    like      by name: generated, real (training letters against held-out ones), noise
    ink       of generated first pictures by the look that the prompt asked for
    puzzles   begun, whole, right_size, cells (share right where the size is), solved
    """

    found: Mapping[str, Found]
    like: Mapping[str, Likeness]
    ink: Mapping[str, float]
    puzzles: Mapping[str, float]
    programs: int

    @classmethod
    def of(cls, generated: Generated, data: Data, layout: Layout) -> "Seen":
        found = {}
        for arm, answers in generated.answers.items():
            total = Found()
            for _, generation in answers:
                here = pictures_in(generation.tokens, layout)
                total.pictures += here.pictures
                total.malformed += here.malformed
                total.cut += here.cut
            found[arm] = total
        heldout = np.stack([to_bits(each.codes) for each in data.heldout_pictures])
        train = np.stack([to_bits(each.codes) for each in data.train_pictures])
        some = train[np.random.default_rng(0).permutation(len(train))[:100]]
        sets = {"real": (some, None), "noise": (shuffled(some, 0), train)}
        if drawn := [bits for each in whole_pictures(generated, layout).values() for bits in each]:
            sets = {"generated": (np.stack(drawn), train), **sets}
        return cls(
            found=found,
            like={name: likeness(one, heldout, seen) for name, (one, seen) in sets.items()},
            ink=_ink(generated, layout),
            puzzles=_puzzles(generated, layout),
            programs=generated.programs,
        )

    def metrics(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for arm, found in self.found.items():
            numbers |= {
                f"pictures.{arm}.begun": found.begun,
                f"pictures.{arm}.whole": len(found.pictures),
                f"pictures.{arm}.malformed": found.malformed,
                f"pictures.{arm}.cut": found.cut,
            }
        for name, like in self.like.items():
            numbers |= {f"like.{name}.{k}": v for k, v in dataclasses.asdict(like).items()}
        numbers |= {f"ink.{look.replace(' ', '_')}": ink for look, ink in self.ink.items()}
        return numbers | {f"puzzles.{name}": value for name, value in self.puzzles.items()}

    def markdown(self) -> str:
        rows = [
            [arm, f"{f.begun}", f"{len(f.pictures)}", f"{f.malformed}", f"{f.cut}"]
            for arm, f in self.found.items()
        ]
        likes = [
            [
                name,
                f"{like.ink:.3f}",
                f"{like.nearest:.1f}",
                "–" if like.copies is None else f"{like.copies:.0%}",
            ]
            for name, like in self.like.items()
        ]
        p = self.puzzles
        return (
            "## Generated\n\n"
            + markdown(["adapters", "pictures begun", "whole", "malformed", "cut short"], rows)
            + f"\nWhole: {CODES} codes in seven marked rows and nothing else; others are counted "
            "and not drawn. Cut short: the answer's length ended in the picture.\n\n"
            + markdown(["pictures", "share of ink", "cells to the nearest", "copies"], likes)
            + "\nNearest: of the held-out letters, of 196 cells. Real: training letters. Noise: "
            "the same ink in random cells. Copies: equal to a training picture."
            + "".join(f" Prompts for {look}: ink {ink:.3f}." for look, ink in self.ink.items())
            + f"\n\nPuzzles: {p['asked']:.0f} asked, {p['whole']:.0f} answered by a whole grid, "
            f"{p['right_size']:.0f} of the right size, {p['cells']:.0%} of whose cells are right; "
            f"{p['solved']:.0f} solved. The engine compiled {self.programs} programs, all of them "
            "before the first request.\n\n![letters](sheet.png)\n![adapter of every token]"
            "(strip.png)\n![puzzles](puzzles.png)\n"
        )


def _ink(generated: Generated, layout: Layout) -> dict[str, float]:
    """Mean share of ink of the first pictures, by the look asked for."""
    by_look: dict[str, list[float]] = {}
    for text, generation in generated.answers[PROFILE]:
        look = text.split(", ")[1].rstrip(":")
        pictures = pictures_in(generation.tokens, layout).pictures
        by_look.setdefault(look, [])
        by_look[look] += [float(each.mean()) for each in pictures[:1]]
    return {look: float(np.mean(ink)) for look, ink in by_look.items() if ink}


def _puzzles(generated: Generated, layout: Layout) -> dict[str, float]:
    whole = right_size = solved = 0
    cells: list[float] = []
    for puzzle, generation in generated.solved:
        answer = next(iter(grids_in(generation.tokens, layout)), None)
        whole += answer is not None
        if answer is not None and np.shape(answer) == np.shape(puzzle.wanted):
            right_size += 1
            right = np.array(answer) == np.array(puzzle.wanted)
            cells.append(float(right.mean()))
            solved += bool(right.all())
    return {
        "asked": len(generated.solved),
        "whole": whole,
        "right_size": right_size,
        "cells": float(np.mean(cells)) if cells else 0.0,
        "solved": solved,
    }


def timing_metrics(times: Times) -> dict[str, float]:
    return {
        "decode.full_passes_over_per_token": times.ratio("full_passes", over="per_token"),
        "decode.per_row_bgmv_over_per_token": times.ratio("per_row_bgmv", over="per_token"),
        "decode.per_token_over_base": times.ratio("per_token", over="base"),
        **{f"decode.{name}_ms": 1e3 * times.median(name) for name in ARMS},
    }


def timing_claims(times: Times, *, where: str) -> list[Claim]:
    where = f"{device()}, {where}"
    speedup = ratio_claim(
        "table8.per_token_speedup",
        where=where,
        paper=1.65,
        ours=times.ratio("full_passes", over="per_token"),
        direction="higher",
        note="K = 2 full passes over one; kernels with an adapter a row need one pass as well",
    )
    of_arms = {"per_sequence": ("full_passes", 5.18), "per_token": ("per_token", 3.14)}
    return [
        speedup,
        *(
            time_claim(f"table8.{name}", where=where, paper_ms=ms, seconds=times.median(arm))
            for name, (arm, ms) in of_arms.items()
        ),
    ]


def timing_markdown(times: Times, *, where: str, repeats: int) -> str:
    rows = [
        [name, milliseconds(times, name), f"{times.ratio(name, over='per_token'):.2f}", text]
        for name, text in ARMS.items()
    ]
    return (
        f"## Time of a decode step\n\n{where}. Median (10th to 90th percentile) of {repeats} "
        "turns, in which all arms run one after another; ratios are medians of ratios within a "
        "turn. A step gives every row one token, half of them text and half pictures.\n\n"
        + markdown(["arm", "ms", "over per token", "what it is"], rows)
    )
