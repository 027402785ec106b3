"""How files spell their modules: what is understood, what is ambiguous, what is something else."""

import numpy as np
import pytest

from molora_jax.adapters import load_adapter, save_adapter
from tests.adapters.make import BASE, arrays_for, modules_of, peft_tensors, write_peft

QV = ("q_proj", "v_proj")
USUAL = "base_model.model.model."


def tensors():
    return peft_tensors(arrays_for(modules_of(projections=QV)))


def renamed(change):
    return {change(key): array for key, array in tensors().items()}


@pytest.fixture
def usual(tmp_path):
    return load_adapter(write_peft(tmp_path / "usual", tensors(), target_modules=QV))[0]


# One update under every name that PEFT, trainers and wrappers give it.
@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda k: k.replace(".weight", ".default.weight"), None),
        (lambda k: k.replace(".weight", ".my-task_2.weight"), "name in memory: 'my-task_2'"),
        (lambda k: k.replace(USUAL, "base_model.model."), "without its output layer"),
        (lambda k: k.replace(USUAL, "base_model.model.language_model.model."), "multimodal"),
        (lambda k: k.replace(USUAL, "base_model.model.model.language_model."), "multimodal"),
        (lambda k: k.replace(USUAL, "base_model.model.language_model."), "multimodal"),
        (lambda k: "module." + k, "parts were taken out of 12 keys"),
        (lambda k: k.replace(USUAL, "base_model.model._orig_mod.model."), "out of 12 keys"),
        (lambda k: k.replace(USUAL, "_orig_mod._orig_mod." + USUAL), "out of 12 keys"),
        (lambda k: k.replace(".self_attn", "._fsdp_wrapped_module.self_attn"), "out of 12 keys"),
        (
            lambda k: k.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
            "out of 12 keys",
        ),
        (lambda k: k.replace("_proj.", "_proj.base_layer."), "out of 12 keys"),
        (
            lambda k: k.replace(USUAL, "module.base_model.model.").replace("weight", "x.weight"),
            "name in memory: 'x'",
        ),
    ],
)
def test_every_real_spelling_gives_the_same_adapter(tmp_path, usual, change, note):
    folder = write_peft(tmp_path / "other", renamed(change), target_modules=QV)
    adapter, report = load_adapter(folder, config=BASE)
    assert adapter.digest == usual.digest
    assert report.warnings == report.unmatched == ()
    assert note is None or note in "; ".join(report.notes)
    assert note is not None or report.notes == ()
    # On the way out it has PEFT's usual names.
    assert load_adapter(save_adapter(adapter, tmp_path / "out"))[1].notes == ()


# A pattern is matched against the module's name in the base that the file was made for.
@pytest.mark.parametrize(
    ("prefix", "hits"),
    [
        (USUAL, {"^model.layers.0.self_attn.q_proj"}),
        ("base_model.model.", {"^layers.0.self_attn.q_proj"}),
        (
            "base_model.model.language_model.model.",
            {"^language_model.model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"},
        ),
    ],
)
def test_anchored_patterns_follow_the_files_own_spelling(tmp_path, prefix, hits):
    folder = write_peft(
        tmp_path / "in", renamed(lambda k: k.replace(USUAL, prefix)), target_modules=QV
    )
    keys = {
        f"^{start}layers.0.self_attn.q_proj" for start in ("", "model.", "language_model.model.")
    }
    for key in keys | hits:
        write_peft(
            folder, renamed(lambda k: k.replace(USUAL, prefix)), target_modules=QV,
            alpha_pattern={key: 30},
        )  # fmt: skip
        adapter, report = load_adapter(folder, config=BASE)
        hit = key in hits
        assert adapter.modules["layers.0.self_attn.q_proj"].scale == (10.0 if hit else 2.0)
        assert adapter.modules["layers.1.self_attn.q_proj"].scale == 2.0
        assert len(report.warnings) == (not hit)
        # Written under the usual names, where the anchored key may hit nothing, it is the same.
        again, _ = load_adapter(save_adapter(adapter, tmp_path / "out", overwrite=True))
        assert again.digest == adapter.digest


def test_targets_follow_the_files_own_spelling(tmp_path):
    bare = renamed(lambda k: k.replace(USUAL, "base_model.model."))
    folder = write_peft(tmp_path, bare, target_modules=r"layers\.\d+\.self_attn\.[qv]_proj")
    assert load_adapter(folder, config=BASE)[1].warnings == ()
    write_peft(tmp_path, bare, target_modules=r"model\.layers\.\d+\.self_attn\.[qv]_proj")
    assert "target_modules, exclude_modules or" in load_adapter(folder, config=BASE)[1].warnings[0]
    write_peft(tmp_path, bare, target_modules=r"layers\.\d+\.self_attn\.[qkv]_proj")
    with pytest.raises(ValueError, match=r"targets 3 modules .*layers\.0\.self_attn\.k_proj"):
        load_adapter(folder, config=BASE)


# Two spellings of one thing.
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k: k.replace(".weight", ".default.weight"), "two lora_A tensors"),
        (lambda k: k.replace(".weight", ".other.weight"), "two lora_A tensors"),
        (lambda k: k.replace(USUAL, "base_model.model."), "two lora_A tensors"),
        (lambda k: k.replace("_proj.", "_proj.base_layer."), "two lora_A tensors"),
    ],
)
def test_one_matrix_under_two_spellings_is_refused(tmp_path, change, said):
    both = tensors()
    key = next(iter(both))
    both[change(key)] = both[key] + 1
    with pytest.raises(ValueError, match=said):
        load_adapter(write_peft(tmp_path, both, target_modules=QV))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k: k.replace(".weight", ".other.weight"), r"several adapters: '', 'other'"),
        (lambda k: k.replace(USUAL, "base_model.model."), "spelt in different ways"),
    ],
)
def test_a_file_of_two_spellings_is_refused(tmp_path, change, said):
    mixed = renamed(lambda k: change(k) if ".1." in k else k)
    with pytest.raises(ValueError, match=said):
        load_adapter(write_peft(tmp_path, mixed, target_modules=QV))


@pytest.mark.parametrize(
    "prefix",
    ["", "model.", "language_model.", "base_model.", "base_model.model.transformer.model.",
     "base_model.model.base_model.model.model.", "base_model.model.model.text_model."],
)  # fmt: skip
def test_a_prefix_that_is_not_pefts_matches_nothing(tmp_path, prefix):
    folder = write_peft(tmp_path, renamed(lambda k: k.replace(USUAL, prefix)), target_modules=QV)
    with pytest.raises(ValueError, match=r"matched 0 of 6 modules\. 12 tensors") as error:
        load_adapter(folder, config=BASE)
    assert "nearest known: 'base_model.model.model.layers.0.self_attn" in str(error.value)


# Adapters of other makers: what it is, and the way out.
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda k: k.removeprefix("base_model.model.").lower().removesuffix(".weight"),
            "MLX.*transpose lora_a and lora_b",
        ),
        (
            lambda k: "lora_unet_" + k.replace(".lora_A", ".lora_down").replace("_B", "_up"),
            "kohya's scripts and diffusers.* adapts language models",
        ),
        (lambda k: k.replace("q_proj", "qkv_proj"), "fused projection.* train on the separate"),
        (lambda k: k.replace("self_attn.q_proj", "mlp.gate_up_proj"), "fused projection"),
        (lambda k: k.replace("self_attn.q_proj", "mlp.experts.0.up_proj"), "LoRA on experts"),
        (lambda k: k.replace("model.layers", "vision_tower.layers"), "part of a multimodal model"),
        (lambda k: k.replace("lora_A.weight", "lora_E"), "AdaLoRA"),
        (lambda k: k.replace("lora_A.weight", "hada_w1_a"), "other than LoRA"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, change, said):
    with pytest.raises(ValueError, match=rf"is refused: .*{said}"):
        load_adapter(write_peft(tmp_path, renamed(change), target_modules=QV))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "frozen weights of the base"),
        ("score.weight", "an output head"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "trained token embeddings"),
        ("model.layers.0._flat_param", "a shard of FSDP"),
        ("model.layers.0.self_attn.q_proj.lora_diag", "KaSA"),
        ("lm_head.modules_to_save.default.weight", "full weights"),
    ],
)
def test_what_else_stands_in_a_file_is_named(tmp_path, key, kind):
    extra = {f"base_model.model.{key}": np.ones((3, 3), np.float32)}
    with pytest.raises(ValueError, match=f"'base_model.model.{key}' .*{kind}"):
        load_adapter(write_peft(tmp_path, tensors() | extra, target_modules=QV))


def test_a_buffer_that_only_training_reads_is_passed_over_with_a_note(tmp_path, usual):
    extra = {f"{USUAL}layers.0.self_attn.q_proj.lora_velora_embed": np.ones(4, np.float32)}
    folder = write_peft(
        tmp_path / "x", tensors() | extra, target_modules=QV, velora_config={"num_groups": 2}
    )
    adapter, report = load_adapter(folder)
    assert adapter.digest == usual.digest
    assert report.unmatched == tuple(extra)
    assert "lora_velora_embed" in str(report)
    with pytest.raises(ValueError, match="holds no LoRA matrices"):
        load_adapter(write_peft(tmp_path / "y", extra, target_modules=QV))


def test_a_long_or_broken_name_stays_one_short_line(tmp_path):
    extra = {"x\n" * 5000: np.ones(1, np.float32)}
    with pytest.raises(ValueError, match="matched 6 of 7") as error:
        load_adapter(write_peft(tmp_path, tensors() | extra, target_modules=QV))
    assert len(str(error.value)) < 1500
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "model.layers.0.conv1d"])
def test_an_adapter_of_modules_that_are_not_adapted_here_matches_nothing(tmp_path, module):
    only = {
        f"base_model.model.{module}.lora_A.weight": np.ones((3, 10), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.ones((19, 3), np.float32),
    }
    folder = write_peft(tmp_path, only, target_modules=[module.rsplit(".", 1)[-1]])
    with pytest.raises(ValueError, match=r"matched 0 of 1 modules\. 2 tensors have no place"):
        load_adapter(folder, config=BASE)
