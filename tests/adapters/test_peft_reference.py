"""What PEFT 0.21.2 wrote, read here, and the reverse: the updates are PEFT's own."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from molora_jax.adapters import Adapter, AdapterBank, LoraPair, load_adapter, save_adapter
from tests.adapters.make import BASE, arrays_for, bank_delta, dense_delta, make_adapter, modules_of

REFERENCE = Path(__file__).parent / "reference"
CASES = ("patterns", "rslora", "layers", "bare")


@pytest.mark.parametrize("case", CASES)
def test_reads_what_peft_wrote(tmp_path, case):
    adapter, report = load_adapter(REFERENCE / case, config=BASE)
    assert report.warnings == ()
    bare = "made for the decoder without its output layer (base_model.model.layers)"
    assert (bare in report.notes) == (case == "bare")
    expected = load_file(REFERENCE / case / "deltas.safetensors")
    assert set(adapter.modules) == set(expected)
    bank = AdapterBank(BASE, num_slots=2, max_rank=6)
    bank.load(adapter, slot=1)
    again, _ = load_adapter(save_adapter(adapter, tmp_path / case), config=BASE)
    for module, delta in expected.items():
        for found in (adapter, again):
            pair = found.modules[module]
            ours = dense_delta(pair.a, pair.b, pair.scale)
            np.testing.assert_allclose(ours, delta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(bank_delta(bank, 1, module), delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parity
# This PEFT still asks this transformers by the name it had before.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("kind", ["one rank", "mixed ranks", "mixed scales", "loaded", "bare"])
def test_peft_reads_what_is_written_here(tmp_path, kind, use_rslora):
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from tests.adapters.make_peft_reference import deltas, small_base

    if kind == "one rank":
        adapter = make_adapter(use_rslora=use_rslora)
    elif kind == "mixed ranks":
        modules = modules_of()[::2]
        ranks = {module: 1 + number % 4 for number, module in enumerate(modules)}
        arrays = arrays_for(modules, ranks)
        adapter = Adapter.from_arrays("x", arrays, alpha=5, use_rslora=use_rslora)
    elif kind == "mixed scales":
        # With the config of other targets and scales, so that saving has to make its own.
        made = make_adapter(use_rslora=use_rslora)
        pairs = {
            module: LoraPair(pair.a, pair.b, (0.3, 2 / 3, 5.0)[number % 3])
            for number, (module, pair) in enumerate([*made.modules.items()][3:])
        }
        adapter = Adapter("x", pairs, made.config)
    elif kind == "bare":
        adapter, _ = load_adapter(REFERENCE / "bare")
    else:
        adapter, _ = load_adapter(REFERENCE / ("rslora" if use_rslora else "patterns"))
    path = save_adapter(adapter, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT's words for keys that are missing or too many
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = peft.PeftModel.from_pretrained(small_base(), path)
    found = deltas(model)
    assert set(found) == set(adapter.modules)
    for module, pair in adapter.modules.items():
        layer = model.get_submodule(f"base_model.model.model.{module}")
        assert layer.scaling["default"] == pair.scale
        np.testing.assert_allclose(
            found[module].numpy(), dense_delta(pair.a, pair.b, pair.scale), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_saved_by_hand_is_read_as_peft_has_it(tmp_path, case):
    """Trainers that save `state_dict` themselves leave the adapter's name in the keys."""
    pytest.importorskip("peft")
    from safetensors.torch import save_file

    from tests.adapters.make_peft_reference import CASES as SETTINGS
    from tests.adapters.make_peft_reference import deltas, lora_model

    model = lora_model(SETTINGS[case])
    model.peft_config["default"].save_pretrained(tmp_path)
    lora = {k: v.contiguous() for k, v in model.state_dict().items() if "lora_" in k}
    assert all(".default.weight" in key for key in lora)
    save_file(lora, tmp_path / "adapter_model.safetensors")
    adapter, _ = load_adapter(tmp_path, config=BASE)
    expected = deltas(model)
    assert set(adapter.modules) == set(expected)
    for module, pair in adapter.modules.items():
        np.testing.assert_allclose(
            dense_delta(pair.a, pair.b, pair.scale), expected[module].numpy(), rtol=1e-5, atol=1e-5
        )
