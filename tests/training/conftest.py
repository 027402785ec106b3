"""A tiny base, two domains that differ, and an adapter trained on each: made once."""

import dataclasses

import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.models import load_base
from molora_jax.training import AdapterTrainConfig, Batch, pack, train_adapter

SETTINGS = AdapterTrainConfig(rank=4, alpha=8.0, steps=40, lr=1e-2, batch_size=4)


def chain(seed: int, first: int, length: int = 1500) -> list[int]:
    """A random walk over 24 bytes from `first` on, each followed by one of two: easy to learn."""
    rng = np.random.default_rng(seed)
    following = rng.integers(0, 24, size=(24, 2))
    state, walk = 0, []
    for choice in rng.integers(0, 2, size=length):
        walk.append(first + state)
        state = int(following[state, choice])
    return walk


@dataclasses.dataclass(frozen=True)
class Setup:
    base: object
    train: list[Batch]
    held_out: list[Batch]
    adapters: list
    records: list[list[dict]]
    bank: AdapterBank


@pytest.fixture(scope="session")
def tiny() -> Setup:
    base = load_base("tiny-random")
    windows = [
        pack([chain(seed, first)], seq_len=16, separator=None)
        for seed, first in enumerate((40, 150))
    ]
    train = [each.rows(slice(0, 70)) for each in windows]
    held_out = [each.rows(slice(70, 90)) for each in windows]
    trained = [
        train_adapter(base, each, SETTINGS, name=name)
        for name, each in zip(("low", "high"), train, strict=True)
    ]
    bank = AdapterBank(base.config, num_slots=3, max_rank=5)
    for adapter, _ in trained:
        bank.load(adapter)
    return Setup(
        base=base,
        train=train,
        held_out=held_out,
        adapters=[adapter for adapter, _ in trained],
        records=[records for _, records in trained],
        bank=bank,
    )
