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
# # Does the cost model know what is fast?
#
# The operation is `y[n] = base[n] + Σ gate · B[id] A[id] x[n]`: every token has adapters of its
# own. There are several ways to compute it; `auto` takes the one that a small cost model expects
# to be fastest, from sizes alone. Here the model is set beside times measured on this machine.

# %%
import os

import numpy as np

import molora_jax as mj
from pallas_kernels import ProblemSize, bench, cost, explain

SCALE = os.environ.get("MOLORA_SCALE", "cpu")
TOKENS, WIDTH, RANK, SLOTS, TURNS = {
    "tiny": (32, 32, 4, (2, 8), 3),
    "cpu": (512, 1024, 16, (2, 4, 8, 16, 32, 64), 9),
}[SCALE]
STRATEGIES = ("all_slots", "grouped", "bgmv")

# %% [markdown]
# ## What the model says
#
# Every path with its bytes, products, launches and memory, best first; `*` is what `auto` takes.
# The floor is what no path can avoid: x, base and the weights of the adapters in use read once, y
# written once. An H200's times are absolute; of a CPU's only ratios mean something.

# %%
sizes = [
    ProblemSize(num_tokens=TOKENS, d_in=WIDTH, d_out=WIDTH, rank=RANK, num_slots=slots, top_k=2)
    for slots in SLOTS
]
print(explain(sizes[-1], device="cpu"))
print(explain(sizes[-1], device="h200"))

# %% [markdown]
# ## What the clock says
#
# All strategies are compiled first and then run in turns, so that whatever slows the machine down
# meets each of them. A ratio is a median over turns. `temp` is what the compiler says the program
# holds beside operands and result.

# %%
rows, measured, expected, chosen = [], [], [], []
for size in sizes:
    inputs = bench.make_inputs(size)
    arms, _ = bench.compile_arms({name: bench.routed(name) for name in STRATEGIES}, inputs)
    times = bench.time_arms(arms, inputs, repeats=TURNS, budget_s=5.0)
    guess = {
        path.strategy: cost.estimate(path, size, cost.CPU)
        for path in cost.candidates(size, cost.CPU)
    }
    auto = cost.choose(size, cost.CPU).strategy
    best = min(STRATEGIES, key=times.median)
    measured.append([times.median(name) for name in STRATEGIES])
    expected.append([guess[name].seconds for name in STRATEGIES])
    chosen.append(auto)
    regret = times.ratio(auto, over=best) - 1
    floor = cost.floor_bytes(size, itemsize=4, active=inputs.active)
    rows.append(
        [
            size.num_slots,
            auto,
            best,
            f"{max(regret, 0.0):.0%}",
            round(1e3 * times.median(auto), 3),
            round(guess[auto].bytes / floor, 2),
            round((arms[auto].temp_bytes or 0) / 2**20, 2),
        ]
    )
mj.display.Table(
    ["K", "auto takes", "fastest here", "given away", "ms", "bytes / floor", "temp MiB"],
    rows,
    title=f"N = {TOKENS}, D = F = {WIDTH}, r = {RANK}, k = 2, float32",
)

# %% [markdown]
# ## Model against clock
#
# Each over the choice of `auto` at the same K, measured (solid) and expected (dashed): below 1 a
# strategy beats it. Where the two have the same lowest line the choice was right, whatever the
# heights.


# %%
def over_auto(seconds):
    index = [STRATEGIES.index(name) for name in chosen]
    seconds = np.array(seconds)
    return seconds / seconds[np.arange(len(index)), index][:, None]


curves = {}
for column, name in enumerate(STRATEGIES):
    curves[f"{name}, measured"] = (SLOTS, over_auto(measured)[:, column])
for column, name in enumerate(STRATEGIES):
    curves[f"{name}, model"] = (SLOTS, over_auto(expected)[:, column])
figure = mj.display.curve_figure(
    curves, ylabel="time over that of auto's choice", title="Strategies by number of adapters"
)
axes = figure.axes[0]
for clock, model in zip(axes.lines[:3], axes.lines[3:], strict=True):
    model.set(color=clock.get_color(), linestyle="--")
axes.legend(frameon=False, ncols=2, fontsize=8)
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set_xticks(SLOTS, [str(slots) for slots in SLOTS])
axes.set_xlabel("adapters in the bank, K")
figure
