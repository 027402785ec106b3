"""The same PEFT folder in peft and here, written on either side; several adapters in one batch."""

import numpy as np
import pytest

from molora_jax.adapters import Adapter, AdapterBank, load_adapter, save_adapter
from molora_jax.models.config import ModelConfig
from molora_jax.routing import SequenceRouter
from tests.parity.adapters import CASES, RANK, base_prompts, lora_values
from tests.parity.decoding import both_sides, our_logits, their_logits, their_model
from tests.parity.peft_models import peft_folder
from tests.parity.random_models import padded

pytestmark = [
    pytest.mark.parity,
    # Other people's packages, imported here alone.
    pytest.mark.filterwarnings("ignore"),
]
VISIBLE = 0.3  # the least that an adapter must change of the logits for a comparison to say much


def bank_of(decoder, *adapters) -> AdapterBank:
    """The adapters in the slots 0, 1, ... of three, so that every test shares one compilation."""
    bank = AdapterBank(decoder.config, num_slots=3, max_rank=RANK)
    for adapter in adapters:
        bank.load(adapter)
    return bank


def ours(base, adapters, columns):
    """Our logits with one column per prompt, for both sides of padding."""
    _, decoder, _ = base
    routed = {
        "adapters": bank_of(decoder, *adapters).stacks,
        "router": SequenceRouter(np.array([*columns, *columns], np.int32)),
        "column_to_slot": None,
    }
    return map(np.asarray, our_logits(decoder, *both_sides(base_prompts()), routed))


def theirs(base, *folders, names=None):
    """peft's logits with the first folder's adapter, or by `names` ("0", "1", ..., "__base__")."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(their_model(base[0]), folders[0], adapter_name="0").eval()
    for number, folder in enumerate(folders[1:], start=1):
        model.load_adapter(folder, adapter_name=str(number))
    return their_logits(model, base_prompts(), **({"adapter_names": names} if names else {}))


def compare(base, worst, group, ours, theirs):
    """Prompt logits, logits of all steps and greedy ids, for the prompts padded on both sides."""
    _, mask = padded(base_prompts(), "left")
    prompt, logits, ids = ours
    their_prompt, their_steps, their_ids = theirs
    B = len(mask)
    worst(group, prompt[:B][mask] - their_prompt[mask])
    for rows in (slice(None, B), slice(B, None)):
        worst(group, logits[:, rows] - their_steps)
        np.testing.assert_array_equal(ids[:, rows], their_ids)
    return np.abs(their_prompt - base[2]).max(axis=(1, 2), where=mask[:, :, None], initial=0.0)


def decoy(config: ModelConfig) -> Adapter:
    """Lies in a slot that no token is sent to."""
    sizes = config.projection_sizes()["v_proj"]
    pair = np.ones((RANK, sizes[0]), np.float32), np.ones((sizes[1], RANK), np.float32)
    return Adapter.from_arrays("decoy", {"layers.0.self_attn.v_proj": pair}, alpha=900)


@pytest.mark.parametrize("case", CASES)
def test_folder_of_peft_and_back(case, base, tmp_path, worst):
    folder, decoder, _ = base
    written = peft_folder(case, folder, tmp_path / "theirs")
    adapter, report = load_adapter(written, name="x", config=decoder.config)
    assert report.warnings == ()
    result = [*ours(base, [adapter, decoy(decoder.config)], [0, 0, 0])]
    changed = compare(base, worst, "adapters written by peft", result, theirs(base, written))
    assert changed.min() > VISIBLE
    # The folder as we write it says the same to peft: rank, scale, targets, dtype.
    again = save_adapter(adapter, tmp_path / "ours")
    compare(base, worst, "adapters written here", result, theirs(base, again))


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("ranks", ["one", "mixed"])
def test_folder_of_new_adapter_is_read_by_peft(ranks, use_rslora, base, tmp_path, worst):
    _, decoder, _ = base
    arrays = {}
    for layer in range(decoder.config.num_layers):
        for number, (name, (D, F)) in enumerate(decoder.config.projection_sizes().items()):
            if (layer + number) % 3 == 0 and ranks == "mixed":
                continue
            module = f"layers.{layer}.{'self_attn' if number < 4 else 'mlp'}.{name}"
            r = 4 if ranks == "one" else 1 + (layer + 2 * number) % RANK
            arrays[module] = tuple(
                lora_values(f"{module}.{matrix}", shape)
                for matrix, shape in (("A", (r, D)), ("B", (F, r)))
            )
    adapter = Adapter.from_arrays("new", arrays, alpha=7, use_rslora=use_rslora)
    written = save_adapter(adapter, tmp_path / "ours")
    result = ours(base, [adapter], [0, 0, 0])
    changed = compare(base, worst, "adapters written here", result, theirs(base, written))
    assert changed.min() > VISIBLE


def test_adapters_by_row_as_adapter_names_of_peft(base, tmp_path, worst):
    folder, decoder, _ = base
    folders = [
        peft_folder(case, folder, tmp_path / str(number), seed=number)
        for number, case in enumerate(("patterns by suffix", "subset 3"))
    ]
    adapters = [
        load_adapter(path, name=f"adapter{number}", config=decoder.config)[0]
        for number, path in enumerate(folders)
    ]
    for columns in ([0, -1, 1], [1, 0, 0]):
        names = ["__base__" if column < 0 else str(column) for column in columns]
        changed = compare(
            base, worst, "adapters by row",
            ours(base, adapters, columns), theirs(base, *folders, names=names),
        )  # fmt: skip
        assert all((changed > VISIBLE) == (np.array(columns) >= 0))
