"""What `real_tasks` measured, as numbers, claims, tables and pictures."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.real_tasks import STATISTICS, TRAINED
from experiments.run_folder import Claim
from experiments.run_folder import markdown as table
from experiments.seeds import over_seeds

if TYPE_CHECKING:
    from experiments.real_tasks import Config, Measured

OWN, MIXTURE = "own adapter", "LoRA on the mixture"
WHAT = {
    "exact_match": "exact match",
    "choice": "likeliest option right",
    "logp_token": "log p of the answer, nats a token",
}


def metrics(seeds: "Sequence[Measured]") -> dict[str, float]:
    """Means over seeds with their spread, and the standard errors over all questions."""
    numbers = over_seeds([_of_seed(each) for each in seeds])
    for name, arms in seeds[0].scores.items():
        for arm in arms:
            for what in _measured(arms[arm]):
                numbers[f"{name}/{key(arm)}/{what}_se"] = standard_error(
                    of_questions(seeds, name, arm, what)
                )
    return numbers


def _of_seed(one: "Measured") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, arms in one.scores.items():
        for arm, scores in arms.items():
            for what in _measured(scores):
                value = float(_values(scores, what).mean())
                numbers[f"{name}/{key(arm)}/{what}"] = value
        first = arms["base"]
        numbers[f"{name}/questions"] = len(first.questions)
        if len(first.chosen_right):
            numbers[f"{name}/random_choice"] = first.random_choice
        for arm in (STATISTICS, TRAINED):
            for at, adapter in enumerate(one.trained_on):
                numbers[f"{name}/{key(arm)}/share/{adapter}"] = float(arms[arm].shares[at])
    return numbers


def _measured(scores: Any) -> list[str]:
    return [what for what in WHAT if what != "choice" or len(scores.chosen_right)]


def _values(scores: Any, what: str) -> np.ndarray:
    """One number a question, whose mean is what is reported."""
    if what == "choice":
        return scores.chosen_right.astype(float)
    # Sums over the mean length: their mean is that over all tokens of all answers.
    return scores.right.astype(float) if what == "exact_match" else scores.logp_by_question


def of_questions(seeds: "Sequence[Measured]", name: str, arm: str, what: str) -> np.ndarray:
    """Numbers of an arm, one a question and seed."""
    return np.concatenate([_values(each.scores[name][arm], what) for each in seeds])


def standard_error(values: np.ndarray) -> float:
    """Of the mean; for shares it is the binomial one."""
    return float(values.std() / math.sqrt(len(values)))


def over(seeds: "Sequence[Measured]", name: str, arm: str, other: str, what: str):
    """(mean difference to another arm on the same questions, its standard error)."""
    found = of_questions(seeds, name, arm, what) - of_questions(seeds, name, other, what)
    return float(found.mean()), standard_error(found)


def few_shot(seeds: "Sequence[Measured]") -> str:
    """The arm of the base with worked questions before the prompt."""
    own = seeds[0].scores[seeds[0].trained_on[0]]
    return next(arm for arm in own if arm.startswith("base, "))


def claims(numbers: dict[str, float], seeds: "Sequence[Measured]") -> list[Claim]:
    """Of the router from statistics; a difference of less than two standard errors is none."""
    known, alone = seeds[0].trained_on, list(seeds[0].scores)[-1]
    shots = few_shot(seeds)
    wins = 0
    for name in known:
        best = max(numbers[f"{name}/{key(arm)}/exact_match"] for arm in ("base", shots))
        wins += numbers[f"{name}/{key(STATISTICS)}/exact_match"] > best
    gains = {
        arm: sum(over(seeds, name, arm, "base", "logp_token")[0] for name in known)
        for arm in (STATISTICS, OWN)
    }
    share = gains[STATISTICS] / gains[OWN]
    of_sets = ", ".join(
        f"{name} {gain / over(seeds, name, OWN, 'base', 'logp_token')[0]:.2f}"
        for name in known
        for gain, _ in [over(seeds, name, STATISTICS, "base", "logp_token")]
    )
    parts = [over(seeds, name, STATISTICS, MIXTURE, "logp_token") for name in known]
    ahead = sum(mean for mean, _ in parts) / len(parts)
    error = math.sqrt(sum(se**2 for _, se in parts)) / len(parts)
    what = "choice" if len(seeds[0].scores[alone]["base"].chosen_right) else "exact_match"
    harm, harm_error = over(seeds, alone, STATISTICS, "base", what)
    lost, lost_error = over(seeds, alone, STATISTICS, "base", "logp_token")
    return [
        Claim(
            id="real_tasks.sets_won", kind="order", paper=4, ours=wins, direction="higher",
            holds=None,
            note=f"of {len(known)}, exact match above the same base, with and without shots; not "
            "comparable: the paper sets Qwen3-1.7B against Qwen3-8B on its own four sets",
        ),
        Claim(
            id="real_tasks.share_of_own_gain", kind="share", ours=share, direction="higher",
            holds=share >= 0.9 if gains[OWN] > 0 else None,
            note="of what each set's own adapter gains over the base in log p of the answers, all "
            f"sets together ({of_sets}); no training after the load; 0.9 asked",
        ),
        Claim(
            id="real_tasks.over_mixture", kind="order", ours=ahead, unit="nats",
            direction="higher", holds=ahead > 0 if abs(ahead) > 2 * error else None,
            note=f"log p a token over one LoRA on the mixture, equal parameters and steps; "
            f"standard error {error:.3f}, below two of them no verdict",
        ),
        Claim(
            id=f"real_tasks.{alone}_over_base", kind="order", ours=harm, direction="higher",
            holds=harm > -2 * harm_error,
            note=f"{WHAT[what]}, on a set no adapter was made for; standard error "
            f"{harm_error:.3f}; holds: not worse by two of them. log p of its answers: "
            f"{lost:+.3f} ± {lost_error:.3f} nats a token",
        ),
    ]  # fmt: skip


def markdown(
    numbers: dict[str, float], seeds: "Sequence[Measured]", sets: Sequence[Any], config: "Config"
) -> str:
    """report.md, less the claims."""
    known = seeds[0].trained_on
    sections = ["# Real question sets", *protocol(seeds, sets, config)]
    for each in sets:
        arms = seeds[0].scores[each.name]
        shown = _measured(arms["base"])
        rows = []
        for arm in arms:
            row = [arm]
            for what in shown:
                name = f"{each.name}/{key(arm)}/{what}"
                digits = 3
                row.append(f"{numbers[name]:.{digits}f} ± {numbers[f'{name}_se']:.{digits}f}")
            gain, error = over(seeds, each.name, arm, "base", "logp_token")
            rows.append([*row, "–" if arm == "base" else f"{gain:+.3f} ± {error:.3f}"])
        count = sum(len(one.scores[each.name]["base"].questions) for one in seeds)
        text = f"{count} questions; {each.split}; {each.licence}."
        if f"{each.name}/random_choice" in numbers:
            chance = numbers[f"{each.name}/random_choice"]
            choices = len(of_questions(seeds, each.name, "base", "choice"))
            text += f" {choices} of them are choices, where a guess is right {chance:.3f} times."
        header = ["arm", *(WHAT[what] for what in shown), "log p over base, same questions"]
        sections += [f"## {each.name}", text, table(header, rows).strip()]
    alone = sets[-1].name
    routes = [
        [name, *(f"{numbers[f'{name}/{key(arm)}/share/{adapter}']:.3f}"
                 for arm in (STATISTICS, TRAINED) for adapter in known)]
        for name in seeds[0].scores
    ]  # fmt: skip
    header = ["set", *(f"{a} ({w})" for w in ("statistics", "trained") for a in known)]
    sections += [
        "## Where the tokens go",
        f"Share of a set's tokens, prompts and answers, by main adapter. {alone} has none of its "
        "own.",
        table(header, routes).strip(),
        "![right answers](right.png) ![log p](logp.png) ![shares](shares.png) "
        "![training](loss.png)",
    ]
    return "\n\n".join(sections)


def protocol(seeds: "Sequence[Measured]", sets: Sequence[Any], config: "Config") -> list[str]:
    """How it was trained and asked, in words."""
    from experiments.real_tasks_measure import MAX_ANSWER

    known = seeds[0].trained_on
    left = ", ".join(f"{each.left_out} of {each.name}" for each in sets if each.train)
    seeds_note = (
        f"Seeds {config.seed} to {config.seed + len(seeds) - 1}, which share some questions"
        if len(seeds) > 1
        else f"One seed of training ({config.seed}): what another would give is not known"
    )
    return [
        f"{config.base}, frozen ({config.dtype}). Adapters of rank {config.rank} on all "
        f"projections, each trained alone on one of {', '.join(known)}: {config.adapter_steps} "
        f"steps of {config.adapter_rows} windows of {config.adapter_len} tokens, loss on the "
        f"answers alone. {MIXTURE}: rank {len(known) * config.rank} and "
        f"{len(known) * config.adapter_steps} steps on the same windows pooled, so as many "
        "parameters and tokens as the adapters together. MoLoRA gives every token one adapter "
        "(k = 1): by a router solved from the adapters' statistics, with nothing trained after "
        f"the load, or by one trained on their data ({seeds[0].label_use}). Uniform: equal parts "
        "of all.",
        "**Prompt**: \"Question: …\", a line \"Options:\" and a line \"(A) …\" an option where "
        "there are some, \"Answer:\"; BBH's questions as they are, between \"Question: \" and "
        f"\"Answer:\". No shots but in \"{few_shot(seeds)}\": short training questions of the set "
        "with different answers. The answer is asked at once, without a worked solution: the "
        "number without commas, or the letter in parentheses.",
        "**Exact match**: greedy decoding writes the gold answer and does not go on with it (no "
        "letter, digit, point, comma, slash, colon or percent sign next). It is read off one pass "
        "over prompt and gold answer, where the likeliest token must be the gold one at each "
        f"place: the same as decoding {MAX_ANSWER + 1} new tokens and looking at how they begin. "
        "**Likeliest option**: by the token in which the options differ (their first ones are "
        "alike), against the others. **log p**: of a token of the gold answer, mean over all. The "
        "first is the blank or parenthesis before it, so part of what is gained is the form alone; "
        "the base with shots was shown that form too.",
        f"Asked are the first {config.num_questions} questions of each set, drawn by the seed "
        f"(BBH: one of each task in turn), of at most {config.eval_len} tokens with an answer of "
        f"at most {MAX_ANSWER}; the same in every arm. {seeds_note}; ± is the standard error over "
        "questions, binomial for shares (0 where none is right, which says little: up to 3 in as "
        "many questions would still fit). Training rows that have three words in five in common "
        f"with a test question (numbers aside) were left out: {left}.",
    ]  # fmt: skip


def draw(seeds: "Sequence[Measured]", path: pathlib.Path) -> None:
    """Right answers, log p over the base, where tokens go, and the loss curves of one seed."""
    from molora_jax import display

    first = seeds[0]
    names, known = list(first.scores), first.trained_on
    curves = {
        name: ([each["step"] for each in records], [each["loss"] for each in records])
        for name, records in first.curves.items()
        if records
    }
    shares = np.mean(
        [[one.scores[name][STATISTICS].shares for name in names] for one in seeds], axis=0
    )
    pictures = {
        "right": _right(seeds),
        "logp": _gains(seeds),
        "shares": display.share_figure(
            shares, domain_names=names, adapter_names=known,
            title="Share of tokens by adapter, router from statistics",
        ),
        "loss": display.curve_figure(
            curves, ylabel="loss (nats per answer token)", title="Training", smooth=10
        ),
    }  # fmt: skip
    for name, figure in pictures.items():
        display.save_figure(figure, path / f"{name}.png")


def _right(seeds: "Sequence[Measured]") -> Any:
    """A panel a set: the share of right answers of every arm, with standard errors."""
    panels = {}
    for name, arms in seeds[0].scores.items():
        what = "choice" if len(arms["base"].chosen_right) else "exact_match"
        found = {arm: of_questions(seeds, name, arm, what) for arm in arms}
        panels[f"{name}: {WHAT[what]}"] = (
            {arm: (100 * v.mean(), 100 * standard_error(v)) for arm, v in found.items()},
            100 * arms["base"].random_choice if what == "choice" else None,
        )
    return _panels(panels, xlabel="%", line_is="a guess", from_zero=True)


def _gains(seeds: "Sequence[Measured]") -> Any:
    """A panel a set: log p of the answers over the base, on the same questions."""
    panels = {}
    for name, arms in seeds[0].scores.items():
        found = {arm: over(seeds, name, arm, "base", "logp_token") for arm in arms if arm != "base"}
        panels[name] = (found, 0.0)
    return _panels(panels, xlabel="log p over the base, nats an answer token", line_is="the base")


def _panels(
    panels: Mapping[str, tuple[dict, float | None]],
    *,
    xlabel: str,
    line_is: str,
    from_zero: bool = False,
) -> Any:
    from matplotlib.figure import Figure

    from molora_jax.display import adapter_color

    # The base first, drawn or not: an arm has one colour in both pictures.
    arms = list(dict.fromkeys(["base", *(arm for found, _ in panels.values() for arm in found)]))
    figure = Figure(figsize=(11, 2.2 * -(-len(panels) // 2) + 1.2), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 2), 2, squeeze=False).ravel()
    for panel, (title, (found, line)) in zip(axes, panels.items(), strict=False):
        for at, (arm, (value, error)) in enumerate(found.items()):
            panel.errorbar(
                value, at, xerr=error, fmt="o", capsize=3, color=adapter_color(arms.index(arm))
            )
        if line is not None:
            panel.axvline(line, color="#555555", linewidth=1, linestyle="--")
        panel.set_yticks(range(len(found)), list(found), fontsize=8)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=10)
        dashed = "" if line is None else f" (dashed: {line_is})"
        panel.set_xlabel(xlabel + dashed, fontsize=9)
        panel.locator_params(axis="x", nbins=6)
        if from_zero:
            panel.set_xlim(left=0)
        panel.grid(axis="x", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    return figure


def key(arm: str) -> str:
    """A metric's name: "MoLoRA, statistics" is MoLoRA_statistics."""
    return "_".join("".join(c if c.isalnum() else " " for c in arm).split())
