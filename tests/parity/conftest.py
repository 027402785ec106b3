"""What the parity tests share: differences asserted and remembered, the bases of adapters."""

import numpy as np
import pytest

TOLERANCE = 2e-4


@pytest.fixture
def worst(request):
    """`worst(group, difference)`: fails above 2e-4, and remembers the largest of each group."""

    def record(group: str, difference, *, tolerance: float = TOLERANCE) -> None:
        largest = float(np.abs(np.asarray(difference)).max())
        assert largest <= tolerance, f"{group}: |Δ| {largest:.3g} above {tolerance}"
        # With the report, since tests run in several processes; tests/conftest.py prints them.
        request.node.user_properties.append((f"parity {group}", largest))

    return record


@pytest.fixture(scope="session", params=("llama", "qwen3"))
def base(request, tmp_path_factory):
    """Folder, our decoder, and transformers' own prompt logits without an adapter."""
    # Here and not above: the package must not be imported before its shape checks are set up.
    from tests.parity.adapters import base_model, base_prompts
    from tests.parity.decoding import our_decoder, their_logits, their_model
    from tests.parity.small_models import hf_tensors, write_folder

    settings, arrays = base_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    write_folder(folder, settings, hf_tensors(arrays))
    plain, _, _ = their_logits(their_model(folder), base_prompts())
    return folder, our_decoder(settings, folder), plain
