"""What peft makes of the cases of adapters.py: folders that it saved."""

from pathlib import Path

from tests.parity.adapters import CASES, lora_values
from tests.parity.decoding import their_model


def module_of(name: str) -> str:
    """`layers.0.mlp.up_proj.A` of a parameter's name in peft."""
    name = name.removeprefix("base_model.model.model.")
    module, _, matrix = name.partition(".lora_")
    return f"{module}.{matrix[0]}"


def peft_folder(case: str, base: Path, path: Path, *, seed: int = 0, **changes) -> Path:
    """Saves the adapter of a case, with the weights that `lora_values` names, as peft does."""
    import torch
    from peft import LoraConfig, get_peft_model

    settings = CASES[case] | {"task_type": "CAUSAL_LM"} | changes
    model = get_peft_model(their_model(base), LoraConfig(**settings))
    dtype = getattr(torch, case if case in ("bfloat16", "float16") else "float32")
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            values = lora_values(module_of(name), tuple(parameter.shape), seed=seed)
            parameter.data = torch.from_numpy(values).to(dtype)
    model.save_pretrained(path)
    return path
