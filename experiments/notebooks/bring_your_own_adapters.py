# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # I have PEFT adapters. What does it take to route them?
#
# A PEFT folder holds `adapter_config.json` and `adapter_model.safetensors`. Set `MOLORA_ADAPTERS`
# to some, separated by `:`, and `MOLORA_BASE` to the base they were trained on. Without them two
# folders are made here from random weights: enough to try every step, though not to get sense out
# of it.

# %%
import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import molora_jax as mj

SCALE = os.environ.get("MOLORA_SCALE", "cpu")
OUT = Path(os.environ.get("MOLORA_OUT", "out/notebooks"))
BASE = os.environ.get("MOLORA_BASE") or {"tiny": "tiny-random", "cpu": "smollm2-135m"}[SCALE]
NEW_TOKENS = {"tiny": 8, "cpu": 24}[SCALE]

base = mj.load_base(BASE)
base

# %% [markdown]
# ## The folder
#
# This is all that PEFT's `save_pretrained` writes that matters: A (r, in) and B (out, r) of each
# module, and a config that says rank, alpha and targets.


# %%
def random_folder(name, seed, rank=4, targets=("q_proj", "v_proj")):
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(base.config.num_layers):
        for target in targets:
            width_in, width_out = base.config.projection_sizes()[target]
            key = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            a = draw.normal(size=(rank, width_in)) / np.sqrt(width_in)
            b = draw.normal(size=(width_out, rank)) * 0.1
            tensors[f"{key}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = b.astype(np.float32)
    folder = OUT / "adapters" / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": BASE,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder


given = os.environ.get("MOLORA_ADAPTERS", "")
folders = [Path(each) for each in given.split(":") if each] or [
    random_folder("first", 1),
    random_folder("second", 2, rank=2),
]

# %% [markdown]
# ## Load and inspect
#
# The report says what was matched, with which rank and scale, and what was passed over. What would
# change the result and is not supported is refused by name.

# %%
adapters, reports = zip(
    *(mj.load_adapter(folder, config=base.config) for folder in folders), strict=True
)
reports[0]

# %% [markdown]
# ## Probe: does it do anything?
#
# The text is read with and without each adapter. An adapter that changes nothing was trained on
# another base, or not at all.

# %%
TEXT = "Question: Tom has 3 boxes of 12 pens. How many pens?\nAnswer:"
probed = {adapter.name: mj.probe(base, adapter, TEXT) for adapter in adapters}
keys = ("max_logit_change", "mean_kl", "top1_changed", "nll", "nll_adapter")
mj.display.Table(
    ["adapter", *keys],
    [[name, *(found[key] for key in keys)] for name, found in probed.items()],
    title="With each adapter, beside the base",
)

# %% [markdown]
# ## Route
#
# The router "arrow" is made from the adapters' weights alone, so it works for folders that came
# with nothing else. With some text of each adapter, `train_router`, or `gather_statistics` and
# `router="statistics"`, route better.

# %%
composition = mj.compose(base, adapters, router="arrow", top_k=1)
composition

# %%
prompt = base.tokenizer.encode(TEXT)
asked = {"max_new_tokens": NEW_TOKENS, "stop_ids": base.tokenizer.eos_ids}
(answer,) = mj.generate(base.decoder, [prompt], **asked, **composition.routed)
print(base.tokenizer.decode(answer.tokens))
answer.routing

# %% [markdown]
# ## Save
#
# The folder holds a plain PEFT folder for each adapter, the router, and a record of the base they
# belong to. `Composition.load` gives back the same numbers; the command line and the server take
# the folder too.

# %%
saved = composition.save(OUT / "my_composition", overwrite=True)
again = mj.Composition.load(saved, base)
(same,) = mj.generate(base.decoder, [prompt], **asked, **again.routed)
assert same.tokens == answer.tokens
print("\n".join(sorted(str(each.relative_to(saved)) for each in saved.rglob("*.*"))))

# %% [markdown]
# ## The answer, token by token
#
# Colours are adapters, layer by layer.

# %%
pieces = base.tokenizer.pieces(prompt + answer.tokens)
figure = mj.display.choice_figure(
    {"arrow": answer.routing.adapter_ids[..., 0]},
    pieces,
    adapter_names=[each.name for each in composition.bank.list()],
)
figure
