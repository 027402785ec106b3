"""Bodies of /v1/completions and /v1/chat/completions, and the engine's requests that they mean."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from molora_jax.generation import Engine, Request, Sampling
from molora_jax.generation.request import MAX_LOGPROBS
from molora_jax.generation.sampling import MIN_TEMPERATURE
from molora_jax.serving.catalog import Catalog, Target
from molora_jax.serving.errors import ApiError, refused
from molora_jax.serving.fields import ANYTHING, Fields
from molora_jax.serving.inputs import read_messages, read_prompts

MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_SEED = 2**32 - 1
_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; a chat may fill the context

# Fields of OpenAI's and vLLM's clients that ask for nothing, or for what is done anyway.
_NEUTRAL: dict[str, Any] = {
    "user": ANYTHING,
    "metadata": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "echo": (False,),
    "adapter_weights": (),
    "lora": (),
    "lora_path": (),
}
_COMPLETION_NEUTRAL = _NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,)}
_CHAT_NEUTRAL = _NEUTRAL | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": ANYTHING,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A request over HTTP, understood.

    model          as the client wrote it
    requests       one for each choice, in the order of their indices
    prompt_tokens  of all prompts, each counted once
    include_usage  a last chunk with the counts
    """

    model: str
    target: Target
    requests: list[Request]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    return_routing: bool


def read_completion(body: Any, catalog: Catalog, engine: Engine) -> Ask:
    """What the body of a completion asks. Raises ApiError, naming the field."""
    fields = Fields(body)
    model, target = _model(fields, catalog)
    prompts = read_prompts(fields.take("prompt"), engine)
    logprobs = fields.whole("logprobs", least=0, most=MAX_LOGPROBS)
    n = _choices(fields, len(prompts), engine)
    if fields.whole("best_of", least=1) not in (None, n):
        raise refused(
            f"best_of is not supported: only n, which is {n}", param="best_of",
            code="unsupported_parameter",
        )  # fmt: skip
    most = fields.whole("max_tokens", least=1)
    most = _DEFAULT_TOKENS if most is None else most
    return _ask(
        fields, model, target, prompts, engine, neutral=_COMPLETION_NEUTRAL, param="prompt",
        n=n, logprobs=logprobs, max_tokens=most,
    )  # fmt: skip


def read_chat(body: Any, catalog: Catalog, engine: Engine) -> Ask:
    """What the body of a chat completion asks. Raises ApiError, naming the field."""
    fields = Fields(body)
    model, target = _model(fields, catalog)
    messages = read_messages(fields.take("messages"))
    try:
        prompt = engine.base.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except ValueError as error:
        raise refused(str(error), param="messages") from None
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", least=0, most=MAX_LOGPROBS)
    if top and not wanted:
        raise refused("top_logprobs is given without logprobs: true", param="top_logprobs")
    n = _choices(fields, 1, engine)
    most = fields.whole("max_completion_tokens", least=1)
    older = fields.whole("max_tokens", least=1)
    if None not in (most, older) and most != older:
        raise refused(
            f"max_tokens is {older} and max_completion_tokens {most}: give one", param="max_tokens"
        )
    most = older if most is None else most
    return _ask(
        fields, model, target, [prompt], engine, neutral=_CHAT_NEUTRAL, param="messages",
        n=n, logprobs=(top or 0) if wanted else None, max_tokens=most,
    )  # fmt: skip


def _ask(
    fields: Fields,
    model: str,
    target: Target,
    prompts: list[list[int]],
    engine: Engine,
    *,
    neutral: Mapping[str, Any],
    param: str,
    n: int,
    logprobs: int | None,
    max_tokens: int | None,
) -> Ask:
    """The fields that both have."""
    temperature = fields.number("temperature", default=1.0, least=0.0, most=2.0)
    top_p = fields.number("top_p", default=1.0, least=0.0, most=1.0)
    if not top_p:
        raise refused("top_p is 0; expected more than 0, at most 1", param="top_p")
    # More than there are tokens is all of them, and must not reach a 32-bit number.
    top_k = min(max(fields.whole("top_k", least=-1) or 0, 0), engine.base.config.vocab_size)
    sampling = Sampling(
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature, top_k=top_k, top_p=top_p
    )
    seed = fields.whole("seed", least=0, most=MAX_SEED)
    among = fields.texts("adapters", most=1000, longest=1000)
    if among is not None and target.profile is None:
        raise refused(
            f"adapters chooses among those of a learned routing profile; the model "
            f"{target.label!r} is none: name the adapter as model",
            param="adapters",
        )
    common: dict[str, Any] = {
        "sampling": sampling,
        "stop": tuple(fields.texts("stop", most=MAX_STOPS, longest=MAX_STOP_LENGTH) or ()),
        "ignore_eos": fields.flag("ignore_eos"),
        "logprobs": logprobs,
        "adapter": target.adapter,
        "profile": target.profile,
        "among": among,
    }
    stream, include_usage = fields.flag("stream"), _include_usage(fields.take("stream_options"))
    if include_usage and not stream:
        raise refused("stream_options is given without stream: true", param="stream_options")
    return_routing = fields.flag("return_routing")
    fields.finish(neutral)
    requests = []
    for index, prompt in enumerate(prompts):
        first = secrets.randbits(32) if seed is None else seed
        most = engine.context - len(prompt) if max_tokens is None else max_tokens
        _check_length(
            len(prompt), most, engine, param if len(prompts) == 1 else f"{param}[{index}]"
        )
        try:
            requests += Request(prompt=prompt, max_tokens=most, seed=first, **common).samples(n)
        except ValueError as error:
            raise refused(str(error)) from None
    return Ask(
        model=model,
        target=target,
        requests=requests,
        prompt_tokens=sum(map(len, prompts)),
        stream=stream,
        include_usage=include_usage,
        return_routing=return_routing,
    )


def _model(fields: Fields, catalog: Catalog) -> tuple[str, Target]:
    model = fields.text("model")
    return model, catalog.target(model)


def _choices(fields: Fields, prompts: int, engine: Engine) -> int:
    n = fields.whole("n", least=1) or 1
    if n * prompts > engine.max_waiting:
        raise refused(
            f"{prompts} prompts with n {n} are {n * prompts} answers; the queue takes "
            f"{engine.max_waiting}: send several requests",
            param="n",
        )
    return n


def _check_length(prompt: int, max_tokens: int, engine: Engine, param: str) -> None:
    """ApiError with all numbers where a prompt and its answer exceed the context."""
    if prompt + max(max_tokens, 1) <= engine.context:
        return
    asked = f" and max_tokens {max_tokens}" if max_tokens > 0 else ""
    raise refused(
        f"{param} has {prompt} tokens{asked}; both together may have {engine.context}, the context "
        "of this server: shorten the prompt or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def _include_usage(value: Any) -> bool:
    if value is None:
        return False
    try:
        fields = Fields(value)
        wanted = fields.flag("include_usage")
        fields.finish({"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    except ApiError as error:
        raise refused(f"stream_options: {error.message}", param="stream_options") from None
    return wanted
