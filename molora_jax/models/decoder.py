"""One decoder that is Llama, Qwen2 or Qwen3 by configuration, each projection with routed deltas.

Letters beyond the table of design.md: T cache slots of a row, G = H / Hk query heads per kv head,
C router columns.
"""

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from molora_jax.adapters.names import brief
from molora_jax.adapters.stack import Stacks
from molora_jax.layers import MoLoRALinear, RoutedAdapters, linear, project, rms_norm
from molora_jax.models.attention import attention, positions_of, rotate
from molora_jax.models.config import ModelConfig, rope_frequencies
from molora_jax.models.decision import Decision, at_layer
from molora_jax.parallel import local, tell_pass
from molora_jax.parallel.rules import TOKENS
from molora_jax.routing.reach import check_reach
from molora_jax.token_ids import check_token_ids
from pallas_kernels import Routing

Given = Array | np.ndarray
KeyValue = tuple[Float[Array, "B Hk T Dh"], Float[Array, "B Hk T Dh"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderOutput:
    """What one pass computed.

    hidden         (B, S, D) after the final norm; `Decoder.logits` turns it into logits
    routing        the decision of every layer, (L, N, k) with N = B·S, or None without a router
    router_logits  (L, N, C) per layer, (1, N, C) where one decision is shared, None where the
                   router has no logits
    layer_inputs   (L, B, S, D), each layer's input before its norm, where asked for
    router_state   what the router carries to the tokens that come next, if it carries anything
    keys_values    keys and values of the S tokens where asked for, each stacked over layers, or a
                   tuple of one array per layer where the layers are unrolled
    """

    hidden: Float[Array, "B S D"]
    routing: Routing | None = None
    router_logits: Float[Array, "l N C"] | None = None
    layer_inputs: Float[Array, "L B S D"] | None = None
    router_state: Int[Array, " B"] | None = None
    keys_values: tuple[Array, Array] | tuple[tuple[Array, ...], tuple[Array, ...]] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of what a batch has read so far; donate it to every step.

    One array per layer and never a stacked one: a step then updates each in place. `filled` marks
    the slots that hold a real token, `next_slot` the slot that a row writes next.
    """

    keys: tuple[Float[Array, "B Hk T Dh"], ...]
    values: tuple[Float[Array, "B Hk T Dh"], ...]
    filled: Bool[Array, "B T"]
    next_slot: Int[Array, " B"]


# How they are split over a mesh: the partition in place of each array.
_SPLIT: dict[str, Any] = {
    "hidden": P(TOKENS),
    "routing": P(None, TOKENS),
    "router_logits": P(None, TOKENS),
    "layer_inputs": P(None, TOKENS),
    "router_state": P(TOKENS),
}
_SPLIT_CACHE: dict[str, Any] = {
    "keys": P(TOKENS, "tensor"),
    "values": P(TOKENS, "tensor"),
    "filled": P(TOKENS),
    "next_slot": P(TOKENS),
}


class DecoderLayer(nnx.Module):
    """Attention and gated MLP.

    Built with parameters stacked over layers (a leading L axis on each) or with those of one
    layer; called with one layer.
    """

    def __init__(self, config: ModelConfig, arrays: Mapping[str, Array]):
        self.config = config

        def projection(path: str) -> MoLoRALinear:
            return MoLoRALinear(arrays[f"{path}.weight"], arrays.get(f"{path}.bias"))

        self.input_norm = nnx.Param(arrays["input_layernorm.weight"])
        self.post_attention_norm = nnx.Param(arrays["post_attention_layernorm.weight"])
        self.q_proj = projection("self_attn.q_proj")
        self.k_proj = projection("self_attn.k_proj")
        self.v_proj = projection("self_attn.v_proj")
        self.o_proj = projection("self_attn.o_proj")
        self.gate_proj = projection("mlp.gate_proj")
        self.up_proj = projection("mlp.up_proj")
        self.down_proj = projection("mlp.down_proj")
        if config.qk_norm:
            self.q_norm = nnx.Param(arrays["self_attn.q_norm.weight"])
            self.k_norm = nnx.Param(arrays["self_attn.k_norm.weight"])

    def __call__(
        self, x, rope, visible, adapters: RoutedAdapters | None, store, *, packed: bool = False
    ):
        """x (B, S, D) → (B, S, D) and what `store` returned.

        `store(k, v)` takes the new keys and values (B, Hk, S, Dh) and returns all that the queries
        may see, (B, Hk, T, Dh); `visible` (B, S, T) says which of them each query sees.
        """
        eps, split = self.config.rms_norm_eps, local.is_split(x, "tensor")
        h = rms_norm(local.whole_sequence(x), self.input_norm[...], eps=eps)
        attended, kept = self._attention(h, rope, visible, adapters, store, packed)
        x = x + local.summed(attended, split_sequence=split)
        h = rms_norm(local.whole_sequence(x), self.post_attention_norm[...], eps=eps)
        gate, up = project(h, {"gate_proj": self.gate_proj, "up_proj": self.up_proj}, adapters)
        out = self.down_proj(jax.nn.silu(gate) * up, "down_proj", adapters)
        return x + local.summed(out, split_sequence=split), kept

    def _attention(self, x, rope, visible, adapters, store, packed):
        """x (B, S, D) → (B, S, D), of which a device of a mesh has a part of the sum."""
        c = self.config
        B, S, _ = x.shape
        together = {"q_proj": self.q_proj, "k_proj": self.k_proj, "v_proj": self.v_proj}
        q, k, v = (each.reshape(B, S, -1, c.head_dim) for each in project(x, together, adapters))
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], eps=c.rms_norm_eps)
            k = rms_norm(k, self.k_norm[...], eps=c.rms_norm_eps)
        q, k = rotate(q, *rope), rotate(k, *rope)
        all_k, all_v = store(k.swapaxes(1, 2), v.swapaxes(1, 2))
        out = attention(q, all_k, all_v, visible, packed=packed)
        return self.o_proj(out.reshape(B, S, -1), "o_proj", adapters), (all_k, all_v)


class Decoder(nnx.Module):
    """The frozen base model: embedding, L layers over stacked parameters, final norm, output.

    `arrays` are the stacked weights as the loaders of molora_jax.models return them: Hugging Face
    names without the layer index, e.g. "layers.self_attn.q_proj.weight" (L, F, D).

        >>> tokens = jnp.array([[104, 105]])
        >>> out = base.decoder(tokens, tokens > 0, **composition.routed)
        >>> out.hidden.shape, base.decoder.logits(out.hidden).shape  # (B, S, D), (B, S, V)
        ((1, 2, 64), (1, 2, 260))
        >>> out.routing.adapter_ids.shape  # (L, N, k)
        (4, 2, 1)
    """

    def __init__(self, config: ModelConfig, arrays: Mapping[str, ArrayLike]):
        stacked = {name: jnp.asarray(array) for name, array in arrays.items()}
        self.config = config
        self.embedding = nnx.Param(stacked["embed_tokens.weight"])
        self.norm = nnx.Param(stacked["norm.weight"])
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nnx.Param(stacked["lm_head.weight"])
        prefix = "layers."
        self.layers: DecoderLayer | nnx.List = DecoderLayer(
            config, {n.removeprefix(prefix): a for n, a in stacked.items() if n.startswith(prefix)}
        )

    def unstacked(self) -> "Decoder":
        """The same model with the parameters of every layer in arrays of their own, and unrolled.

        For decoding, and always on a GPU: a slice of stacked weights inside a compiled step copies
        them, every layer and every step. Memory holds both while the stacked one is referenced.
        """
        if isinstance(self.layers, nnx.List):
            return self
        other = copy.copy(self)
        other.layers = nnx.List(
            [at_layer(self.layers, index) for index in range(self.config.num_layers)]
        )
        return other

    def logits(self, hidden: Float[Array, "*n D"]) -> Float[Array, "*n V"]:
        """float32 logits of `DecoderOutput.hidden`, or of any rows of it."""
        head = self.embedding if self.lm_head is None else self.lm_head
        logits = linear(hidden, head[...]).astype(jnp.float32)
        return local.constrain(logits, TOKENS, *[None] * (hidden.ndim - 2), "tensor")

    def __call__(
        self,
        tokens: Int[Given, "B S"],
        mask: Bool[Given, "B S"] | None = None,
        *,
        segments: Int[Given, "B S"] | None = None,
        adapters: Stacks | Sequence[Stacks] | None = None,
        router=None,
        router_state: Int[Given, " B"] | None = None,
        column_to_slot: Int[Given, " C"] | None = None,
        strategy: str = "auto",
        backend: str = "auto",
        unroll: bool = False,
        return_layer_inputs: bool = False,
        return_keys_values: bool = False,
    ) -> DecoderOutput:
        """Reads a whole batch at once, padded on either side.

        tokens          (B, S); ids outside the vocabulary are refused; inside jit their row is NaN
        mask            (B, S), True for real tokens; None where all are
        segments        (B, S) of texts packed into a row one behind the other, numbered as they
                        come: none sees another, each has positions from 0; None: one text a row
        adapters        AdapterBank.stacks, or its `layers` where the pass is unrolled; they act
                        only where `router` sends a token
        router          any router of molora_jax.routing; needed with `adapters`, and the reverse
        router_state    of the tokens before these, where a text is read in parts; None: it begins
        column_to_slot  (C,) slot of each router column, −1 where it is not resident; None: identity
        unroll          one graph of L layers instead of a scan: slower to compile, for a GPU; a
                        decoder that is `unstacked` always is
        """
        routed = self._routed(adapters, router, router_state, column_to_slot)
        if segments is not None and getattr(router, "recurrent", False):
            raise ValueError(
                f"segments are given with a recurrent {type(router).__name__}, whose state would "
                "go from one text to the next: expected one text a row"
            )
        if isinstance(tokens, str) or np.ndim(tokens) != 2:
            raise ValueError(
                f"tokens is {brief(tokens)}: expected (B, S) token ids, as "
                "jnp.array([base.tokenizer.encode(text)])"
            )
        tokens = jnp.asarray(tokens)
        self._check_length("the batch has", tokens.shape[1])
        unroll = unroll or isinstance(self.layers, nnx.List)
        if not unroll and not isinstance(adapters, Mapping | None):
            raise ValueError(
                "adapters are given layer by layer, which a scan over layers cannot read: pass "
                "AdapterBank.stacks, or unroll=True"
            )
        check_token_ids(tokens, self.config.vocab_size, mask=mask)
        tell_pass(self.config, *tokens.shape, itemsize=self.embedding[...].dtype.itemsize)
        read = functools.partial(
            Decoder._read,
            strategy=strategy,
            backend=backend,
            unroll=unroll,
            return_layer_inputs=return_layer_inputs,
            return_keys_values=return_keys_values,
        )
        return local.spread(
            read,
            {
                "decoder": self,
                "tokens": tokens,
                "mask": jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask),
                "segments": None if segments is None else jnp.asarray(segments),
                **routed,
            },
            DecoderOutput(
                **_SPLIT,
                keys_values=P(TOKENS, "tensor") if unroll else P(None, TOKENS, "tensor"),  # type: ignore[arg-type]
            ),
            rows=tokens.shape[0],
            by_row=("tokens", "mask", "segments", "router_state"),
        )

    def _read(
        self,
        tokens,
        mask,
        segments,
        adapters,
        router,
        router_state,
        column_to_slot,
        *,
        strategy,
        backend,
        unroll,
        return_layer_inputs,
        return_keys_values,
    ) -> DecoderOutput:
        """`__call__` on the arrays of one device of a mesh, or on all of them."""
        rope = self._rope(positions_of(mask, segments))
        S = tokens.shape[1]
        visible = jnp.tril(jnp.ones((S, S), bool))[None] & mask[:, None, :]
        if segments is not None:
            visible &= segments[:, :, None] == segments[:, None, :]
        decision = Decision(
            self, tokens, mask, adapters, router, router_state, column_to_slot, strategy, backend
        )

        def body(carry, layer_slice):
            x, held = carry
            index, layer, stacks, layer_router = layer_slice
            seen = local.whole_sequence(x)
            now, held, logits = decision.at_layer(index, layer_router, seen, held)
            routed = decision.adapters(stacks, now, index if unroll else None)
            out, keys_values = layer(x, rope, visible, routed, as_is, packed=segments is not None)
            emitted = (
                None if now is None else now[0],
                logits,
                seen if return_layer_inputs else None,
                keys_values if return_keys_values else None,
            )
            return (out, held), emitted

        x = self._embed(tokens, mask)
        sliced_router = router if decision.kind == "per_layer" else None
        carry = (x, decision.first())
        if unroll:
            each_layer = []
            for index in range(self.config.num_layers):
                layer, layer_router = self._layer(index), at_layer(sliced_router, index)
                carry, emitted = body(carry, (index, layer, adapters, layer_router))
                each_layer.append(emitted)
            *small, kept = zip(*each_layer, strict=True)
            routing, logits, layer_inputs = (
                jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in small
            )
            # Keys and values stay apart, as a cache holds them: stacking would copy them.
            keys_values = None
            if return_keys_values:
                keys, values = zip(*kept, strict=True)
                keys_values = keys, values
        else:
            layers = (jnp.arange(self.config.num_layers), self.layers, adapters, sliced_router)
            # Of a weight gathered for its layer nothing is kept for the backward pass.
            step = jax.checkpoint(body, prevent_cse=False) if local.inside() else body
            carry, emitted = jax.lax.scan(step, carry, layers)
            routing, logits, layer_inputs, keys_values = emitted
        if decision.kind == "shared":
            logits = logits[router.after_layer + 1][None]
        elif decision.kind == "input":
            logits = None if decision.input_logits is None else decision.input_logits[None]
        x = local.whole_sequence(carry[0])
        hidden = rms_norm(x, self.norm[...], eps=self.config.rms_norm_eps)
        return DecoderOutput(hidden, routing, logits, layer_inputs, decision.state, keys_values)

    def prefill(
        self,
        tokens: Int[Given, "B S"],
        mask: Bool[Given, "B S"],
        *,
        cache_size: int,
        adapters: Stacks | Sequence[Stacks] | None = None,
        router=None,
        router_state: Int[Given, " B"] | None = None,
        column_to_slot: Int[Given, " C"] | None = None,
        strategy: str = "auto",
        backend: str = "auto",
    ) -> tuple[DecoderOutput, KVCache]:
        """Reads prompts padded on either side into a new cache of `cache_size` slots a row.

        A row goes on behind its last real token, so right padding is overwritten as it grows.
        """
        S = tokens.shape[1]
        if cache_size < S:
            raise ValueError(f"cache_size {cache_size} is less than the {S} tokens of the prompt")
        self._check_length("cache_size is", cache_size)
        out = self(
            tokens, mask, adapters=adapters, router=router, router_state=router_state,
            column_to_slot=column_to_slot, strategy=strategy, backend=backend,
            return_keys_values=True,
        )  # fmt: skip
        room = ((0, 0), (0, 0), (0, cache_size - S), (0, 0))
        assert out.keys_values is not None
        keys, values = (tuple(jnp.pad(layer, room) for layer in each) for each in out.keys_values)
        last = S - jnp.argmax(mask[:, ::-1], axis=1)
        cache = KVCache(
            keys,
            values,
            filled=jnp.pad(mask, ((0, 0), (0, cache_size - S))),
            next_slot=jnp.where(mask.any(axis=1), last, 0).astype(jnp.int32),
        )
        return dataclasses.replace(out, keys_values=None), cache

    def decode(
        self,
        tokens: Int[Given, " B"],
        cache: KVCache,
        *,
        active: Bool[Given, " B"] | None = None,
        adapters: Stacks | Sequence[Stacks] | None = None,
        router=None,
        router_state: Int[Given, " B"] | None = None,
        column_to_slot: Int[Given, " C"] | None = None,
        strategy: str = "auto",
        backend: str = "auto",
    ) -> tuple[DecoderOutput, KVCache]:
        """Reads one more token of every row: hidden (B, 1, D) and the cache with it written.

        Always unrolled: the cache is one array per layer, each updated in place when donated. A row
        whose cache is full writes nothing (an index past the end is dropped); the caller stops it.
        A row that is not `active` uses no adapter, and what comes out of it means nothing.
        """
        tokens = jnp.asarray(tokens)
        check_token_ids(tokens, self.config.vocab_size, mask=active)
        return local.spread(
            functools.partial(Decoder._extend, strategy=strategy, backend=backend),
            {
                "decoder": self,
                "tokens": tokens,
                "cache": cache,
                "active": jnp.ones_like(tokens, bool) if active is None else jnp.asarray(active),
                **self._routed(adapters, router, router_state, column_to_slot),
            },
            (DecoderOutput(**_SPLIT), KVCache(**_SPLIT_CACHE)),
            rows=tokens.shape[0],
            by_row=("tokens", "active", "router_state"),
        )

    def _extend(
        self,
        tokens,
        cache,
        active,
        adapters,
        router,
        router_state,
        column_to_slot,
        *,
        strategy,
        backend,
    ) -> tuple[DecoderOutput, KVCache]:
        """`decode` on the arrays of one device of a mesh, or on all of them."""
        rows = jnp.arange(tokens.shape[0])
        # Both are read in their new state only, so that they are updated where they lie: what is
        # needed after its update would be copied first.
        next_slot = jax.lax.optimization_barrier(cache.next_slot + 1)
        slot = next_slot - 1
        here = jnp.arange(cache.filled.shape[1])[None, :] == slot[:, None]
        filled = cache.filled | here
        positions = (filled & ~here).sum(axis=1)[:, None]
        visible = filled[:, None, :]
        tokens, active = tokens[:, None], active[:, None]
        decision = Decision(
            self, tokens, active, adapters, router, router_state, column_to_slot,
            strategy, backend,
        )  # fmt: skip
        rope = self._rope(positions)
        sliced_router = router if decision.kind == "per_layer" else None
        x, held = self._embed(tokens, active), decision.first()
        keys, values, routings = [], [], []
        for index in range(self.config.num_layers):
            layer, layer_router = self._layer(index), at_layer(sliced_router, index)
            now, held, _ = decision.at_layer(index, layer_router, x, held)

            def store(k, v, index=index):
                return tuple(
                    old[index].at[rows, :, slot].set(new[:, :, 0], mode="drop")
                    for old, new in ((cache.keys, k), (cache.values, v))
                )

            routed = decision.adapters(adapters, now, index)
            x, (k, v) = layer(x, rope, visible, routed, store)
            keys.append(k)
            values.append(v)
            if now is not None:
                routings.append(now[0])
        routing = jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings) if routings else None
        hidden = rms_norm(x, self.norm[...], eps=self.config.rms_norm_eps)
        cache = KVCache(tuple(keys), tuple(values), filled, next_slot)
        return DecoderOutput(hidden, routing, router_state=decision.state), cache

    def _routed(self, adapters, router, router_state, column_to_slot) -> dict[str, Any]:
        """What a pass is told of its routing, held against the bank where it can be read."""
        check_reach(router, adapters, column_to_slot, config=self.config)
        return {
            "adapters": adapters,
            "router": router,
            "router_state": None if router_state is None else jnp.asarray(router_state),
            # numpy outside jit: a scan indexes it with a traced layer's choice.
            "column_to_slot": None if column_to_slot is None else jnp.asarray(column_to_slot),
        }

    def _check_length(self, what: str, length: int) -> None:
        # By the static size, padding included: inside jit nothing else can be refused, and past the
        # context some models have other frequencies or a window (rope.py, config.py).
        if length > self.config.max_positions:
            raise ValueError(
                f"{what} {length} positions, padding included, and the model has "
                f"{self.config.max_positions}: shorten the texts or pad them less"
            )

    def _layer(self, index: int) -> DecoderLayer:
        layers = self.layers
        return layers[index] if isinstance(layers, nnx.List) else at_layer(layers, index)

    def _embed(
        self, tokens: Int[Array, "B S"], mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Rows of the embedding; NaN, and never another token, for a real id outside it."""
        known = (tokens >= 0) & (tokens < self.config.vocab_size)
        harmless = mask if mask is None else ~mask  # padding may hold anything
        unknown = jnp.int32(-2) if harmless is None else jnp.where(harmless, -1, -2)
        return local.lookup(self.embedding[...], jnp.where(known, tokens, unknown))

    def _rope(self, positions: Int[Array, "B S"]) -> tuple[Array, Array]:
        frequencies, factor = rope_frequencies(self.config)
        angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies)[None, None]
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def as_is(keys: Array, values: Array) -> KeyValue:
    """The `store` of a pass without a cache: queries see the keys and values of the pass itself."""
    return keys, values
