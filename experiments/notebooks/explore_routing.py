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
# # Which adapter did each word go to, and was that right?
#
# A router decides for every token in every layer. This notebook reads one text with the
# composition that `compose_and_look_inside` left behind (or with any other: `MOLORA_COMPOSITION`
# names its folder), and asks three things: where did the words go, how sure was the router, and
# what would another adapter have cost?

# %%
import os
from pathlib import Path

import numpy as np

import molora_jax as mj

SCALE = os.environ.get("MOLORA_SCALE", "cpu")
OUT = Path(os.environ.get("MOLORA_OUT", "out/notebooks"))
BASE = {"tiny": "tiny-random", "cpu": "smollm2-135m"}[SCALE]
FOLDER = os.environ.get("MOLORA_COMPOSITION", OUT / "composition")
TEXT = """Question: Tom has 3 boxes of 12 pens. How many pens does he have?
Answer: 3 x 12 = 36.

def count(boxes, pens):
    return boxes * pens

And God said, Let there be light: and there was light."""
TEXT = TEXT[:100] if SCALE == "tiny" else TEXT  # a byte is a token there

# %%
base = mj.load_base(BASE)
composition = mj.Composition.load(FOLDER, base)
composition

# %% [markdown]
# ## Word by word
#
# `analyse` reads the text once under the router, and once more for each adapter alone. A word's
# adapter is the one with the largest gates over its tokens in the later half of the layers.

# %%
found = mj.analyse(base, [TEXT], {"router": composition})
(text,) = found.texts
(trace,) = text.routers
print(mj.display.terminal_text(text.pieces, trace.main, adapter_names=found.adapters))

# %%
adapter_of = trace.of_words(text.words)
mj.display.Table(
    ["adapter", "its words"],
    [
        [name, " ".join(w for w, j in zip(text.word_texts, adapter_of, strict=True) if j == at)]
        for at, name in enumerate(found.adapters)
    ],
)

# %% [markdown]
# ## Layer by layer
#
# Colours are adapters. Early layers see little but the token itself; later ones know the text.

# %%
mj.display.choice_figure({"router": trace.by_layer}, text.pieces, adapter_names=found.adapters)

# %% [markdown]
# ## How sure?
#
# The entropy of the router's softmax: 0 is a hard choice, the natural logarithm of the number of
# adapters is no idea.

# %%
mj.display.entropy_figure({"router": trace.entropy}, num_adapters=len(found.adapters))

# %% [markdown]
# ## Forced routing
#
# Each row sends *every* token to one adapter, or to none. Above 0 (and below, in the other colour)
# is how much worse (or better) each token is predicted then. The mean stands in brackets.

# %%
rows = [*found.adapters, "base alone"]
means = {
    "routed": float(np.nanmean(trace.loss)),
    **{name: float(np.nanmean(loss)) for name, loss in zip(rows, text.forced, strict=True)},
}
print(mj.display.Table(["every token to", "nats a token"], [list(each) for each in means.items()]))
figure = mj.display.forced_figure(text.forced_difference(), text.pieces, adapter_names=rows)
figure
