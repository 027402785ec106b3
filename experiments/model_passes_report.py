"""What Tables 5 and 7 report of whole models: ratios, times, and whether the answers are equal."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import kernel_timing
from experiments.kernel_timing import ratio_claim, time_claim
from experiments.run_folder import Run, markdown
from pallas_kernels.bench import Times

ARMS = {
    "per_token": "one pass in which every token uses its own adapter, strategy auto: ours",
    "per_token_grouped": "the same pass and the same ids, a grouped product sorted by adapter",
    "per_token_bgmv": "the same pass and the same ids, in which each row reads its own adapter",
    "per_sequence": "for each adapter a pass over the rows that have a token of it, with this "
    "adapter on every token, of which the tokens that are its own are kept",
    "full_passes": "the same over the whole batch, whether or not a row needs the adapter",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch through a model, with what the paper measured of one like it."""

    name: str
    ids: np.ndarray  # (B, S), the adapter of each token
    size: str
    paper_size: str
    paper_ms: Mapping[str, float]  # per_sequence, per_token

    @property
    def paper_ratio(self) -> float:
        """Per sequence over per token."""
        return self.paper_ms["per_sequence"] / self.paper_ms["per_token"]

    @property
    def mixed(self) -> bool:
        """Whether a row has several adapters."""
        return bool((self.ids != self.ids[:, :1]).any())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of a case, and by arm what its logits differ by from ours, mean over mean."""

    case: Case
    times: Times
    differences: Mapping[str, float]
    same_token: float  # share of tokens to which per_sequence gives the same likeliest next one


def finish(config: Any, run: Run, measured: Mapping[str, Measured], *, said: str, base: str):
    """Metrics, claims, the picture and the report of either table."""
    metrics, claims = {}, []
    for name, found in measured.items():
        times, paper = found.times, found.case.paper_ms
        for arm in found.differences:
            if arm != "per_token":
                metrics[f"{name}_{arm}_over_per_token"] = times.ratio(arm, over="per_token")
        unlike = found.case.size if found.case.size != found.case.paper_size else ""
        sizes = (base, unlike, f"r = {config.rank}; the paper gives no rank")
        where = ", ".join([kernel_timing.device(), config.dtype, *filter(None, sizes)])
        # A pass over a part of the rows is where a GPU has room to spare and a CPU none.
        fewer = "full_passes" in found.differences
        claims.append(
            ratio_claim(
                f"{run.experiment}.{name}_speedup",
                where=where,
                paper=found.case.paper_ratio,
                ours=times.ratio("per_sequence", over="per_token"),
                direction="higher",
                note="per sequence over per token",
                only_gpu="a pass over a part of the rows takes a CPU a part of the time, and the "
                "paper's GPU half of it and more"
                if fewer
                else "",
            )
        )
        claims += [
            time_claim(
                f"{run.experiment}.{name}_{arm}",
                where=where,
                paper_ms=paper[arm],
                seconds=times.median(arm),
            )
            for arm in ("per_sequence", "per_token")
        ]
    text = "Whole models: a pass for each adapter against one pass for all"
    kernel_timing.draw_bars(
        run,
        "passes",
        {
            **{
                arm.replace("_", " "): [
                    kernel_timing.ratio_band(each.times, arm, over="per_token")
                    for each in measured.values()
                ]
                for arm in arms_of(measured)[1:]
            },
            "the paper's per sequence": [
                kernel_timing.exactly(each.case.paper_ratio) for each in measured.values()
            ],
        },
        config=config,
        sizes=f"K = {config.num_adapters}, r = {config.rank}",
        groups=[
            "\n".join([name.replace("_", " "), *each.case.size.split(", ")])
            for name, each in measured.items()
        ],
        ylabel="time over per token",
        title=text,
    )
    report = f"# {text}\n\n{said}\n\n{tables(config, measured)}"
    run.finish(metrics=metrics, claims=claims, report=report)


def arms_of(measured: Mapping[str, Measured]) -> list[str]:
    """Those that were timed, per token first."""
    return [arm for arm in ARMS if any(arm in each.times for each in measured.values())]


def tables(config: Any, measured: Mapping[str, Measured]) -> str:
    """The report below its first paragraph."""
    arms = arms_of(measured)
    times = markdown(
        ["case", "size", *(f"{arm.replace('_', ' ')}, ms" for arm in arms)],
        [
            [name, each.case.size, *(kernel_timing.milliseconds(each.times, arm) for arm in arms)]
            for name, each in measured.items()
        ],
    )
    ratios = markdown(
        ["case, over per token", *(arm.replace("_", " ") for arm in arms[1:]), "the paper"],
        [
            [
                name,
                *(
                    f"{each.times.ratio(arm, over='per_token'):.2f}" if arm in each.times else "-"
                    for arm in arms[1:]
                ),
                f"{each.case.paper_ratio:.2f}",
            ]
            for name, each in measured.items()
        ],
    )
    answers = markdown(
        [
            "case, logits beside per token's",
            *(arm.replace("_", " ") for arm in arms[1:]),
            "same token",
        ],
        [
            [
                name,
                *(f"{each.differences[arm]:.1e}" if arm in each.times else "-" for arm in arms[1:]),
                f"{each.same_token:.1%}",
            ]
            for name, each in measured.items()
        ],
    )
    what = "".join(f"- {arm.replace('_', ' ')}: {ARMS[arm]}\n" for arm in arms)
    return (
        f"{config.dtype} on {kernel_timing.device()}; medians of up to {config.repeats} turns in "
        "alternating order (10th to 90th percentile in brackets); ratios are medians of paired "
        "ratios. Every arm gives the logits of all tokens; a pass for one adapter reads a bank of "
        "this adapter alone, and a pass is one program that the host launches.\n\n"
        f"{what}\n{times}\n{ratios}\nAre the answers the same? The mean difference of logits "
        "over their mean size, and the share of tokens to which per sequence gives the same "
        f"likeliest next one:\n\n{answers}\nWhere a row has one adapter all arms compute the "
        "same, and a run in which they do not fails. Where its tokens have several, a pass for "
        "each adapter computes another function: its tokens attend to keys and values that this "
        "adapter made of all tokens, and not each token's own.\n"
    )
