"""Random models against transformers: prefill, padding on either side, 32 decode steps."""

import numpy as np
import pytest

from tests.parity.decoding import both_sides, our_decoder, our_logits, their_logits, their_model
from tests.parity.random_models import NUM_MODELS, random_model, random_prompts
from tests.parity.small_models import hf_tensors, write_folder

pytestmark = [
    pytest.mark.parity,
    # Other people's packages, imported here alone.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("index", range(NUM_MODELS))
def test_random_model(index, tmp_path, worst):
    settings, arrays = random_model(index)
    prompts = random_prompts(index)
    folder = write_folder(tmp_path, settings, hf_tensors(arrays))
    model = their_model(folder)
    tokens, mask = both_sides(prompts)
    prompt, logits, ids = map(
        np.asarray, our_logits(our_decoder(settings, folder), tokens, mask, {})
    )
    their_prompt, their_steps, their_ids = their_logits(model, prompts)
    right, _, _ = their_logits(model, prompts, side="right")
    B = len(prompts)
    assert 5 < np.abs(their_prompt).max() < 50
    # The rows padded on the right continue as the same rows padded on the left do.
    for rows, expected in ((slice(None, B), their_prompt), (slice(B, None), right)):
        worst("random models", prompt[rows][mask[rows]] - expected[mask[rows]])
        worst("random models", logits[:, rows] - their_steps)
        np.testing.assert_array_equal(ids[:, rows], their_ids)
