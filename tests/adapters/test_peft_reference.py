"""What PEFT 0.21.2 wrote, read here, and the reverse: the updates are PEFT's own."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from molora_jax.adapters import Adapter, AdapterBank, load_adapter, save_adapter
from tests.adapters.make import BASE, arrays_for, bank_delta, dense_delta, make_adapter, modules_of

REFERENCE = Path(__file__).parent / "reference"
CASES = ("patterns", "rslora", "layers")


@pytest.mark.parametrize("case", CASES)
def test_reads_what_peft_wrote(tmp_path, case):
    adapter, report = load_adapter(REFERENCE / case, config=BASE)
    assert report.warnings == ()
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
@pytest.mark.parametrize("kind", ["one rank", "mixed ranks", "loaded"])
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
    else:
        adapter, _ = load_adapter(REFERENCE / ("rslora" if use_rslora else "patterns"))
    path = save_adapter(adapter, tmp_path / "out")
    model = peft.PeftModel.from_pretrained(small_base(), path)
    found = deltas(model)
    assert set(found) == set(adapter.modules)
    for module, pair in adapter.modules.items():
        np.testing.assert_allclose(
            found[module].numpy(), dense_delta(pair.a, pair.b, pair.scale), rtol=1e-5, atol=1e-5
        )
