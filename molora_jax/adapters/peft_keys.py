"""How files spell a module's matrices, and words for whatever else they hold."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from molora_jax.adapters.names import (
    BASE_PREFIX,
    PROJECTIONS,
    TENSOR_PREFIX,
    brief,
    is_module,
    module_name,
    nearest,
    shortened,
    split_module,
    tensor_key,
)

# What a module's path in its base may begin with: the causal language model, the bare decoder
# inside it, or either as the language half of a multimodal model.
PREFIXES = (
    BASE_PREFIX,
    "",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.language_model.model.",
)
# Parts of a name that compilers, trainers and PEFT itself put around modules.
WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "base_layer"}
)
_KEY = re.compile(
    r"base_model\.model\.(?P<prefix>"
    + "|".join(re.escape(prefix) for prefix in sorted(PREFIXES, key=len, reverse=True))
    + r")(?P<module>layers\.[^\n]+?)\.lora_(?P<matrix>[AB])(?:\.(?P<name>[^.\n]+))?\.weight"
)
# VeLoRA's buffer, which only its training reads.
UNUSED = re.compile(r"[^\n]*\.lora_velora_embed(?:\.[^.\n]+)?")

_MERGE = (
    "Without these tensors it would be another adapter: merge it into its base with PEFT, correct "
    "the names, or train on these projections only"
)
# What else files hold: a sign in the key, what it is, and the way out where it is not the usual.
_KINDS: tuple[tuple[str, str, str], ...] = (
    (r"lora_magnitude_vector", "DoRA magnitudes", _MERGE),
    (r"lora_embedding_[AB]", "LoRA on an embedding", _MERGE),
    (r"\.bias$", "biases", _MERGE),
    (r"lm_head.*\.lora_[AB]", "LoRA on the output layer", _MERGE),
    (
        r"^lora_(unet|te|transformer)|lora_(down|up)|^(unet|transformer|text_encoder)\.",
        "LoRA of an image model, as kohya's scripts and diffusers name it",
        "This package adapts language models",
    ),
    (
        r"\.lora_[ab](\.|$)",
        "MLX's names",
        "MLX stores both matrices transposed and its scale elsewhere: convert the adapter to PEFT "
        "(transpose lora_a and lora_b, lora_alpha = scale * rank)",
    ),
    (
        r"(qkv_proj|gate_up_proj|query_key_value|c_attn|Wqkv|W_pack)\b",
        "LoRA on a fused projection",
        "This decoder keeps these projections apart: merge the adapter into its base with PEFT, or "
        "train on the separate ones",
    ),
    (r"\.experts\.|\.block_sparse_moe\.", "LoRA on experts", _MERGE),
    (r"vision|visual|image|audio|multi_modal", "another part of a multimodal model", _MERGE),
    (r"(ranknum|lora_E)", "AdaLoRA", _MERGE),
    (r"\.(hada|lokr)_w|\.oft_|\.ia3_|\.vera_|\.boft_", "a method other than LoRA", _MERGE),
    (r"\.lora_diag", "KaSA's diagonal", _MERGE),
    (r"trainable_tokens|token_adapter", "trained token embeddings", _MERGE),
    (
        r"_flat_param|flat_param_",
        "a shard of FSDP",
        "Gather the whole state before saving (FSDP: full_state_dict), then save with PEFT",
    ),
    (r"prompt_embeddings", "prompt tuning", "Prompts are not supported: train LoRA"),
    (r"\.base_layer\.weight$", "frozen weights of the base", _MERGE),
    (r"(^|\.)(score|classifier|qa_outputs|v_head)\.", "an output head", _MERGE),
    (
        r"modules_to_save|(lm_head|embed_tokens|norm)[\w.]*\.weight$",
        "full weights of a module",
        _MERGE,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A tensor's name in a file, understood.

    module   the module here, as `layers.3.self_attn.q_proj`
    matrix   "A" or "B"
    prefix   one of PREFIXES: prefix + module is the module's name in the file's own base
    adapter  the name that an adapter had in memory, where the key still holds it
    wrapped  whether parts of WRAPPERS stood in it
    """

    module: str
    matrix: str
    prefix: str
    adapter: str | None
    wrapped: bool


def parse_key(key: str) -> Key | None:
    """The meaning of a tensor's name; None where it is not a matrix of a module known here."""
    parts = key.split(".")
    kept = [part for part in parts if part not in WRAPPERS]
    match = _KEY.fullmatch(".".join(kept))
    if match is None or not is_module(match["module"]):
        return None
    return Key(
        module=match["module"],
        matrix=match["matrix"],
        prefix=match["prefix"],
        adapter=match["name"],
        wrapped=len(kept) < len(parts),
    )


def unmatched_message(
    unmatched: Collection[str], matched: Iterable[str], modules: Iterable[str], *, layers: int
) -> str:
    """What is wrong with a file of which tensors have no place: which, what they are, what to do.

    unmatched, matched  keys of the file    modules  those that were found    layers  of the base
    """
    # Hints for the first layers do: of a damaged file the number may be any.
    known = [
        tensor_key(module_name(layer, projection), matrix)
        for layer in range(min(layers, 64))
        for projection in PROJECTIONS
        for matrix in "AB"
    ]
    lines, remedies = [], dict[str, None]()
    for number, key in enumerate(sorted(unmatched)):
        kind = next((k for k in _KINDS if re.search(k[0], key)), None)
        remedies[kind[2] if kind else _MERGE] = None
        if number < 5:
            near = [] if kind else nearest(key[:200], known)
            hint = f" ({kind[1]})" if kind else f" (nearest known: {near[0]!r})" if near else ""
            lines.append(f"{brief(key, limit=200)}{hint}")
    if len(unmatched) > 5:
        lines.append(f"and {len(unmatched) - 5} more")
    modules = set(modules)
    others = {_stem(key) for key in unmatched} - {_stem(key) for key in matched}
    return (
        f"matched {len(modules)} of {len(modules) + len(others)} modules. {len(unmatched)} tensors "
        f"have no place: {'; '.join(lines)}. Expected LoRA matrices of {', '.join(PROJECTIONS)}, "
        f"named as {known[0]!r}. {'. '.join(remedies)}"
    )


def check_one_spelling(keys: dict[str, Key]) -> None:
    """Raises ValueError where a file spells its modules in two ways or holds several adapters."""
    seen: dict[tuple[str, str], str] = {}
    for name, key in keys.items():
        if (other := seen.setdefault((key.module, key.matrix), name)) != name:
            raise ValueError(
                f"{key.module} has two lora_{key.matrix} tensors, {brief(other, limit=200)} and "
                f"{brief(name, limit=200)}. Save one adapter per file"
            )
    adapters = sorted({key.adapter or "" for key in keys.values()})
    if len(adapters) > 1:
        raise ValueError(
            f"the keys name several adapters: {shortened(map(brief, adapters))}. Save one per file"
        )
    prefixes = {key.prefix: brief(name, limit=200) for name, key in keys.items()}
    if len(prefixes) > 1:
        one, other = [*prefixes.values()][:2]
        raise ValueError(
            f"modules of one base are spelt in different ways: {one} and {other}. Save them as one"
        )


def spelling_notes(keys: dict[str, Key]) -> list[str]:
    """What a reader should know of an unusual spelling, which is the same for all keys."""
    first = next(iter(keys.values()))
    notes = []
    if "language_model" in first.prefix:
        notes.append(
            f"the language half of a multimodal model (keys base_model.model.{first.prefix}layers)"
        )
    elif first.prefix != BASE_PREFIX:
        notes.append("made for the decoder without its output layer (base_model.model.layers)")
    if first.adapter not in (None, "default"):
        notes.append(f"the keys hold the adapter's name in memory: {brief(first.adapter)}")
    if wrapped := sum(key.wrapped for key in keys.values()):
        notes.append(f"wrappers' parts were taken out of {wrapped} keys ({TENSOR_PREFIX}...)")
    return notes


def last_layer(modules: Iterable[str]) -> int:
    """The highest layer among modules, 0 where there are none."""
    return max((split_module(module)[0] for module in modules), default=0)


def _stem(key: str) -> str:
    return re.split(r"\.lora_|\.(?:bias|weight)$", key)[0]
