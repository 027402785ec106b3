"""Our numbers against transformers': small models of every family, SmolLM2 on our sentences."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.models import load_base
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.models.tiny import tiny_tokenizer
from tests.parity.compare import check_numbers, greedy_batch
from tests.parity.random_models import NUM_MODELS, SLOTS, random_model, random_prompts
from tests.parity.small_models import (
    SMALL_MODELS,
    hf_tensors,
    small_model,
    small_tokens,
    write_folder,
)

REFERENCE = Path(__file__).parents[1] / "parity" / "reference"
SMALL = json.loads((REFERENCE / "small_models.json").read_text("utf-8"))
RANDOM = json.loads((REFERENCE / "random_models.json").read_text("utf-8"))["models"]
SMOLLM2 = json.loads((REFERENCE / "smollm2.json").read_text("utf-8"))


@jax.jit
def logits_of(decoder, tokens, mask=None):
    return decoder.logits(decoder(tokens, mask).hidden)


def nll_of(logits, ids):
    logp = np.asarray(jax.nn.log_softmax(logits[:-1], axis=-1))
    return -logp[np.arange(len(ids) - 1), ids[1:]]


def padded(ids: list[int], size: int) -> jnp.ndarray:
    """Behind the text, where a causal model does not see it: one compilation for all texts."""
    return jnp.asarray([ids + [0] * (size - len(ids))], jnp.int32)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_small_model_agrees_with_transformers(name, tmp_path):
    settings, arrays = small_model(name)
    expected = SMALL[name]
    total = sum(np.abs(array).sum(dtype=np.float64) for array in arrays.values())
    assert total == pytest.approx(expected["weights_sum"], rel=1e-9), "other random weights"
    write_folder(tmp_path, settings, hf_tensors(arrays))
    tiny_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    base = load_base(str(tmp_path))
    tokens = small_tokens()
    logits = logits_of(base.decoder, tokens)
    for row in range(len(tokens)):
        nll = nll_of(logits[row], tokens[row])
        np.testing.assert_allclose(nll, expected["nll"][row], atol=5e-5)
        np.testing.assert_allclose(logits[row, -1], expected["last_logits"][row], atol=5e-5)


# The first of each family and scaling; a compilation for each is what they cost.
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=[] if index < len(SLOTS) else pytest.mark.long)
        for index in range(NUM_MODELS)
    ],
)
def test_random_model_agrees_with_transformers(index):
    settings, arrays = random_model(index)
    expected = RANDOM[str(index)]
    total = sum(np.abs(array).sum(dtype=np.float64) for array in arrays.values())
    assert total == pytest.approx(expected["weights_sum"], rel=1e-9), "other random weights"
    decoder = Decoder(ModelConfig.from_hf(settings), arrays)
    tokens, mask = greedy_batch(random_prompts(index), expected)
    check_numbers(np.asarray(logits_of(decoder, tokens, mask)), tokens, mask, expected)


@pytest.mark.model
def test_smollm2_on_our_sentences(smollm2):
    size = max(len(case["ids"]) for case in SMOLLM2["cases"])
    for case in SMOLLM2["cases"]:
        ids = smollm2.tokenizer.encode(case["text"])
        assert ids == case["ids"]
        logits = logits_of(smollm2.decoder, padded(ids, size))[0, : len(ids)]
        np.testing.assert_allclose(nll_of(logits, ids), case["nll"], atol=5e-4)
        assert int(logits[-1].argmax()) == case["last_argmax_id"]


@pytest.mark.model
def test_smollm2_chat_template(smollm2):
    messages = SMOLLM2["messages"]
    text = smollm2.tokenizer.render_chat(messages, add_generation_prompt=True)
    assert text == SMOLLM2["chat"]
    ids = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == SMOLLM2["cases"][-1]["ids"]


@pytest.mark.model
def test_smollm2_golden_numbers(smollm2, molora_data):
    golden = json.loads((molora_data / "smollm2_reference" / "golden.json").read_text("utf-8"))
    size = max(len(case["token_ids"]) for case in golden["cases"])
    for case in golden["cases"]:
        ids = smollm2.tokenizer.encode(case["text"])
        assert ids == case["token_ids"], case["name"]
        logits = logits_of(smollm2.decoder, padded(ids, size))[0, : len(ids)]
        nll = nll_of(logits, ids)
        assert nll.mean() == pytest.approx(case["mean_nll"], abs=5e-4), case["name"]
        np.testing.assert_allclose(nll, case["nll"], atol=1e-3)
    for prompt in golden["prompts"]:
        ids = smollm2.tokenizer.encode(prompt["prompt"])
        assert ids == prompt["prompt_ids"], prompt["name"]
        # One pass over prompt and answer: each token of a greedy answer is the best behind those
        # before it, so equal ids here are equal ids step by step.
        answer = prompt["greedy_24_ids"]
        logits = logits_of(smollm2.decoder, padded(ids + answer, size))[0]
        best = np.asarray(logits.argmax(-1))
        assert best[len(ids) - 1 :][: len(answer)].tolist() == answer, prompt["name"]
