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
# # Four adapters, one router: who gets which token?
#
# Four LoRA adapters are trained apart, each on its own kind of text. They are loaded into one
# bank, and a router is fitted while base and adapters stay frozen. Then held-out text says what
# the router is worth, and where it sends each kind of text.
#
# `MOLORA_SCALE=tiny` runs the same on random weights in seconds; its numbers mean nothing.

# %%
import os
from pathlib import Path

import numpy as np

import molora_jax as mj
from experiments import load_domains

SCALE = os.environ.get("MOLORA_SCALE", "cpu")
OUT = Path(os.environ.get("MOLORA_OUT", "out/notebooks"))
BASE, RANK, ROWS, LENGTH, STEPS = {
    "tiny": ("tiny-random", 2, 12, 32, 2),
    "cpu": ("smollm2-135m", 8, 48, 128, 16),
}[SCALE]

# %%
base = mj.load_base(BASE)
base

# %% [markdown]
# ## Text of four kinds
#
# A document is in the training part or in the held-out part, never in both. `pack` writes
# documents one behind the other and cuts windows: `tokens`, `mask` and `weights` are (windows,
# length).


# %%
def windows_of(documents, rows):
    ids = [base.tokenizer.encode(text[: 8 * LENGTH]) for text in documents[: 4 * rows]]
    return mj.pack(ids, seq_len=LENGTH, separator=base.tokenizer.eos_ids[0]).rows(slice(0, rows))


domains = load_domains(source="embedded")
names = [domain.name for domain in domains]
train = [windows_of(domain.train_docs, ROWS) for domain in domains]
heldout = [windows_of(d.heldout_docs, 6).labelled(label) for label, d in enumerate(domains)]
mj.display.Table(
    ["kind", "training documents", "one begins"],
    [[d.name, len(d.train_docs), d.train_docs[0][:60].replace("\n", "⏎")] for d in domains],
)

# %% [markdown]
# ## Four adapters, none of which sees another's text
#
# The bank has a fixed number of slots of a fixed rank, so whatever is loaded, nothing is compiled
# anew.

# %%
bank = mj.AdapterBank(base.config, num_slots=4, max_rank=RANK)
training = mj.AdapterTrainConfig(rank=RANK, alpha=2.0 * RANK, steps=STEPS)
for name, windows in zip(names, train, strict=True):
    adapter, _ = mj.train_adapter(base, windows, training, name=name)
    bank.load(adapter)
bank

# %% [markdown]
# ## One router
#
# It starts from a closed-form solution (ridge regression from layer inputs to "whose data is
# this?") and takes a few gradient steps on the language-model loss. `Composition` is base, bank
# and router as one thing: it can be saved, loaded and served.

# %%
settings = mj.RouterTrainConfig(steps=2, start_rows=min(ROWS, 24), width=16, top_k=2)
router, _ = mj.train_router(base, bank, train, settings)
composition = mj.Composition.of(base, bank, router, labels_used=True)
composition.save(OUT / "composition", overwrite=True)
composition

# %% [markdown]
# ## Held-out loss
#
# Every arm reads the same rows. "oracle" is told each token's kind; the router is not. The last
# rows change their kind in the middle, which no choice of one adapter a sequence can follow.

# %%
joined = mj.joined_windows(heldout, 6, seed=0)
parts = [*heldout, joined]
arms = {"base": mj.base_arm}
arms |= {f"{name} alone": mj.single_arm(column) for column, name in enumerate(names)}
arms |= {"uniform mix": mj.uniform_arm(len(names)), "oracle": mj.oracle_arm, "router": router}
measured = {
    arm: [
        mj.evaluate(
            base.decoder,
            part,
            **composition.routed | {"router": choose},
            batch_size=6,
            return_routing=arm == "router",
        )
        for part in parts
    ]
    for arm, choose in arms.items()
}
mj.display.Table(
    ["arm", *names, "joined"],
    [[arm, *(each.nll for each in of_part)] for arm, of_part in measured.items()],
    title="Held-out loss, nats a token",
)

# %% [markdown]
# ## Who got which token
#
# Rows are kinds of text, columns adapters; a row adds up to 1. On the diagonal a token went to its
# own kind's adapter.

# %%
shares = np.concatenate(
    [
        result.shares(part.labels, num_domains=len(names), num_slots=bank.num_slots)[[label]]
        for label, (part, result) in enumerate(zip(heldout, measured["router"], strict=False))
    ]
)
figure = mj.display.share_figure(shares, domain_names=names, adapter_names=names)
figure
