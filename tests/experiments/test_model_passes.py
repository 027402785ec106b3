"""Tables 5 and 7 at tiny, who computes what in them, and the paper's sizes without their memory."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import main as command_line
from experiments import model_passes, random_models, results, turns
from molora_jax.models import Decoder, load_base
from molora_jax.models.weights import array_shapes
from molora_jax.routing import FixedRouter
from tests.helpers import assert_close

K = 4


def configs(scale):
    files = [command_line.CONFIGS / f"{scale}.gin"]
    return model_passes.Config(**command_line.bindings(model_passes, files=files, shared=True))


def execute(name, workdir):
    status, path = results.execute(
        name, model_passes, configs("tiny"), {}, scale="tiny", workdir=workdir
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    return path, result


@pytest.mark.parametrize(("name", "cases"), [("table5", 4), ("table7", 3)])
def test_a_table_writes_claims_a_picture_and_whether_the_answers_are_equal(name, cases, tmp_path):
    path, result = execute(name, tmp_path)
    claims = {claim["id"]: claim for claim in result["claims"]}
    assert len(claims) == 3 * cases
    assert all(claim["paper"] and claim["ours"] > 0 for claim in claims.values())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == cases
    for line in lines:
        assert line["per_token_grouped_difference"] < 1e-5
        assert line["per_token_bgmv_difference"] < 1e-5
        # Rows of several adapters attend to what one adapter made of all of their tokens.
        mixed = "diverse" in line["what"] or name == "table7"
        assert (line["per_sequence_difference"] > 1e-2) == mixed
    report = (path / "report.md").read_text()
    assert "computes another function" in report and "nan" not in report
    assert (path / "passes.png").read_bytes().startswith(b"\x89PNG")
    assert ("uniform_8x256_full_passes_over_per_token" in result["metrics"]) == (name == "table5")


def test_a_pass_for_each_adapter_keeps_the_tokens_that_are_its_own():
    decoder = load_base("tiny-random").decoder
    config = configs("tiny")
    bank = model_passes.banks(config, decoder.config)
    ids = model_passes.adapter_ids("diverse", 4, 16, K)
    assert (np.sort(ids[:, :: model_passes.SPAN], axis=1) == np.arange(K)).all()
    tokens = np.random.default_rng(1).integers(0, 256, ids.shape).astype(np.int32)
    logits = model_passes.arms_of(decoder, tokens, ids, bank)["per_sequence"]()
    for slot in range(K):
        everywhere = FixedRouter(np.full((*ids.shape, 1), slot))
        alone = model_passes.forward(decoder, tokens, bank[0], everywhere, strategy="auto")
        own = ids == slot
        assert_close(logits[own], alone[own], terms=decoder.config.hidden_size)
        assert jnp.abs(logits[~own] - alone[~own]).mean() > 1e-3


def test_a_pass_reads_the_rows_that_need_it():
    """Uniform rows are shared out evenly, so that every pass has a shape in common."""
    ids = model_passes.adapter_ids("uniform", 8, 16, K)
    assert (ids == ids[:, :1]).all()
    assert [int((ids[:, 0] == slot).sum()) for slot in range(K)] == [2] * K
    assert not model_passes.adapter_ids("single", 8, 16, K).any()


def test_the_papers_sizes_fit_together():
    """Shapes alone: no memory is taken."""
    config = configs("paper")
    assert config.lengths == (128, 256)
    assert config.models == tuple(row[:4] for row in model_passes.TABLE7)
    sizes = random_models.RANDOM[config.base]
    shapes = array_shapes(sizes)
    assert 4.0e9 < sum(np.prod(shape, dtype=np.int64) for shape in shapes.values()) < 4.1e9

    def logits(ids):
        arrays = {name: jnp.zeros(shape, config.dtype) for name, shape in shapes.items()}
        decoder = Decoder(sizes, arrays)
        widths = sizes.projection_sizes()
        stacks = {
            name: model_passes.AdapterStack(
                lora_a=jnp.zeros((sizes.num_layers, K, config.rank, d_in), config.dtype),
                lora_b=jnp.zeros((sizes.num_layers, K, config.rank, d_out), config.dtype),
                ranks=jnp.zeros((sizes.num_layers, K), jnp.int32),
            )
            for name, (d_in, d_out) in widths.items()
        }
        alone = jax.tree.map(lambda leaf: leaf[:, :1], stacks)
        once = model_passes.forward(
            decoder, ids, stacks, FixedRouter(ids[:, :, None]), strategy="auto"
        )
        return model_passes.one_pass(decoder, ids, alone, ids, ids[0, 0], ids[:2, 0], once)

    made = jax.eval_shape(logits, jax.ShapeDtypeStruct((8, 256), jnp.int32))
    assert (made.shape, made.dtype) == ((8, 256, sizes.vocab_size), jnp.float32)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lengths": (8, 64)}, "16 in all; the shortest has 8"),
        ({"num_adapters": 3}, "expected 1, 2, 4 or 8"),
        ({"rank": 0}, "expected no number below 1"),
        ({"models": ((8, 1, 1, 16),)}, "expected 3 values"),
    ],
)
def test_a_config_that_cannot_be_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        model_passes.Config(**values)


def test_arms_take_turns_in_alternating_order():
    order = []
    arms = {name: lambda name=name: order.append(name) for name in "ab"}
    times = turns.time_in_turns(arms, repeats=3)
    assert "".join(order) == "abbaabba"  # the first two to warm up
    assert len(times.seconds["a"]) == 3
    order.clear()
    assert len(turns.time_in_turns(arms, repeats=9, budget_s=0).seconds["b"]) == 3
