"""Every field of PEFT's LoraConfig (0.21.2): which are read, which cannot matter, which refuse."""

from collections.abc import Mapping
from typing import Any

from molora_jax.adapters.names import brief, nearest, shortened

# Each changes what the adapter computes: the values under which it does not, and the way out.
_MERGE = "merge it into its base with PEFT (merge_and_unload) and load the result as a base"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), f"DoRA rescales every output row; {_MERGE}, or train plain LoRA"),
    "bias": (("none",), f"trained biases are not supported; {_MERGE}, or train with bias='none'"),
    "lora_bias": ((False,), f"a bias on lora_B is not supported; {_MERGE}"),
    "modules_to_save": (([],), f"fully trained modules are not supported; {_MERGE}"),
    "trainable_token_indices": (([], {}), f"trained token embeddings are not supported; {_MERGE}"),
    "target_parameters": (([],), f"LoRA on bare parameters is not supported; {_MERGE}"),
    "fan_in_fan_out": ((False,), "Llama and Qwen bases store weights (out, in): set it to false"),
    "layer_replication": (([],), f"replicated layers are not supported; {_MERGE}"),
    "alora_invocation_tokens": (([],), "activated LoRA starts in mid-sequence; retrain without it"),
    "use_qalora": ((False,), f"QALoRA pools the input; {_MERGE}"),
    "use_bdlora": ((False, {}), f"block-diagonal LoRA is not supported; {_MERGE}"),
    "arrow_config": (
        (False, {}),
        "Arrow mixes other adapters; load those and put a router over them",
    ),
    "monteclora_config": ((False, {}), f"MonteCLoRA samples its weights; {_MERGE}"),
    "kasa_config": ((False, {}), f"KaSA adds a diagonal between B and A; {_MERGE}"),
}
READ = frozenset(
    {
        *("peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha"),
        *("use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "init_lora_weights"),
        # Of no effect, and in every file: not worth a note.
        *("inference_mode", "peft_version"),
    }
)
# They concern training, or another setting that is refused; noted where set. VeLoRA changes only
# the backward pass of A.
NO_EFFECT = frozenset(
    {
        *("auto_mapping", "lora_dropout", "megatron_config", "megatron_core", "loftq_config"),
        *("runtime_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("qalora_group_size", "ensure_weight_tying"),
    }
)
# Written before PEFT 0.3 and gone since.
OLD = frozenset({"merge_weights"})
KNOWN = READ | NO_EFFECT | frozenset(REFUSED)

# How training began. These leave the base as it is; PEFT redoes the others when it loads the file,
# on the base's own weights, so that an adapter which was not converted means another base.
_BASE_KEEPING_INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")

_HEADS = {
    "SEQ_CLS": "a classification head",
    "TOKEN_CLS": "a token classification head",
    "QUESTION_ANS": "a span head",
}
# Other trainers write a file of the same name.
_FOREIGN = {
    "lora_parameters": "MLX, whose matrices are transposed and whose scale is stored otherwise",
    "fine_tune_type": "MLX, whose matrices are transposed and whose scale is stored otherwise",
    "ss_network_module": "kohya's scripts, made for image models",
}


def check_fields(config: Mapping[str, Any], *, where: str) -> tuple[list[str], list[str]]:
    """Notes and warnings on the fields that `LoraSettings` does not hold.

    Raises ValueError for one that would change the result, named, with its value and a way out: a
    known one where it differs from PEFT's default (or from off), an unknown one where it is not
    null, false or empty.
    """
    notes: list[str] = []
    warnings: list[str] = []
    for name, trainer in _FOREIGN.items():
        if name in config and "peft_type" not in config:
            raise ValueError(f"{where}: {name!r} is a field of {trainer}; convert it to PEFT")
    kind = config.get("peft_type")
    if kind is None:
        warnings.append("peft_type is missing; read as LORA")
    elif kind != "LORA":
        raise ValueError(
            f"{where}: peft_type is {brief(kind)}; only 'LORA' is supported. Where that method can "
            f"be merged, {_MERGE}"
        )
    _check_task(config.get("task_type"), where, notes)
    for name, value in refused_fields(config).items():
        raise ValueError(f"{where}: {name} is {brief(value)}; {REFUSED[name][1]}")
    if ignored := sorted(name for name in NO_EFFECT | OLD if config.get(name)):
        notes.append("without effect on the result: " + ", ".join(ignored))
    if revision := config.get("revision"):
        notes.append(f"revision {brief(revision)} of the base is not compared with the one in use")
    _check_unknown(config, where, notes)
    init = config.get("init_lora_weights")
    if not any(init is value or init == value for value in _BASE_KEEPING_INITS):
        known = isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS)
        warnings.append(
            f"init_lora_weights is {brief(init)}: such training "
            + ("changes" if known else "may change")
            + " the base too, and PEFT does it again on loading. Here the base stays as it is, so "
            "the result is another one unless this is the base that training left: convert the "
            "adapter to plain LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    return notes, warnings


def refused_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of REFUSED that are set to what makes the adapter another kind than plain LoRA."""
    found = {}
    for name, (neutral, _) in REFUSED.items():
        value = config.get(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in neutral):
            found[name] = value
    return found


def _check_task(task: Any, where: str, notes: list[str]) -> None:
    if task in (None, "CAUSAL_LM"):
        return
    if task == "FEATURE_EXTRACTION":
        notes.append("task_type is FEATURE_EXTRACTION: trained for hidden states, not for text")
        return
    if isinstance(task, str) and task in _HEADS:
        raise ValueError(
            f"{where}: task_type is {task!r}, which trains {_HEADS[task]} beside the LoRA; only "
            "CAUSAL_LM is supported. Without the head its outputs mean nothing"
        )
    raise ValueError(
        f"{where}: task_type is {brief(task)}; expected 'CAUSAL_LM', 'FEATURE_EXTRACTION' or null"
    )


def _check_unknown(config: Mapping[str, Any], where: str, notes: list[str]) -> None:
    unknown = {name: value for name, value in config.items() if name not in KNOWN | OLD}
    unset: tuple[Any, ...] = (None, [], {}, "")
    neutral = [name for name, value in unknown.items() if value in unset or value is False]
    if refused := [name for name in unknown if name not in neutral]:
        name = refused[0]
        near = nearest(name, KNOWN)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"{where}: unknown field {brief(name)} is {brief(unknown[name])}{hint}. It may "
            "change what the adapter computes, so it is refused; remove it, or set it to null, if "
            "it does not"
        )
    if neutral:
        notes.append("unknown fields, unset: " + shortened(sorted(neutral), limit=20))
