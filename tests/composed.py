"""A composition over the tiny base: three adapters with random B, and a router nobody trained."""

from flax import nnx

from molora_jax.adapters import Adapter, AdapterBank, Composition
from molora_jax.routing import LearnedRouter
from tests.adapters.make import arrays_for, modules_of


def composition(base, router, *, seeds=(1, 2, 3), names="abc", slots=(2, 0, 1)):
    """Adapters with random B, in slots whose order is not that of the columns."""
    bank = AdapterBank(base.config, num_slots=4, max_rank=2)
    digests = []
    for seed, name, slot in zip(seeds, names, slots, strict=True):
        arrays = arrays_for(modules_of(base.config, ("q_proj", "up_proj")), 2, seed=seed,
                            config=base.config)  # fmt: skip
        adapter = Adapter.from_arrays(name, arrays, alpha=0.05, num_layers=base.config.num_layers)
        bank.load(adapter, slot=slot)
        digests.append(adapter.digest)
    return Composition(
        base_name=base.name,
        base_digest=base.digest,
        bank=bank,
        router=router,
        column_digests=digests,
    )


def learned(base, *, top_k=2, **where):
    where = where or {"num_layers": base.config.num_layers}
    return LearnedRouter(base.config.hidden_size, 3, top_k=top_k, rngs=nnx.Rngs(7), **where)
