"""The paper's tables and figures in its order, with its own numbers (arXiv 2603.15965, on H100)."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or figure: `id` as the registry and the claims call it ("table3", "fig6")."""

    id: str
    measured: str
    numbers: str

    @property
    def label(self) -> str:
        """ "Tab 3", "Fig 6"."""
        return self.id.replace("table", "Tab ").replace("fig", "Fig ")


def _entry(name: str, measured: str, numbers: str) -> Entry:
    return Entry(id=name, measured=measured, numbers=numbers)


PAPER = (
    _entry(
        "fig3",
        "a small base with four LoRAs and a router against a 4.7 times larger base",
        "wins on all four reasoning benchmarks",
    ),
    _entry(
        "table2",
        "indirect against direct memory layout, 4/8/16/32/64 adapters, ms",
        ".215/.196, .228/.194, .227/.201, .232/.207, .258/.218; mean 1.14×",
    ),
    _entry(
        "fig5",
        "tensor-core kernel and graph against scalar BGMV over the batch, d = 4096, r = 64, "
        "8 adapters",
        "kernel flat near 0.016 ms, BGMV linear; they cross near 160",
    ),
    _entry("fig9", "the same at larger batches", "1.98× at 512, 2.69× at 1024"),
    _entry(
        "table3",
        "4 adapters, 2048 tokens, d = 4096, r = 64: a pass for each adapter against one for all",
        "5.88 against 1.43 ms: 4.1×",
    ),
    _entry(
        "table4",
        "the ladder, in the same configuration",
        "per-sequence with paging 7.48, with hot set 5.88; per-token with hot set 1.43, with graph "
        "1.36 ms: 5.5×",
    ),
    _entry(
        "table5",
        "Qwen3-4B, per-sequence against per-token, ms",
        "diverse 4×128: 179.0/41.5; diverse 8×128: 178.7/43.4; uniform 8×256: 178.1/79.8; single "
        "8×256: 80.3/80.0",
    ),
    _entry(
        "table6",
        "order of tokens: interleaved text-heavy, interleaved balanced, separated",
        "per-token .23/.24/.24, per-sequence 5.94/12.79/1.81 ms",
    ),
    _entry("fig6", "per-token over per-sequence, over the batch", "5.8 to 112×"),
    _entry("fig7", "P99 latency with variance, graph against paging", "42 to 108×"),
    _entry(
        "fig8",
        "P99 latency under bursty, uniform and adversarial access",
        "hot set near 0.09 ms always; paging varies 3×",
    ),
    _entry(
        "table7",
        "a transformer from end to end, 4 adapters (d, layers, batch × sequence)",
        "(1024, 2, 16×512) 14.5/57.7; (2048, 4, 4×512) 17.3/68.8; (4096, 4, 16×512) 121.6/488.0 "
        "ms: 4.0×",
    ),
    _entry(
        "table8",
        "interleaved generation as in Chameleon, d = 2048, 4 layers, 2 adapters",
        "5.18 to 3.14 ms: 1.65×",
    ),
    _entry(
        "table9",
        "fixed 64×64 against adaptive tiling: uniform, 80-10-5-5, 95-2-2-1",
        "1.04×, 1.17×, 1.40×",
    ),
    _entry(
        "table11",
        "coefficient of variation eager/graph/paging, batch 32, 64, 128, 256",
        ".52/.03/.63, .68/.33/.32, .34/.12/.12, .01/.07/.18",
    ),
    _entry(
        "table12",
        "which router serves which of five scenarios",
        "vocabulary routing where vocabularies are disjoint; learned routing in all five",
    ),
    _entry(
        "table13",
        "synthetic multimodal task, loss on train/val",
        "single 3.008/3.435; oracle (3 adapters, k = 1) 2.588/3.819; MoLoRA (4, k = 2) "
        "2.861/3.555; MoLoRA-L (8, k = 3) 2.783/3.599; its 35 % of the oracle's gain are "
        "on train loss",
    ),
    _entry(
        "table14",
        "modality discovery without labels, after 0/20/99 epochs",
        "ARI .27/.72/.71; NMI .37/.86/.84; routing entropy 1.35/.09/.18 nats",
    ),
    _entry(
        "table15",
        "code, math and prose in one vocabulary, 3 adapters",
        "100 % of each domain to its own adapter, ARI 1.0",
    ),
    _entry(
        "table16",
        "overhead over one LoRA, d = 4096, batch 32 × sequence 128",
        "single .082 ms (1×); fixed .894 (10.9×); k = 1 .995 (12.1×); k = 2 2.267 (27.6×); k = 4 "
        "4.001 (48.8×)",
    ),
    _entry(
        "table17",
        "Qwen3-4B, share of tokens to the main adapter",
        "code 98.6, math 96.6, creative 98.8, technical 99.2 %",
    ),
)


def entries_of(tables: str) -> list[str]:
    """Ids that a registry line names: "Fig 3, Tab 15, 17" is fig3, table15 and table17."""
    found, kind = [], ""
    for part in filter(None, re.split(r",\s*", tables)):
        match = re.fullmatch(r"(?:(Fig|Tab) )?(\d+)", part)
        if match is None or not (match[1] or kind):
            raise ValueError(f"tables {tables!r}: {part!r} is not like 'Tab 3', or '4' behind one")
        kind = match[1] or kind
        found.append(f"{'table' if kind == 'Tab' else 'fig'}{match[2]}")
    return found
