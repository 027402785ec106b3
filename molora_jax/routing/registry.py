"""Routers by name, to save one and rebuild it: settings as JSON, arrays as a flat dict.

A new rule is a class with the call of the others, `to_config` and `from_config`, and a line here.
"""

import difflib
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.control import ControlTokenRouter
from molora_jax.routing.fixed import FixedRouter, SequenceRouter, VocabularyRouter
from molora_jax.routing.learned import LearnedRouter
from molora_jax.routing.linear import PrototypeRouter, StatisticsRouter
from molora_jax.routing.modulated import ModulatedRouter
from pallas_kernels import Routing


@runtime_checkable
class Router(Protocol):
    """What every router offers; a form to check against, not a base class.

    decision  when it speaks: "input", once, from the token ids before layer 0; "per_layer", at each
              layer, where every array has a leading layer axis and the decoder hands over one
              slice; "shared", once, from the output of layer `after_layer`
    top_k     adapters per token, the k of its Routing
    """

    decision: str
    top_k: int

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, Float[Array, "N C"] | None, Any]:
        """Routing in slots, raw logits or None, and what is carried to the next call or None."""
        ...

    def to_config(self) -> dict[str, Any]:
        """The constructor's settings as plain JSON, arrays left out."""
        ...

    @classmethod
    def from_config(cls, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> "Router":
        """The router that its settings and `router_arrays` describe."""
        ...


ROUTERS: dict[str, type[Router]] = {
    "vocabulary": VocabularyRouter,
    "control": ControlTokenRouter,
    "learned": LearnedRouter,
    "statistics": StatisticsRouter,
    "prototype": PrototypeRouter,
    "modulated": ModulatedRouter,
    "sequence": SequenceRouter,
    "fixed": FixedRouter,
}


def router_config(router: Router) -> dict[str, Any]:
    """{"kind": name in ROUTERS, **settings}, plain JSON."""
    for kind, cls in ROUTERS.items():
        if type(router) is cls:
            return {"kind": kind, **router.to_config()}
    raise ValueError(
        f"router of type {type(router).__name__} has no name to be saved under: add it to ROUTERS "
        "in molora_jax/routing/registry.py"
    )


def router_arrays(router: Router) -> dict[str, np.ndarray]:
    """Every array of a router, trained or data, by attribute name."""
    return {
        name: np.asarray(value[...])
        for name, value in vars(router).items()
        if isinstance(value, nnx.Variable)
    }


def build_router(config: dict[str, Any], arrays: dict[str, np.ndarray]) -> Router:
    """The router that `router_config` and `router_arrays` describe."""
    settings = dict(config)
    kind = settings.pop("kind", None)
    if kind not in ROUTERS:
        near = difflib.get_close_matches(str(kind), ROUTERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"router kind {kind!r} is unknown: expected one of {', '.join(ROUTERS)}{hint}"
        )
    return ROUTERS[kind].from_config(settings, arrays)
