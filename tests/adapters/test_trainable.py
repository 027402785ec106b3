"""One adapter in training: PEFT's start, PEFT's step, and an export that computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from molora_jax.adapters import (
    PROJECTIONS,
    AdapterBank,
    TrainableAdapter,
    init_adapter,
    load_adapter,
    save_adapter,
)
from tests.adapters.make import BASE


def start(**changes):
    settings = {"rank": 3, "alpha": 6.0, "rng": jax.random.key(0), **changes}
    return init_adapter(BASE, **settings)


def randomised(**changes):
    params, rng = start(**changes), np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)


def test_start_is_peft_s():
    params = start(rank=50, projections=("q_proj", "down_proj"))
    for name, a in params.lora_a.items():
        D, F = BASE.projection_sizes()[name]
        assert a.shape == (3, 50, D)
        assert params.lora_b[name].shape == (3, 50, F)
        assert not params.lora_b[name].any()
        # Uniform in ±1/√D: the bound is kept and nearly reached, the variance is bound²/3.
        assert 0.98 < float(jnp.abs(a).max()) * D**0.5 <= 1
        np.testing.assert_allclose(float(a.var()) * 3 * D, 1, rtol=0.1)


def test_start_of_a_projection_does_not_depend_on_the_others():
    alone, both = start(projections=("up_proj",)), start(projections=("gate_proj", "up_proj"))
    np.testing.assert_array_equal(alone.lora_a["up_proj"], both.lora_a["up_proj"])
    assert not np.allclose(both.lora_a["up_proj"], both.lora_a["gate_proj"])
    assert not np.allclose(start(rng=jax.random.key(1)).lora_a["up_proj"], alone.lora_a["up_proj"])


def test_only_a_and_b_are_leaves():
    leaves = jax.tree.leaves(start())
    assert len(leaves) == 2 * len(PROJECTIONS)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 6 / 3**0.5)])
def test_stacks_fold_the_scale(use_rslora, scale):
    params = randomised(use_rslora=use_rslora)
    for name, stack in params.stacks().items():
        np.testing.assert_array_equal(stack.lora_a[:, 0], params.lora_a[name])
        np.testing.assert_allclose(stack.lora_b[:, 0], scale * params.lora_b[name], rtol=1e-6)
        np.testing.assert_array_equal(stack.ranks, np.full((3, 1), 3))


def test_adam_moves_b_as_far_as_peft_does():
    """The first Adam step is lr in each parameter, so B·A moves by scale·lr and not by lr."""
    params, lr = start(projections=("q_proj",), alpha=24.0), 1e-3

    def loss(params):
        return params.stacks()["q_proj"].lora_b.sum()

    optimiser = optax.adam(lr)
    updates, _ = optimiser.update(jax.grad(loss)(params), optimiser.init(params), params)
    stepped = optax.apply_updates(params, updates)
    assert isinstance(stepped, TrainableAdapter)
    np.testing.assert_allclose(stepped.lora_b["q_proj"], -lr, rtol=1e-4)
    np.testing.assert_allclose(stepped.stacks()["q_proj"].lora_b, -8 * lr, rtol=1e-4)


# From training into a PEFT file and a bank, with the same numbers.
@pytest.mark.parametrize("use_rslora", [False, True])
def test_export_computes_what_training_did(tmp_path, use_rslora):
    params = randomised(use_rslora=use_rslora, projections=("q_proj", "down_proj"))
    adapter = params.to_adapter("mine", base_name="org/base")
    assert adapter.config["base_model_name_or_path"] == "org/base"
    assert adapter.config["target_modules"] == ["q_proj", "down_proj"]
    again, report = load_adapter(save_adapter(adapter, tmp_path / "mine"), config=BASE)
    assert again.digest == adapter.digest
    assert report.warnings == ()
    bank = AdapterBank(BASE, num_slots=1, max_rank=3, projections=("q_proj", "down_proj"))
    bank.load(again)
    jax.tree.map(
        lambda trained, held: np.testing.assert_allclose(trained, held, rtol=1e-6),
        params.stacks(),
        bank.stacks,
    )


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"projections": ()}, {"projections": ["lm_head"]}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; expected"):
        start(**wrong)
