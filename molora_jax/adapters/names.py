"""The seven projections an adapter may touch, and how their modules are called in files."""

import difflib
import re
from collections.abc import Iterable

_PARENTS = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
PROJECTIONS = tuple(_PARENTS)

# PEFT wraps the causal language model twice (`base_model.model.`); `model.` is the base's own.
BASE_PREFIX = "model."
TENSOR_PREFIX = "base_model.model." + BASE_PREFIX

_MODULE = re.compile(r"layers\.(\d{1,4})\.(self_attn|mlp)\.(\w+)", re.ASCII)


def module_name(layer: int, projection: str) -> str:
    """`layers.3.self_attn.q_proj`."""
    return f"layers.{layer}.{_PARENTS[projection]}.{projection}"


def is_module(name: str) -> bool:
    """Whether it is the name of one of the adaptable modules."""
    match = _MODULE.fullmatch(name)
    return match is not None and match[3] in _PARENTS and name == module_name(*split_module(name))


def split_module(name: str) -> tuple[int, str]:
    """The layer and the projection of a module's name."""
    _, layer, _, projection = name.split(".")
    return int(layer), projection


def tensor_key(module: str, matrix: str) -> str:
    """The name of a module's `A` or `B` in adapter_model.safetensors."""
    return f"{TENSOR_PREFIX}{module}.lora_{matrix}.weight"


def check_label(name: str) -> str:
    """Returns a name that can also be a folder and half of `base:adapter`; raises otherwise."""
    if not isinstance(name, str) or not name.strip() or re.search(r"[/\\:\x00-\x1f]", name):
        raise ValueError(
            f"adapter name {brief(name)} is not usable: it names a folder and a model over HTTP, "
            "so it must not be empty or hold '/', '\\', ':' or control characters. Pass another "
            "name="
        )
    if name.startswith("."):
        raise ValueError(
            f"adapter name {brief(name)} must not start with a dot. Pass another name="
        )
    return name


def nearest(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """The known names most like `name`, best first; empty where none is alike."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def brief(value: object, *, limit: int = 80) -> str:
    """repr(value) for a message: one line, cut in its middle where it is long."""
    text = repr(value)
    text = text if text.isprintable() else " ".join(text.split())  # an array's has lines
    return text if len(text) <= limit else f"{text[: limit - 21]}…{text[-20:]}"


def shortened(items: Iterable[object], *, limit: int = 5) -> str:
    """A list for a message: the first few items and how many more there are."""
    texts = [str(item) for item in items]
    texts = [each if each.isprintable() and len(each) <= 200 else brief(each) for each in texts]
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest
