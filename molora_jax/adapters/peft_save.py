"""Writing a PEFT folder: safetensors, a complete config and a card, checked by reading it back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.numpy import save as safetensors_bytes

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.folders import new_folder
from molora_jax.adapters.names import tensor_key
from molora_jax.adapters.peft_folder import ADAPTER_FILES, CARD_FILE, CONFIG_FILE, WEIGHTS_FILE
from molora_jax.adapters.peft_load import load_adapter
from molora_jax.adapters.report import LoadReport, public_base_name


@dataclass(frozen=True, kw_only=True)
class AdapterCard:
    """What the README of a saved adapter tells its next user."""

    base: str
    data: str
    command: str
    metrics: Mapping[str, int | float] = field(default_factory=dict)


def save_adapter(
    adapter: Adapter,
    path: str | Path,
    *,
    card: AdapterCard | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes a PEFT folder, whole or not at all, and reads it back before it appears.

    Tensors are written in the dtype they have, under PEFT's names. The config is the adapter's own
    where it describes the modules, and else made to: mixed ranks and scales become patterns. Its
    router statistics, if it has some, lie beside it. The re-read must give the same digest, which
    covers weights, modules and scales.

    Raises ValueError for an adapter that is broken (NaN) or cannot be described (a scale that no
    alpha gives), so that its next user is not the one who finds out.

        >>> folder = mj.save_adapter(code, tmp / "code")
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'adapter_config.json', 'adapter_model.safetensors']
    """
    with new_folder(path, owned=ADAPTER_FILES, overwrite=overwrite) as folder:
        write_adapter(adapter, folder, card=card)
    return Path(path)


def write_adapter(adapter: Adapter, folder: Path, *, card: AdapterCard | None = None) -> None:
    """Writes the files into an existing folder, and checks them; see `save_adapter`."""
    adapter.check_finite()
    tensors = {
        tensor_key(module, matrix): getattr(pair, matrix.lower())
        for module, pair in adapter.modules.items()
        for matrix in "AB"
    }
    config = {**adapter.described(), "peft_type": "LORA", "inference_mode": True}
    # Written by hand, since safetensors' own save_file makes a file that only its owner can read.
    (folder / WEIGHTS_FILE).write_bytes(safetensors_bytes(tensors, metadata={"format": "pt"}))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(_card_text(adapter, card), encoding="utf-8")
    if adapter.statistics is not None:
        adapter.statistics.write(folder)
    written, _ = load_adapter(folder, name=adapter.name)
    if written.digest != adapter.digest:
        raise OSError(
            f"adapter {adapter.name!r} is not saved: read back from {folder}, it is another one. "
            "Check the disk and save it again"
        )


def _card_text(adapter: Adapter, card: AdapterCard | None) -> str:
    base = public_base_name(adapter.config.get("base_model_name_or_path"))
    front = ["---", "library_name: peft", "tags: [lora]"]
    if base and "/" in base:
        front.append(f"base_model: {json.dumps(base)}")
    report = LoadReport.of(adapter)
    ranks = sorted({rank for ranks in report.ranks.values() for rank in ranks})
    scales = sorted({scale for scales in report.scales.values() for scale in scales})
    lines = [
        *front,
        "---",
        "",
        f"# {adapter.name}",
        "",
        "A LoRA adapter in PEFT's format.",
        "",
        f"- Base: {card.base if card else base or 'not stated'}",
        f"- Projections: {', '.join(adapter.projections)}",
        f"- Rank: {', '.join(map(str, ranks))}; scale: {', '.join(f'{s:.6g}' for s in scales)}",
        f"- Digest: sha256:{adapter.digest}",
    ]
    if card:
        lines += [f"- Data: {card.data}", "", "## Made by", "", "```", card.command, "```"]
        if card.metrics:
            lines += ["", "## Metrics", "", "| metric | value |", "|---|---|"]
            lines += [f"| {name} | {value:.6g} |" for name, value in card.metrics.items()]
    return "\n".join(lines) + "\n"
