"""Targets: JSON and safetensors files alone, adapter folders, compositions."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from molora_jax.adapters import Adapter, AdapterBank, Composition, load_adapter
from molora_jax.files import MAX_DEPTH, read_json, read_safetensors
from molora_jax.models import ModelConfig
from tests.fuzz import oracle
from tests.fuzz.guard import attempt
from tests.fuzz.mutate import (
    Files,
    damaged,
    dumped,
    folders,
    json_texts,
    json_trees,
    safetensors_bytes,
    safetensors_files,
)
from tests.fuzz.targets import Target, laid_out, seen_content, workplace

SHAPE = ModelConfig(
    model_type="llama", vocab_size=19, hidden_size=10, intermediate_size=7, num_layers=2,
    num_heads=2, num_kv_heads=1, head_dim=6,
)  # fmt: skip
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = [
    f"layers.{layer}.{each}"
    for layer in (0, 1)
    for each in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
SETTINGS = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base", "r": 3,
    "lora_alpha": 6, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {"v_proj": 5},
    "target_modules": ["q_proj", "v_proj", "down_proj"], "bias": "none", "lora_dropout": 0.1,
    "inference_mode": True, "modules_to_save": None, "init_lora_weights": True,
}  # fmt: skip
# Names of modules as patterns, among them some that Python would try for years.
PATTERNS = (
    *("([a-z._0-9]+)+X", "(.*)*X", "(\\w|.x|.)+X", ".*" * 9 + "X", "(", "[[a]", "(?i)q_proj"),
    *("q_proj|", "", "^v_proj", ".*", "v", "[qv]_proj", "a{99999}", "\\d+", "x" * 300),
)
FIELDS = (*oracle.MUST_BE_OFF, *oracle.HARMLESS, "layers.0.self_attn.q_proj", "surprise")
NAMES = (CONFIG, WEIGHTS, "adapter")


def peft_weights(rank: int = 3, *, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    arrays = {}
    for module in MODULES:
        D, F = SHAPE.projection_sizes()[module.rsplit(".", 1)[1]]
        for matrix, size in (("A", (rank, D)), ("B", (F, rank))):
            key = f"base_model.model.model.{module}.lora_{matrix}.weight"
            arrays[key] = rng.normal(size=size).astype(np.float32)
    return safetensors_bytes(arrays, {"format": "pt"})


GOOD: Files = {CONFIG: dumped(SETTINGS), WEIGHTS: peft_weights()}
KEYS = [f"base_model.model.model.{module}.lora_A.weight" for module in MODULES[:2]]
KEYS += [
    "base_model.model.layers.0.self_attn.k_proj.lora_A.weight",
    "base_model.model.model.layers.01.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight",
    "base_model.model.lm_head.weight",
    "__metadata__",
]
# A base's weights, and the adapter of another base, where this one's belong.
OTHERS = (
    safetensors_bytes({"model.embed_tokens.weight": np.ones((19, 10), np.float32)}),
    peft_weights(rank=2),
    safetensors_bytes({}),
    safetensors_bytes({k: np.full((3, 10), np.nan, np.float32) for k in KEYS[:1]}),
)


@st.composite
def _with_patterns(draw) -> bytes:
    settings = dict(SETTINGS)
    pattern = st.sampled_from(PATTERNS) | st.from_regex(
        r"[a-z.*+|()?\[\]\\^$]{1,9}", fullmatch=True
    )
    field = draw(
        st.sampled_from(("rank_pattern", "alpha_pattern", "target_modules", "layers_pattern"))
    )
    if field.startswith(("rank", "alpha")):
        settings[field] = {draw(pattern): draw(st.sampled_from((3, 3, 6, 0, "3")))}
    else:
        settings[field] = draw(pattern)
        settings["layers_to_transform"] = draw(
            st.sampled_from((None, None, 0, [0, 1], [True], "0"))
        )
    return dumped(settings)


def _check_adapter(files: Files, folder: Path) -> bool:
    laid_out(files, folder)
    outcome = attempt(
        lambda: load_adapter(folder, config=SHAPE), folder=folder, names=(*NAMES, folder.name)
    )
    if outcome.refusal is not None:
        return False
    adapter, report = outcome.value
    config, weights = (seen_content(folder, name) for name in (CONFIG, WEIGHTS))
    oracle.check_adapter(adapter, config, weights, SHAPE.num_layers)
    assert report is not None
    return True


def _check_json(text: bytes, folder: Path) -> bool:
    path = folder / "some.json"
    path.write_bytes(text)
    outcome = attempt(
        lambda: read_json(path, where=str(path), root=folder), folder=folder, names=("some.json",)
    )
    if outcome.refusal is not None:
        return False
    expected = oracle.tree(text)
    assert repr(outcome.value) == repr(expected)
    assert _depth(expected) <= MAX_DEPTH and "nan" not in repr(list(_numbers(expected)))
    return True


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _numbers(value: Any):
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, float):
        assert math.isfinite(value)
        yield value


def _check_safetensors(content: bytes, folder: Path) -> bool:
    path = folder / "some.safetensors"
    path.write_bytes(content)

    def call():
        file = read_safetensors(path, where=str(path), root=folder)
        return {key: (file.get(key), file.shape(key)) for key in file.keys()}  # noqa: SIM118

    outcome = attempt(call, folder=folder, names=("some.safetensors",))
    if outcome.refusal is not None:
        return False
    expected = oracle.tensors(content)
    assert set(outcome.value) == set(expected)
    for key, (array, shape) in outcome.value.items():
        assert oracle.same(array, expected[key]) and shape == array.shape
    return True


# --- compositions --------------------------------------------------------------------------------
RECORD, ROUTER = "molora.json", "router.safetensors"


@functools.cache
def _base() -> Any:
    from molora_jax.models import load_base

    return load_base("tiny-random")


@functools.cache
def _composition(kind: str) -> Files:
    """The files of a good composition with two adapters."""
    from flax import nnx

    from molora_jax.routing import LearnedRouter, VocabularyRouter

    base = _base()
    bank = AdapterBank(base.config, num_slots=3, max_rank=2, projections=("q_proj", "down_proj"))
    digests = []
    for seed, name in enumerate(("a", "b")):
        rng = np.random.default_rng(seed)
        D, F = base.config.projection_sizes()["q_proj"]
        arrays = {
            f"layers.{layer}.self_attn.q_proj": (
                rng.normal(size=(2, D)).astype(np.float32),
                rng.normal(size=(F, 2)).astype(np.float32),
            )
            for layer in range(base.config.num_layers)
        }
        layers = base.config.num_layers
        adapter = Adapter.from_arrays(name, arrays, alpha=seed + 1, num_layers=layers)
        bank.load(adapter)
        digests.append(adapter.digest)
    if kind == "learned":
        size, layers = base.config.hidden_size, base.config.num_layers
        router = LearnedRouter(size, 2, top_k=1, num_layers=layers, rngs=nnx.Rngs(1))
    else:
        table = np.arange(base.config.vocab_size, dtype=np.int32) % 3 - 1
        router = VocabularyRouter(table, num_columns=2)
    made = Composition(
        base_name=base.name,
        base_digest=base.digest,
        bank=bank,
        router=router,
        column_digests=digests,
        metrics={"nll": 1.5},
    )
    folder = made.save(workplace() / f"composition-{kind}")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@st.composite
def _compositions(draw) -> Files:
    good = _composition(draw(st.sampled_from(("learned", "vocabulary"))))
    files = dict(good)
    match draw(st.integers(0, 5)):
        case 0:
            return draw(folders(good))
        case 1 | 2:
            keys = ("kind", "top_k", "num_columns", "hidden_size", "name", "slot", "sha256", "x")
            files[RECORD] = draw(json_texts(json.loads(good[RECORD]), keys))
        case 3:
            record = json.loads(good[RECORD])
            part = draw(st.sampled_from(("router", "bank", "adapters", "columns", "base")))
            record[part] = draw(json_trees(record[part], ("num_slots", "max_rank", "kind", "bias")))
            files[RECORD] = dumped(record)
        case 4:
            files[ROUTER] = draw(safetensors_files(good[ROUTER], ("table", "weight", "bias")))
        case 5:
            name = draw(st.sampled_from([each for each in sorted(good) if "adapters" in each]))
            files[name] = draw(damaged(good[name]))
    return files


def _check_composition(files: Files, folder: Path) -> bool:
    laid_out(files, folder)
    base = _base()
    outcome = attempt(
        lambda: Composition.load(folder, base), folder=folder, names=(folder.name, *NAMES, RECORD)
    )
    if outcome.refusal is not None:
        return False
    found: Composition = outcome.value
    record = oracle.tree(seen_content(folder, RECORD))
    arrays = oracle.tensors(seen_content(folder, ROUTER))
    assert record["base"]["sha256"] == base.digest == found.base_digest
    assert list(found.column_digests) == record["columns"]
    assert found.bank.num_slots == record["bank"]["num_slots"]
    assert found.bank.max_rank == record["bank"]["max_rank"]
    assert sorted(found.bank.projections) == sorted(set(record["bank"]["projections"]))
    listed = {(each.slot, each.name, each.digest) for each in found.bank.list()}
    assert listed == {(each["slot"], each["name"], each["sha256"]) for each in record["adapters"]}
    for each in found.bank.list():
        inner = Path("adapters") / each.name
        config, weights = (seen_content(folder, str(inner / n)) for n in (CONFIG, WEIGHTS))
        oracle.check_adapter(each.adapter, config, weights, base.config.num_layers)
    router = {
        name: np.asarray(value[...])
        for name, value in vars(found.router).items()
        if hasattr(value, "get_value") or type(value).__name__ in ("RouterData", "Param")
    }
    assert set(router) == set(arrays), (set(router), set(arrays))
    for name, array in arrays.items():
        assert router[name].shape == array.shape
        assert np.array_equal(router[name], array.astype(router[name].dtype))
        assert np.array_equal(array.astype(router[name].dtype).astype(array.dtype), array), name
    settings = dict(record["router"])
    settings.pop("kind")
    for name, value in settings.items():
        assert getattr(found.router, name, value) == value, name
    return True


def targets() -> list[Target]:
    config = st.builds(
        lambda text: {**GOOD, CONFIG: text}, json_texts(SETTINGS, FIELDS) | _with_patterns()
    )
    weights = st.builds(
        lambda content: {**GOOD, WEIGHTS: content}, safetensors_files(GOOD[WEIGHTS], KEYS)
    )
    return [
        Target("json", json_texts(SETTINGS, FIELDS), _check_json, 8),
        Target("safetensors", safetensors_files(GOOD[WEIGHTS], KEYS), _check_safetensors, 12),
        Target("adapter_config", config, _check_adapter, 16),
        Target("adapter_weights", weights, _check_adapter, 14),
        Target("adapter_folder", folders(GOOD, OTHERS), _check_adapter, 6),
        Target("composition", _compositions(), _check_composition, 4),
    ]
