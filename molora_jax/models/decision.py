"""When the router of a pass speaks, and what holds at each layer."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from molora_jax.layers import RoutedAdapters
from molora_jax.parallel import local
from pallas_kernels import Routing, make_plan
from pallas_kernels.numerics import vary_together


class Decision:
    """When the router speaks: before the layers, at each, or once after one of them.

    What holds at a layer is (Routing, Routing of the slots here, DispatchPlan | None), the carry of
    the scan. It is planned once and used by all projections that share it.
    """

    def __init__(
        self, decoder, tokens, mask, adapters, router, state, column_to_slot, strategy, backend
    ):
        self.tokens, self.mask, self.router = tokens, mask, router
        self.state, self.column_to_slot = state, column_to_slot
        self.strategy, self.backend = strategy, backend
        self.kind = None if router is None else router.decision
        self.input_logits = None
        if router is not None:
            of_one = adapters if isinstance(adapters, Mapping) else adapters[0]
            self.stack = next(iter(of_one.values()))
            if (
                self.kind == "shared"
                and not -1 <= router.after_layer < decoder.config.num_layers - 1
            ):
                raise ValueError(
                    f"router.after_layer {router.after_layer} leaves no layer to adapt: the model "
                    f"has {decoder.config.num_layers} layers, numbered from 0; -1 is the embedding"
                )

    def _planned(self, routing: Routing):
        """The decision, what of it concerns the slots that lie here, and the plan of that."""
        num_slots = self.stack.lora_a.shape[-3]
        held = local.to_slots(routing, self.stack.ranks, num_slots)
        plan = make_plan(held, num_slots, strategy=self.strategy, backend=self.backend)
        return routing, held, plan

    def first(self):
        """The decision before layer 0 (no adapter, where the router has not spoken yet)."""
        if self.kind == "input":
            routing, self.input_logits, self.state = self.router(
                self.tokens, None, self.mask, self.state, self.column_to_slot
            )
            return self._planned(routing)
        if self.kind == "shared" and hasattr(self.router, "before"):
            return self._planned(self.router.before(self.mask))
        if self.kind == "shared":
            shape = (self.tokens.size, self.router.top_k)
            ids, gates = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
            # Typed as the decision that takes its place, which differs from device to device.
            ids, gates, _ = vary_together((ids, gates, self.tokens))
            return self._planned(Routing(ids, gates))
        return None

    def at_layer(self, index, layer_router, x, held):
        """What layer `index` with input x uses, what the next layer is handed, and the logits."""

        def speak(router):
            routing, logits, _ = router(self.tokens, x, self.mask, None, self.column_to_slot)
            return self._planned(routing), logits

        if self.kind == "per_layer":
            now, logits = speak(layer_router)
            return now, None, logits
        if self.kind == "shared":
            silent = jnp.zeros((self.tokens.size, self.router.num_columns), jnp.float32)
            silent, _ = vary_together((silent, self.tokens))
            now, logits = jax.lax.cond(
                index == self.router.after_layer + 1,
                lambda: speak(self.router),
                lambda: (held, silent),
            )
            return now, now, logits
        return held, held, None

    def adapters(self, stacks, now, layer: int | None) -> RoutedAdapters | None:
        if now is None:
            return None
        _, held, plan = now
        if not isinstance(stacks, Mapping):  # a dict for each layer: nothing to find in it
            stacks, layer = stacks[layer], None
        return RoutedAdapters(stacks, held, plan, self.strategy, self.backend, layer)


def at_layer(stacked, index: int):
    """One layer of a pytree whose every leaf has a leading layer axis."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)
