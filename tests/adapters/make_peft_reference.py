"""Makes tests/adapters/reference: adapters as PEFT itself trains, scales and saves them.

    python -m tests.adapters.make_peft_reference

from the project's folder, in an environment with tests/parity/requirements.txt. Each case is a PEFT
folder and, beside it, deltas.safetensors: the update ΔW of each module as PEFT merges it.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

REFERENCE = Path(__file__).parent / "reference"
CASES = {
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2, "^model.layers.1.self_attn.v_proj": 5},
        "alpha_pattern": {r"layers\.[02]\.self_attn\.q_proj": 12},
        "lora_dropout": 0.1,
    },
    "rslora": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": "all-linear",
        "exclude_modules": r".*\.(k_proj|gate_proj)",
        "layers_to_transform": None,
    },
    "layers": {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["o_proj", "up_proj"],
        "layers_to_transform": [0, 2],
        "task_type": "CAUSAL_LM",
    },
    # Of the decoder without its output layer: no `model.` in the names, so an anchor means others.
    "bare": {
        "r": 2,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"^layers.1.self_attn.q_proj": 4},
        "alpha_pattern": {"^layers.0.mlp.up_proj": 10, r"layers\.2\.mlp\..*": 3},
        "task_type": "FEATURE_EXTRACTION",
    },
}


def small_base(*, bare=False):
    """The model whose sizes are BASE of tests/adapters/make.py, or the decoder inside it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=19, hidden_size=10, intermediate_size=7, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=6, tie_word_embeddings=False,
        )
    )  # fmt: skip
    return model.model if bare else model


def lora_model(settings):
    """A PEFT model whose A and B are both random."""
    bare = settings.get("task_type") == "FEATURE_EXTRACTION"
    model = get_peft_model(small_base(bare=bare), LoraConfig(**settings))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    return model


def deltas(model):
    """{"layers.0.self_attn.q_proj": ΔW (F, D)} of a PEFT model."""
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}
    return {
        name[name.index("layers.") :]: module.get_delta_weight("default").detach()
        for name, module in modules.items()
    }


if __name__ == "__main__":
    for case, settings in CASES.items():
        model = lora_model(settings)
        with tempfile.TemporaryDirectory() as temporary:
            model.save_pretrained(temporary)
            folder = REFERENCE / case
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (folder / name).write_bytes((Path(temporary) / name).read_bytes())
        save_file(
            {k: v.contiguous() for k, v in deltas(model).items()}, folder / "deltas.safetensors"
        )
