"""Added vocabulary rows: what was there stays; what is new is one id in text and one row."""

import dataclasses

import jax
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.merge import merge_into
from molora_jax.generation.text_stream import TextStream
from molora_jax.models import Decoder, load_base
from molora_jax.models.decoder import KVCache
from molora_jax.models.export import decoder_arrays
from molora_jax.models.extend import draw_rows, extend_vocabulary, with_rows
from molora_jax.routing import VocabularyRouter
from tests.adapters.make import arrays_for, modules_of
from tests.helpers import assert_close

TOKENS = ("<|pic_begin|>", "<|pic_0|>", "<|pic_1|>", "<|pic_end|>")


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-random")


@pytest.fixture(scope="module")
def extended(base):
    return extend_vocabulary(base, TOKENS)


@jax.jit
def logits(decoder, tokens):
    return decoder.logits(decoder(tokens).hidden)


def tied(base):
    """The random model with its embedding as its output."""
    config = dataclasses.replace(base.config, tie_word_embeddings=True)
    arrays = {n: a for n, a in decoder_arrays(base.decoder).items() if n != "lm_head.weight"}
    return dataclasses.replace(base, config=config, decoder=Decoder(config, arrays))


@pytest.mark.parametrize("is_tied", [True, False])
def test_old_ids_keep_their_rows_and_logits(base, is_tied):
    old = tied(base) if is_tied else base
    new = extend_vocabulary(old, TOKENS)
    V, tokens = base.config.vocab_size, np.array([[5, 40, 200, 7]], np.int32)
    assert new.config.vocab_size == new.decoder.config.vocab_size == V + 4
    np.testing.assert_array_equal(new.decoder.embedding[...][:V], old.decoder.embedding[...])
    before, after = logits(old.decoder, tokens), logits(new.decoder, tokens)
    assert after.shape[-1] == V + 4
    # To the last roundings: a wider product may add in another order.
    assert_close(after[..., :V], before, terms=64)


def test_what_is_added_is_read_and_foretold_by_its_own_row(base):
    rows = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    new = extend_vocabulary(tied(base), TOKENS, rows=rows)
    V, tokens = base.config.vocab_size, np.array([[5, base.config.vocab_size + 2]], np.int32)
    np.testing.assert_array_equal(new.decoder.embedding[...][V:], rows)
    hidden = new.decoder(tokens).hidden
    assert_close(new.decoder.logits(hidden)[..., V:], hidden @ rows.T, terms=64)
    other = new.decoder(np.array([[5, V + 3]], np.int32)).hidden
    assert not np.allclose(hidden[0, 1], other[0, 1])


def test_the_tokenizer_writes_one_id_for_each_and_reads_it_back(base, extended):
    V = base.config.vocab_size
    text = "Greek: <|pic_begin|><|pic_1|><|pic_0|><|pic_end|> é"
    ids = extended.tokenizer.encode(text)
    assert ids[7:11] == [V, V + 2, V + 1, V + 3]
    assert extended.tokenizer.decode(ids) == text
    stream = TextStream(extended.tokenizer, stop=["<|pic_end|>"])
    shown = "".join(stream.push(token) for token in ids) + stream.finish()
    assert shown == "Greek: <|pic_begin|><|pic_1|><|pic_0|>" and stream.stopped
    assert base.tokenizer.vocab_size == V, "the base's own tokenizer is as it was"
    plain = "No picture here."
    assert extended.tokenizer.encode(plain) == base.tokenizer.encode(plain)


def test_rows_that_no_token_has_are_passed_over(base):
    config = dataclasses.replace(base.config, vocab_size=base.config.vocab_size + 3)
    arrays = decoder_arrays(base.decoder)
    wider = {
        name: np.concatenate([array, array[:3]]) if array.shape[0] == 260 else array
        for name, array in arrays.items()
    }
    padded = dataclasses.replace(base, config=config, decoder=Decoder(config, wider))
    assert extend_vocabulary(padded, TOKENS).tokenizer.encode("<|pic_begin|>") == [263]


def test_a_digest_tells_rows_and_names_apart(base, extended):
    assert extend_vocabulary(base, TOKENS).digest == extended.digest != base.digest
    assert extend_vocabulary(base, TOKENS, seed=1).digest != extended.digest
    assert extend_vocabulary(base, TOKENS[::-1]).digest != extended.digest


def test_gradients_reach_the_added_rows_inside_jit(base):
    made = draw_rows(base.decoder, 4)
    tokens = np.array([[5, 261, 262, 9]], np.int32)

    def loss(rows):
        decoder = with_rows(base.decoder, **rows)
        return decoder.logits(decoder(tokens).hidden)[..., 260:].sum()

    grads = jax.jit(jax.grad(loss))(made)
    assert set(grads) == {"rows", "head_rows"}
    assert np.abs(grads["head_rows"]).min() > 0
    read = np.abs(grads["rows"]).max(axis=1) > 0
    assert read.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        ((), {}, "tokens is empty"),
        (("<|a b|>",), {}, r"tokens\[0\] is '<|a b|>'; expected a text without blanks"),
        (("x1", "x1"), {}, r"tokens\[1\] 'x1' stands twice"),
        (("x1", "<|im_end|>"), {}, "is a token of the base already"),
        (("x1",), {"rows": np.zeros((2, 64), np.float32)}, r"shape \(2, 64\), expected \(1, 64\)"),
        (("x1",), {"rows": np.full((1, 64), np.nan, np.float32)}, "holds NaN or infinity"),
    ],
)
def test_what_cannot_be_added_is_refused(base, tokens, options, said):
    with pytest.raises(ValueError, match=said):
        extend_vocabulary(base, tokens, **options)


def test_a_tied_base_takes_no_rows_of_an_output(base):
    with pytest.raises(ValueError, match="head_rows are given, but the output is the embedding"):
        extend_vocabulary(tied(base), ("x1",), head_rows=np.zeros((1, 64), np.float32))


def test_vocabulary_routing_equals_each_token_on_the_base_merged_with_its_own_adapter(extended):
    """5 text, 9 picture and 5 text tokens: no adapter is left out and none acts elsewhere."""
    c, V = extended.config, extended.config.vocab_size - 4
    adapters = []
    for seed, name in enumerate(("text", "picture")):
        arrays = arrays_for(modules_of(c), 3, seed=seed, config=c)
        arrays = {module: (0.3 * a, 0.3 * b) for module, (a, b) in arrays.items()}
        adapters.append(Adapter.from_arrays(name, arrays, alpha=3.0, num_layers=c.num_layers))
    bank = AdapterBank(c, num_slots=2, max_rank=3)
    for adapter in adapters:
        bank.load(adapter)
    router = VocabularyRouter.from_ranges([(0, V, 0), (V, V + 4, 1)], vocab_size=V + 4)
    rng = np.random.default_rng(0)
    tokens = np.concatenate(
        [rng.integers(0, 250, 5), V + rng.integers(0, 4, 9), rng.integers(0, 250, 5)]
    ).astype(np.int32)
    out = extended.decoder(tokens[None], adapters=bank.stacks, router=router)
    assert out.routing.adapter_ids[0, :, 0].tolist() == [0] * 5 + [1] * 9 + [0] * 5

    arrays = decoder_arrays(extended.decoder)
    merged = [Decoder(c, merge_into(arrays, c, [adapter])[0]) for adapter in adapters]
    step = jax.jit(lambda decoder, token, cache: decoder.decode(token, cache))
    shape = (1, c.num_kv_heads, len(tokens), c.head_dim)
    zeros = tuple(np.zeros(shape, np.float32) for _ in range(c.num_layers))
    cache = KVCache(zeros, zeros, np.zeros((1, len(tokens)), bool), np.zeros(1, np.int32))
    for at, token in enumerate(tokens):
        alone, cache = step(merged[int(token >= V)], token[None], cache)
        assert_close(out.hidden[0, at], alone.hidden[0, 0], terms=10_000)
