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
# # Does the paper's Table 14 hold here?
#
# Table 14 asks whether a router that is told nothing finds the modalities: the adjusted Rand index
# (ARI) and the normalised mutual information (NMI) between adapters and modalities, at the start
# of training, after a fifth of it and at its end. Every run leaves a folder with all of its
# numbers; this notebook reads them and draws the table anew. To measure again:
#
#     molora run --experiment=table14
#
# `MOLORA_RUNS` names other folders, separated by `:`; `results` holds the committed runs.

# %%
import os
from pathlib import Path

import experiments
import molora_jax as mj
from experiments import compare, load_runs

SCALE = os.environ.get("MOLORA_SCALE", "cpu")  # nothing is measured here: both read the same
RESULTS = Path(experiments.__file__).parents[1] / "results"  # of a clone; a wheel has none
FOLDERS = os.environ.get("MOLORA_RUNS", str(RESULTS)).split(":")

# %%
runs = load_runs(*FOLDERS)
mj.display.Table(
    ["run", "scale", "numbers", "claims", "hold"],
    [
        [
            run.experiment,
            run.settings["scale"],
            len(run.metrics),
            len(run.claims),
            sum(claim["holds"] is True for claim in run.claims),
        ]
        for run in runs
    ],
    title="What is there",
)

# %% [markdown]
# ## Which run?
#
# Of several runs of an experiment `compare` puts the best first, and shows the settings in which
# they differ.

# %%
comparison = compare([run for run in runs if run.experiment == "table14"])
run = comparison.runs[0]
comparison

# %% [markdown]
# ## The table
#
# Mean over seeds, ± the spread. `molora` has four adapters and k = 2, `molora_l` eight and k = 3;
# `language_only` is `molora` without the loss over neighbouring tokens.

# %%
ARMS, STAGES = ("molora", "molora_l", "language_only"), ("start", "fifth", "end")


def cell(arm, metric, stage):
    value = run.metrics[f"table14/{arm}/{metric}/{stage}"]
    spread = run.metrics[f"table14/{arm}/{metric}/{stage}/spread"]
    return f"{value:.2f} ± {spread:.2f}", value if metric != "entropy" else 0.0


mj.display.Table(
    ["arm", *(f"{metric}, {stage}" for metric in ("ari", "nmi", "entropy") for stage in STAGES)],
    [
        [arm, *(cell(arm, metric, s) for metric in ("ari", "nmi", "entropy") for s in STAGES)]
        for arm in ARMS
    ],
)

# %% [markdown]
# ## The paper's claims
#
# A claim holds where our number is at least as good as the paper's.

# %%
run.claim_table()

# %% [markdown]
# ## The picture
#
# With the loss over neighbouring tokens the router finds the modalities early; without it, half of
# the way.

# %%
figure = mj.display.curve_figure(
    {
        arm: ([0, 20, 100], [run.metrics[f"table14/{arm}/ari/{stage}"] for stage in STAGES])
        for arm in ARMS
    },
    ylabel="ARI of adapters and modalities",
    title="Does a router that is told nothing find the modalities?",
)
axes = figure.axes[0]
axes.set_xlabel("share of the training, %")
paper = next(claim["paper"] for claim in run.claims if claim["id"] == "table14.ari")
axes.axhline(paper, color="black", linewidth=1, linestyle=":", label="the paper, at the end")
axes.legend(frameon=False)
figure
