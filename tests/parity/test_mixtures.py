"""Mixtures of peft, Arrow and X-LoRA, against our routing where the rule is the same.

The gates are computed here from the published formulas with numbers of our own (singular vectors by
numpy, the hidden state by our decoder), never taken from peft.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import Adapter, save_adapter
from molora_jax.layers import rms_norm
from molora_jax.routing import FixedRouter
from molora_jax.routing.fixed import RouterData
from molora_jax.routing.select import select
from pallas_kernels import Routing, lora_delta
from tests.parity.adapters import base_model, base_prompts, lora_values
from tests.parity.decoding import both_sides, our_logits, their_logits, their_model
from tests.parity.random_models import padded
from tests.parity.test_adapters import VISIBLE, bank_of, compare

pytestmark = [
    pytest.mark.parity,
    # Other people's packages, imported here alone.
    pytest.mark.filterwarnings("ignore"),
]
C, TOP_K, TEMPERATURE = 3, 2, 0.4


def experts(decoder, projections, folder) -> tuple[list[Adapter], list[str]]:
    """C adapters of one rank, and the PEFT folders of them.

    Each update has one large singular value: peft finds the singular vector by 15 steps from a
    random start, which then is exact.
    """
    adapters = []
    for seed in range(C):
        arrays = {}
        for layer in range(decoder.config.num_layers):
            for name in projections:
                D, F = decoder.config.projection_sizes()[name]
                kind = "self_attn" if name[0] in "qkvo" else "mlp"
                module = f"layers.{layer}.{kind}.{name}"
                a = lora_values(f"{module}.A", (4, D), seed=seed)
                b = lora_values(f"{module}.B", (F, 4), seed=seed)
                a[0] *= 6.0
                arrays[module] = (a, 0.5 * b)
        adapters.append(Adapter.from_arrays(f"expert{seed}", arrays, alpha=4))
    return adapters, [str(save_adapter(each, folder / each.name)) for each in adapters]


def prototypes(adapters, module) -> np.ndarray:
    """(C, D): the right singular vector of each adapter's update of a module."""
    pairs = [adapter.modules[module] for adapter in adapters]
    svd = [np.linalg.svd(pair.b.astype(np.float64) @ pair.a.astype(np.float64)) for pair in pairs]
    return np.stack([vt[0] for _, _, vt in svd]).astype(np.float32)


def arrow_model(folder, paths):
    from peft import ArrowConfig, create_arrow_model

    config = ArrowConfig(top_k=TOP_K, router_temperature=TEMPERATURE, rng_seed=3)
    return create_arrow_model(their_model(folder), paths, config).eval()


class ArrowRule(nnx.Module):
    """|x·p| of a layer's normalised input with each prototype, over a temperature, to `select`."""

    def __init__(self, norms, protos, *, eps: float):
        self.decision, self.top_k, self.num_columns, self.eps = "per_layer", TOP_K, C, eps
        self.norms, self.protos = RouterData(norms), RouterData(protos)

    def __call__(self, token_ids, hidden, mask, state=None, column_to_slot=None):
        x = rms_norm(hidden.reshape(-1, hidden.shape[-1]), self.norms[...], eps=self.eps)
        logits = jnp.abs(x @ self.protos[...].T) / TEMPERATURE
        routing = select(logits, mask.reshape(-1), top_k=TOP_K, column_to_slot=column_to_slot)
        return routing, logits, state


@pytest.mark.parametrize("projection", ["q_proj", "v_proj"])
def test_arrow_with_one_projection_is_a_router_per_layer(projection, base, tmp_path, worst):
    """Prompt logits, 32 cached steps and greedy ids of Arrow as a router of ours.

    Arrow (peft 0.21.2) takes for each token and module the k adapters with the largest |x·p|, x the
    module's input as it is (no cosine, whatever its docstring says) and p the right singular vector
    of B·A, and softmaxes |x·p| / temperature over those k: `select`, with these as logits. It
    decides anew for every module, where our router decides once for a layer; with one adapted
    projection the two coincide, and x, q_proj's input, is the layer's input after its norm. What is
    not compared: GenKnowSub, and Arrow's routing of padding, which we send to no adapter.
    """
    folder, decoder, _ = base
    adapters, paths = experts(decoder, [projection], tmp_path)
    theirs = their_logits(arrow_model(folder, paths), base_prompts())
    _, arrays = base_model(decoder.config.model_type)
    layers = range(decoder.config.num_layers)
    router = ArrowRule(
        jnp.asarray(arrays["layers.input_layernorm.weight"]),
        jnp.asarray([prototypes(adapters, f"layers.{n}.self_attn.{projection}") for n in layers]),
        eps=decoder.config.rms_norm_eps,
    )
    stacks = bank_of(decoder, *adapters).stacks
    routed = {"adapters": stacks, "router": router, "column_to_slot": np.arange(C)}
    ours = map(np.asarray, our_logits(decoder, *both_sides(base_prompts()), routed))
    assert compare(base, worst, "Arrow", ours, theirs).min() > VISIBLE


def test_arrow_deltas_of_every_projection_are_lora_delta(base, tmp_path, worst):
    """Each module's update by Arrow, from the module's own input, against `lora_delta`.

    The inputs are recorded in peft, so that the seven projections are compared where our decoder
    would share one decision among them; ids and gates come from the formula.
    """
    import torch

    folder, decoder, _ = base
    adapters, paths = experts(decoder, decoder.config.projection_sizes(), tmp_path)
    model = arrow_model(folder, paths)
    seen = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):

            def record(module, inputs, output, name=name):
                delta = output - module.base_layer(inputs[0])
                seen[name.removeprefix("base_model.model.model.")] = inputs[0], delta

            module.register_forward_hook(record)
    with torch.no_grad():
        model(input_ids=torch.tensor([base_prompts()[0]]))
    stacks = bank_of(decoder, *adapters).stacks
    assert set(seen) == set(adapters[0].modules)
    for name, (x, delta) in seen.items():
        x, delta = x.numpy(), delta.numpy()
        _, layer, _, projection = name.split(".")
        scores = np.abs(x[0] @ prototypes(adapters, name).T)
        ids = np.argsort(-scores, axis=-1)[:, :TOP_K].astype(np.int32)
        gates = np.exp(np.take_along_axis(scores, ids, axis=-1) / TEMPERATURE)
        gates /= gates.sum(axis=-1, keepdims=True)
        stack = jax.tree.map(lambda leaf, at=int(layer): leaf[at], stacks[projection])
        routing = Routing(jnp.asarray(ids), jnp.asarray(gates))
        ours = lora_delta(jnp.asarray(x), stack.lora_a, stack.lora_b, routing)
        assert np.abs(delta).max() > VISIBLE
        worst("Arrow, deltas by module", np.asarray(ours) - delta)


class PerLayer(nnx.Module):
    """Gates (L, N, C) as they are given, over all columns."""

    def __init__(self, gates):
        self.decision, self.top_k, self.num_columns = "per_layer", C, C
        self.gates = RouterData(gates)

    def __call__(self, token_ids, hidden, mask, state=None, column_to_slot=None):
        gates = self.gates[...]
        ids = jnp.where(mask.reshape(-1, 1), jnp.arange(C), -1).astype(jnp.int32)
        return Routing(ids, jnp.where(ids >= 0, gates, 0.0)), None, state


XLORA = {
    "dense": {"softmax_temperature": 0.7},
    "dense, weighted": {"global_scaling_weight": 0.6},
    "top-k of the softmax": {"top_k_lora": TOP_K},
    "softmax of the top-k": {
        "top_k_lora": TOP_K,
        "enable_softmax": False,
        "enable_softmax_topk": True,
    },
    "per layer": {"layerwise_scalings": True},
}


@pytest.mark.parametrize("case", XLORA)
def test_xlora(case, base, tmp_path, worst):
    """Prompt logits of X-LoRA under the gates that its rule yields, given to our decoder.

    X-LoRA (peft 0.21.2) reads the last hidden state, after the final norm, of a first pass without
    adapters; a linear head makes one score per adapter (per adapter and module with
    layerwise_scalings), and the second pass multiplies the module's input by the gate, which before
    a linear B·A is our gate behind it. "softmax of the top-k" is `select` and is computed by it;
    "dense" is `select` with k = C. "top-k of the softmax" does not renormalise what is left, so its
    gates are given through FixedRouter. No router of ours reads the last layer before the first:
    what is compared is the mixture, and the head's formula on our hidden state. Not compared:
    decoding (X-LoRA has no cache: it reads the text anew, twice, for each token), a head of several
    layers, a scaling_pass_value other than 0, trained adapters.
    """
    import torch
    from peft import XLoraConfig, get_peft_model

    folder, decoder, _ = base
    settings = XLORA[case]
    layerwise = "layerwise_scalings" in settings
    # One adapted module a layer, where the gates of its modules would differ.
    projections = ["o_proj"] if layerwise else ["q_proj", "o_proj", "up_proj", "down_proj"]
    adapters, paths = experts(decoder, projections, tmp_path)
    L, D = decoder.config.num_layers, decoder.config.hidden_size
    model = their_model(folder)
    model.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=D, xlora_depth=1,
        adapters={str(number): path for number, path in enumerate(paths)}, **settings,
    )  # fmt: skip
    model = get_peft_model(model, config).eval()
    rng = np.random.default_rng(9)
    columns = C * (L if layerwise else 1)
    weight = (0.3 * rng.standard_normal((columns, D))).astype(np.float32)
    bias = rng.standard_normal(columns).astype(np.float32)
    head = model.base_model.internal_xlora_classifier.layers[-1]
    head.weight.data, head.bias.data = torch.from_numpy(weight), torch.from_numpy(bias)
    tokens, mask = padded(base_prompts(), "left")
    inputs = {
        "input_ids": torch.tensor(tokens.astype(np.int64)),
        "attention_mask": torch.tensor(mask),
        "position_ids": torch.tensor(np.maximum(mask.cumsum(-1) - 1, 0)),
    }
    with torch.no_grad():
        theirs = model(**inputs).logits.numpy()

    hidden = np.asarray(decoder(tokens, mask).hidden)
    scores = hidden @ weight.T + bias
    scale = settings.get("global_scaling_weight", 1.0)
    if case == "softmax of the top-k":
        flat = jnp.asarray(scores.reshape(-1, C)), jnp.asarray(mask.reshape(-1))
        chosen = select(*flat, top_k=TOP_K)
        ids, gates = (np.asarray(each).reshape(*mask.shape, TOP_K) for each in
                      (chosen.adapter_ids, chosen.gates))  # fmt: skip
        router = FixedRouter(ids, gates)
    elif layerwise:
        gates = jax.nn.softmax(jnp.asarray(scores.reshape(-1, L, C)), axis=-1)
        router = PerLayer(gates.swapaxes(0, 1))
    else:
        scores = scores / settings.get("softmax_temperature", 1.0)
        gates = scale * np.asarray(jax.nn.softmax(jnp.asarray(scores), axis=-1))
        ids = np.argsort(-gates, axis=-1)[..., : settings.get("top_k_lora", C)].astype(np.int32)
        router = FixedRouter(ids, np.take_along_axis(gates, ids, axis=-1))
    stacks = bank_of(decoder, *adapters).stacks
    out = decoder(tokens, mask, adapters=stacks, router=router, column_to_slot=np.arange(C))
    ours = np.asarray(decoder.logits(out.hidden))
    assert np.abs(theirs - base[2])[mask].max() > VISIBLE
    worst("X-LoRA", ours[mask] - theirs[mask])
