"""The main job: LoRAs trained apart, one router over all, one routed pass, held-out numbers.

Letters beyond the table of design.md: G domains; adapter g is trained on domain g alone.
"""

import dataclasses
import hashlib
import json
from typing import Any, Literal

from experiments.registry import check_config, place

DOMAINS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """One composition, from data to report.

    base                base model: a name, a folder or a .gguf file
    data                "molora_data": the real sets of the folder MOLORA_DATA; "embedded": those
                        that come with the packages; "auto": the former where MOLORA_DATA is set
    rank                of every adapter, on all seven projections
    alpha               the adapters' scale is alpha / rank
    adapter_steps       steps of one adapter's training
    adapter_lr          its peak learning rate
    adapter_rows        rows of one of its steps;  adapter_len  tokens of such a row
    train_rows          windows of each domain that adapters and router are trained on
    router              "per_layer", or "shared": one decision after layer `after_layer`
    after_layer         where the shared decision is taken
    router_start_rows   rows read to solve the router in closed form
    router_joined       share of the router's rows that change domain in the middle; rows of one
                        domain alone teach it to expect no change
    router_steps        gradient steps that follow, with the language-model loss
    router_lr           their peak learning rate
    label_coef          × cross-entropy against the adapter whose own data a token came from
    top_k               adapters per token, beside k = 1, which is always reported
    eval_rows           held-out rows of one domain;  eval_joined  rows that change domain
    eval_len            tokens of such a row
    mixture             also train one LoRA of the same number of parameters on the pooled data, for
                        the steps of one adapter and for those of all (minutes; cached)
    prompt              a text that needs two domains, to which the routed model answers
    max_new_tokens      most tokens of the answer
    command             what the adapters' model cards say that they were made by
    """

    base: str = "smollm2-135m"
    data: Literal["auto", "embedded", "molora_data"] = "auto"
    rank: int = 8
    alpha: float = 16.0
    adapter_steps: int = 40
    adapter_lr: float = 1e-3
    adapter_rows: int = 2
    adapter_len: int = 128
    train_rows: int = 96
    router: Literal["per_layer", "shared"] = "per_layer"
    after_layer: int = 3
    router_start_rows: int = 144
    router_joined: float = 0.85
    router_steps: int = 10
    router_lr: float = 1e-3
    label_coef: float = 0.1
    top_k: int = 2
    eval_rows: int = 2
    eval_joined: int = 6
    eval_len: int = 256
    mixture: bool = False
    prompt: str = (
        "Question: Nina buys 3 boxes of pens. Each box holds 12 pens and costs $4. How much does "
        "one pen cost? Work it out, then write it as a Python function.\nAnswer: Each box holds 12 "
        "pens and costs $4, so one pen costs $4 ÷ 12.\n\n"
        "def price_of_one_pen(price_of_box, pens_in_box):\n    "
    )
    max_new_tokens: int = 64
    seed: int = 0
    command: str = place("molora run --experiment=compose")

    def __post_init__(self):
        check_config(self)
        for name in ("train_rows", "eval_rows", "eval_joined", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name} = {getattr(self, name)}: expected at least 1")
        for name in ("adapter_len", "eval_len"):
            if getattr(self, name) < 8:
                raise ValueError(f"Config.{name} = {getattr(self, name)}: expected at least 8")
        if not 1 <= self.top_k <= DOMAINS:
            raise ValueError(
                f"Config.top_k = {self.top_k}: expected 1 to {DOMAINS}, the number of adapters"
            )
        self.adapter_training(), self.router_training()  # refuse what training would

    def adapter_training(self, *, pooled: int = 1, steps: int | None = None):
        """Of one domain's adapter; of `pooled` domains, with as many parameters as theirs."""
        from molora_jax.training.config import AdapterTrainConfig

        return AdapterTrainConfig(
            rank=self.rank * pooled,
            alpha=self.alpha * pooled,
            steps=self.adapter_steps if steps is None else steps,
            lr=self.adapter_lr,
            batch_size=self.adapter_rows,
            seed=self.seed,
            checkpoint_every=20,
        )

    def router_training(self):
        from molora_jax.training.config import RouterTrainConfig

        return RouterTrainConfig(
            steps=self.router_steps,
            lr=self.router_lr,
            batch_size=self.adapter_rows,
            top_k=self.top_k,
            after_layer=self.after_layer if self.router == "shared" else None,
            start_rows=self.router_start_rows,
            joined_share=self.router_joined,
            label_coef=self.label_coef,
            seed=self.seed,
            checkpoint_every=20,
        )


SWEEPS = {
    "rank": lambda: [f"compose.Config.rank = {rank}" for rank in (4, 8, 16)],
    "adapter_lr": lambda: [f"compose.Config.adapter_lr = {lr}" for lr in (3e-4, 1e-3, 3e-3)],
}


def digests(config: Config) -> dict[str, str]:
    from experiments.domains import load_domains
    from molora_jax.models import base_digest

    domains = load_domains(source=config.data, seed=config.seed)
    return {"base": base_digest(config.base), **{each.name: each.digest for each in domains}}


def main(config: Config, run) -> None:
    from experiments import compose_report
    from experiments.domains import load_domains
    from molora_jax.adapters import AdapterBank, Composition
    from molora_jax.models import load_base
    from molora_jax.training.data import concatenate

    domains = load_domains(source=config.data, seed=config.seed)
    names = [domain.name for domain in domains]
    base = load_base(config.base)
    train, heldout = windows_of(domains, base.tokenizer, config)

    curves = {}
    bank = AdapterBank(base.config, num_slots=len(domains), max_rank=config.rank)
    for name, windows in zip(names, train, strict=True):
        folder, curves[name] = trained_adapter(run, base, config, {name: windows})
        print(bank.load(folder, name=name), flush=True)
    router, curves["router"], label_use = trained_router(run, base, bank, train, config)
    composition = Composition(
        base_name=base.name,
        base_digest=base.digest,
        bank=bank,
        router=router,
        column_digests=[each.digest for each in bank.list()],
        labels_used=True,
    )
    composition.save(run.path / "composition", overwrite=True)

    pooled = {}
    if config.mixture:
        for steps in (config.adapter_steps, len(domains) * config.adapter_steps):
            label = f"mixture, {steps} steps"
            folder, curves[label] = trained_adapter(
                run, base, config, dict(zip(names, train, strict=True)), steps=steps
            )
            pooled[label] = AdapterBank(
                base.config, num_slots=1, max_rank=config.rank * len(domains)
            )
            pooled[label].load(folder, name="mixture")

    windows = concatenate(heldout)
    arms = evaluate_arms(base, composition, windows, names, config, pooled)
    result = compose_report.Measured(
        names=names, heldout=heldout, arms=arms, top_k=config.top_k, router_reads=label_use
    )
    answer = routed_answer(base, composition, config)
    compose_report.draw(result, curves, answer, run.path)
    run.finish(
        metrics=compose_report.metrics(result),
        claims=compose_report.claims(result),
        report=compose_report.markdown(result, config, domains, answer),
    )


def windows_of(domains, tokenizer, config: Config):
    """Training windows of each domain; held-out windows of each, labelled, then the joined ones."""
    from molora_jax.training.data import joined_windows

    train = [
        packed(domain.train_docs, tokenizer, rows=config.train_rows, seq_len=config.adapter_len)
        for domain in domains
    ]
    heldout = [
        packed(domain.heldout_docs, tokenizer, rows=config.eval_rows, seq_len=config.eval_len)
        for domain in domains
    ]
    heldout = [windows.labelled(index) for index, windows in enumerate(heldout)]
    joined = joined_windows(heldout, config.eval_joined, seed=config.seed)
    return train, [*heldout, joined]


def packed(documents, tokenizer, *, rows: int, seq_len: int):
    """Up to `rows` full windows over as many documents, reading no further than needed.

    Of a long document one excerpt is taken, two windows long, a third into it: beginnings
    (licences, imports, headings) are alike and would make a domain look simpler than it is.
    """
    from molora_jax.training.data import pack

    texts, tokens = [], 0
    for document in documents:
        if tokens > rows * seq_len:
            break
        ids = tokenizer.encode(excerpt(document, 8 * seq_len) + "\n\n")[: 2 * seq_len]
        texts.append(ids)
        tokens += len(ids)
    windows = pack(texts, seq_len=seq_len, separator=None)
    full = windows.rows(windows.mask.all(axis=1))
    if not full.num_rows:
        raise ValueError(f"{len(texts)} documents give no window of {seq_len} tokens: shorten it")
    return full.rows(slice(0, rows))


def excerpt(document: str, length: int) -> str:
    """`length` characters from the line break after a third of the document; all of a short one."""
    if len(document) <= length:
        return document
    start = document.find("\n", (len(document) - length) // 3) + 1
    return document[start : start + length]


def trained_adapter(
    run, base, config: Config, windows: dict[str, Any], *, steps: int | None = None
):
    """PEFT folder and loss curve of one adapter: of one domain, or of several pooled.

    A pooled adapter has as many parameters as the single ones together.
    """
    from molora_jax.adapters import AdapterCard, save_adapter
    from molora_jax.training import train_adapter
    from molora_jax.training.data import concatenate

    name = "mixture" if len(windows) > 1 else next(iter(windows))
    training = config.adapter_training(pooled=len(windows), steps=steps)

    def make(folder):
        adapter, records = train_adapter(
            base, concatenate(list(windows.values())), training, name=name, run_dir=folder
        )
        card = AdapterCard(
            base=base.name,
            data=", ".join(windows),
            command=config.command,
            metrics={"train_loss": records[-1]["loss"]},
        )
        # overwrite: a kill before the artifact was published leaves the folder behind.
        save_adapter(adapter, folder / "adapter", card=card, overwrite=True)

    def load(folder):
        return folder / "adapter", read_curve(folder)

    data = {each: digest_of_windows(batch) for each, batch in windows.items()}
    return run.artifact(
        "adapter",
        config=training,
        digests={"base": base.digest, **data},
        make=make,
        load=load,
        phase=f"adapter/{name}",
    )


def trained_router(run, base, bank, train, config: Config):
    """The router, its loss curve, and where its training read the own-data label."""
    from safetensors.numpy import load_file, save_file

    from molora_jax.routing import build_router, router_arrays, router_config
    from molora_jax.training import train_router

    training = config.router_training()

    def make(folder):
        router, _ = train_router(base, bank, train, training, run_dir=folder)
        save_file(router_arrays(router), folder / "router.safetensors")
        (folder / "router.json").write_text(json.dumps(router_config(router)))

    def load(folder):
        settings = json.loads((folder / "router.json").read_text())
        router = build_router(settings, load_file(folder / "router.safetensors"))
        return router, read_curve(folder)

    columns = {each.name: each.digest for each in bank.list()}
    data = {f"data {at}": digest_of_windows(batch) for at, batch in enumerate(train)}
    router, curve = run.artifact(
        "router",
        config=training,
        digests={"base": base.digest, **columns, **data},
        make=make,
        load=load,
        phase="router",
    )
    return router, curve, training.label_use()


def evaluate_arms(base, composition, windows, names, config: Config, pooled) -> dict[str, Any]:
    """Every way to use the adapters, on the same held-out rows: {arm: Evaluation}.

    The routed arms keep their routing. All arms but the routed ones share one compiled function a
    number of adapters per token, the base among them.
    """
    from molora_jax.training import base_arm, evaluate, oracle_arm, single_arm, uniform_arm

    bank = composition.bank
    router = composition.router
    arms: dict[str, Any] = {"base": base_arm}
    arms |= {f"{name} only": single_arm(at) for at, name in enumerate(names)}
    arms |= {"uniform": uniform_arm(len(names)), "oracle": oracle_arm}
    arms |= {f"MoLoRA k={k}": router.with_top_k(k) for k in sorted({1, config.top_k})}
    # As many rows at once as divide them, so that no row is filled up.
    at_once = max(size for size in range(1, 9) if windows.num_rows % size == 0)
    measured = {}
    for label, arm in arms.items():
        measured[label] = evaluate(
            base.decoder,
            windows,
            batch_size=at_once,
            adapters=bank.stacks,
            router=arm,
            label=label,
            column_to_slot=composition.column_to_slot,
            return_routing=label.startswith("MoLoRA"),
        )
        print(f"held-out loss, {label}: {measured[label].nll:.4f}", flush=True)
    for label, one in pooled.items():
        measured[label] = evaluate(
            base.decoder, windows, adapters=one.stacks, router=single_arm(0), label=label
        )
        print(f"held-out loss, {label}: {measured[label].nll:.4f}", flush=True)
    return measured


@dataclasses.dataclass(frozen=True)
class Answer:
    """A generated text with the adapter of every token.

    pieces, ids  (n,) of prompt and answer;  prompt_tokens  how many are the prompt
    adapters     (n,) main adapter;  gates  (n, K) of every slot, mean over the later layers
    """

    pieces: list[str]
    ids: list[int]
    prompt_tokens: int
    adapters: Any
    gates: Any


def routed_answer(base, composition, config: Config) -> Answer:
    from molora_jax.generation import generate
    from molora_jax.routing.metrics import main_adapter, mean_gates

    prompt = base.tokenizer.encode(config.prompt)
    (generated,) = generate(
        base.decoder,
        [prompt],
        max_new_tokens=config.max_new_tokens,
        stop_ids=base.tokenizer.eos_ids,
        adapters=composition.bank.stacks,
        router=composition.router,
        column_to_slot=composition.column_to_slot,
    )
    ids = prompt + generated.tokens
    assert generated.routing is not None
    routing = (generated.routing.adapter_ids, generated.routing.gates)
    return Answer(
        pieces=base.tokenizer.pieces(ids),
        ids=ids,
        prompt_tokens=len(prompt),
        adapters=main_adapter(*routing),
        gates=mean_gates(*routing, num_slots=composition.bank.num_slots),
    )


def digest_of_windows(windows) -> str:
    digest = hashlib.sha256()
    for leaf in (windows.tokens, windows.mask, windows.weights):
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def read_curve(folder) -> list[dict]:
    """The records of a training run, one a step, as `fit` wrote them."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
