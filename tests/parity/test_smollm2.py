"""SmolLM2's GGUF file as transformers reads it, and as we do: logits, greedy tokens, token ids.

transformers 5.24 makes a tokenizer of a GGUF file without the split into single digits that the
file asks for (tokenizer.ggml.pre = "smollm"). It does not matter for 0-9, since no merge of this
vocabulary joins them to anything; other digits (٣, ²) behind a space come out differently, and
there the ids are not compared: ours follow the file. The logits are compared on our ids.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [
    pytest.mark.parity,
    pytest.mark.model,
    # Other people's packages, imported here alone.
    pytest.mark.filterwarnings("ignore"),
]
# Logits reach 37 here, behind 30 layers. Either side is up to 1.4e-4 from what transformers gives
# in float64; how far they are apart depends on the processor (1.1e-4 on one, 2.3e-4 on another).
TOLERANCE = 4e-4
TEXTS = (
    "In 1969 three people flew 384400 km to the moon; 3.14159 and 1,000,000 are numbers, too.",
    "<|im_start|>user\nWhat's 17*3?<|im_end|>\n<|im_start|>assistant\n",
    "  def f(x):\n\n\treturn x  # Grüße, ça va? Ελληνικά, 日本語 🙂, don't I'LL we've\n",
)


@pytest.fixture(scope="module")
def theirs():
    """transformers' model, dequantised to float32, and its tokenizer, from the one file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from molora_jax.models.smollm2 import fetch_smollm2

    path = fetch_smollm2()
    options = {"gguf_file": path.name}
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **options)


def test_logits_and_greedy_tokens_on_our_ids(smollm2, theirs, worst):
    import torch

    model, _ = theirs
    prompt = torch.tensor([smollm2.tokenizer.encode(TEXTS[1])])
    options = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        answered = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    rng = np.random.default_rng(0)
    rows = [
        answered[0].tolist(),
        *(smollm2.tokenizer.encode(text) for text in TEXTS),
        rng.integers(0, smollm2.config.vocab_size, 50).tolist(),
    ]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, ids in enumerate(rows):
        tokens[row, -len(ids) :], mask[row, -len(ids) :] = ids, True
    decode = jax.jit(lambda decoder, *batch: decoder.logits(decoder(*batch).hidden))
    ours = np.asarray(decode(smollm2.decoder, jnp.asarray(tokens), jnp.asarray(mask)))
    for row, ids in enumerate(rows):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].numpy()
        worst("SmolLM2 from GGUF", ours[row][mask[row]] - expected, tolerance=TOLERANCE)
    # Each token of a greedy answer is the best behind those before it: one pass says the same as
    # 32 steps, and compiles in a fraction of the time. Steps are compared in test_random_models.py.
    best = ours[0][mask[0]].argmax(-1)
    length = prompt.shape[1]
    assert best[length - 1 : -1].tolist() == rows[0][length:]


def test_token_ids_where_both_split_alike(smollm2, theirs):
    _, tokenizer = theirs
    for text in TEXTS:
        assert smollm2.tokenizer.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    # What the docstring says of transformers, so that a version which splits digits is noticed.
    assert "Digits" not in str(tokenizer.backend_tokenizer.pre_tokenizer)
    ours, other = smollm2.tokenizer.encode(" ²"), tokenizer(" ²").input_ids
    assert ours != other
    assert smollm2.tokenizer.decode(ours) == tokenizer.decode(other) == " ²"
