"""Logits and greedy tokens of peft 0.21.2 with the adapters that it wrote, from stored numbers.

tests/parity/make_reference.py stored them, with peft's own adapter_config.json of each case; the
weights are drawn here again. Live against peft, and in both directions: tests/parity.
"""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank, load_adapter
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.routing import SequenceRouter
from tests.adapters.make import peft_tensors, write_peft
from tests.parity.adapters import BASES, CASES, RANK, base_model, base_prompts, lora_values
from tests.parity.compare import check_numbers, greedy_batch

REFERENCE = Path(__file__).parents[1] / "parity" / "reference" / "adapters.json"
STORED = json.loads(REFERENCE.read_text("utf-8"))["cases"]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(scope="module", params=BASES)
def base(request):
    settings, arrays = base_model(request.param)
    return request.param, Decoder(ModelConfig.from_hf(settings), arrays)


@jax.jit
def logits_of(decoder, tokens, mask, stacks, router):
    return decoder.logits(decoder(tokens, mask, adapters=stacks, router=router).hidden)


@pytest.mark.parametrize("case", CASES)
def test_adapter_gives_the_logits_of_peft(case, base, tmp_path):
    name, decoder = base
    stored, expected = STORED[case], STORED[case]["bases"][name]
    sizes = decoder.config.projection_sizes()
    arrays = {}
    for module, r in stored["modules"].items():
        D, F = sizes[module.rpartition(".")[2]]
        arrays[module] = tuple(
            lora_values(f"{module}.{matrix}", shape).astype(DTYPES.get(case, np.float32))
            for matrix, shape in (("A", (r, D)), ("B", (F, r)))
        )
    config = {key: value for key, value in stored["config"].items() if key != "peft_type"}
    folder = write_peft(tmp_path, peft_tensors(arrays), **config)
    adapter, report = load_adapter(folder, name="x", config=decoder.config)
    assert report.warnings == ()
    bank = AdapterBank(decoder.config, num_slots=2, max_rank=RANK)
    bank.load(adapter, slot=1)
    tokens, mask = greedy_batch(base_prompts(), expected)
    with_adapter, without = (
        np.asarray(logits_of(decoder, tokens, mask, bank.stacks, SequenceRouter(rows)))
        for rows in (np.array([1, 1, 1], np.int32), np.array([-1, -1, -1], np.int32))
    )
    check_numbers(with_adapter, tokens, mask, expected)
    assert np.abs(with_adapter - without)[mask].max() > 0.3
