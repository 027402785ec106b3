"""Adapters for the tiny random base, and the tools called in this process."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from molora_jax.adapters import PROJECTIONS, Adapter, save_adapter
from molora_jax.models import load_base
from molora_jax.tools.__main__ import main
from tests.adapters.make import arrays_for, modules_of

BASE = "tiny-random"


@pytest.fixture(scope="session")
def base():
    return load_base(BASE)


def make(base, name, *, projections=PROJECTIONS, rank=4, seed=0, zero=False, **settings) -> Adapter:
    """Random, of a size that moves logits without drowning the base."""
    arrays = {
        module: (a * 0.1, b * (0.0 if zero else 0.1))
        for module, (a, b) in arrays_for(
            modules_of(base.config, projections), rank, seed=seed, config=base.config
        ).items()
    }
    settings = {"alpha": 8, "base_name": "org/tiny-random"} | settings
    return Adapter.from_arrays(name, arrays, num_layers=base.config.num_layers, **settings)


@pytest.fixture(scope="session")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    """PEFT folders: `a` on all projections, `b` on two with rsLoRA, `zero` with every B zero."""
    root = tmp_path_factory.mktemp("adapters")
    made = [
        make(base, "a", seed=1),
        make(base, "b", projections=("q_proj", "v_proj"), rank=3, seed=2, use_rslora=True),
        make(base, "zero", projections=("q_proj",), seed=3, zero=True),
    ]
    return {each.name: save_adapter(each, root / each.name) for each in made}


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def tool(capsys):
    """Calls a verb: `tool("inspect", folder, "--json")`."""

    def call(*argv) -> Result:
        capsys.readouterr()
        code = main([str(each) for each in argv])
        found = capsys.readouterr()
        result = Result(code, found.out, found.err)
        if code:  # one line behind the warnings, never a trace; of `inspect` the report says it
            lines = result.err.splitlines()
            said = [each for each in lines if not each.startswith("warning: ")]
            assert len(said) == 1 or (not said and "loads" in result.out), result.err
            assert lines[-1:] == said
        return result

    return call


@jax.jit
def _forward(decoder, tokens, routed):
    return decoder.logits(decoder(tokens, strategy="reference", **routed).hidden)


def logits(base, tokens, **routed):
    """(B, S, V) float32 on the host."""
    return np.asarray(_forward(base.decoder, np.asarray(tokens, np.int32), routed))
