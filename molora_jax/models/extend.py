"""Added vocabulary: more tokens at the end of a base's embedding, such as codes of pictures."""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from tokenizers import AddedToken

from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import params_digest
from molora_jax.models.lookup import BaseModel
from molora_jax.models.tokenizer import Tokenizer


def extend_vocabulary(
    base: BaseModel,
    tokens: Sequence[str],
    *,
    rows: Float[ArrayLike, "n D"] | None = None,
    head_rows: Float[ArrayLike, "n D"] | None = None,
    seed: int = 0,
) -> BaseModel:
    """The base with n more tokens; token i has id `base.config.vocab_size + i`.

    Every old id keeps its row, so its logits are what they were; with the new ones beside them in
    the softmax its probability can only fall. A tied embedding's rows are input and output at once.

    tokens     texts such as "<|pic_7|>", that stand for one id each in whatever is encoded
    rows       of the embedding; None: drawn by `seed` like the old ones (their mean and spread)
    head_rows  of the output matrix, where it is not tied to the embedding; None: drawn as well

    Raises ValueError for a text that is empty, has blanks, stands twice or is a token already, for
    rows of another shape or not finite, and for a tokenizer that has more tokens than the base has
    rows: its next token would not be the next row.
    """
    tokenizer = _extended_tokenizer(base, tokens)
    made = draw_rows(base.decoder, len(tokens), seed=seed)
    for name, value in {"rows": rows, "head_rows": head_rows}.items():
        if value is None:
            continue
        if name not in made:
            raise ValueError(f"{name} are given, but the output is the embedding: leave them out")
        value = np.asarray(value)
        if value.shape != made[name].shape:
            raise ValueError(
                f"{name} has shape {value.shape}, expected {made[name].shape}: a row for each new "
                "token"
            )
        if not np.isfinite(value.astype(np.float32)).all():
            raise ValueError(f"{name} holds NaN or infinity: train them anew")
        made[name] = jnp.asarray(value, made[name].dtype)
    decoder = with_rows(base.decoder, **made)
    digest = hashlib.sha256(
        "\n".join([base.digest, params_digest(made), *tokens]).encode()
    ).hexdigest()
    return BaseModel(
        name=f"{base.name}+{len(tokens)}",
        config=decoder.config,
        decoder=decoder,
        tokenizer=tokenizer,
        digest=digest,
    )


def with_rows(
    decoder: Decoder, rows: Float[Array, "n D"], head_rows: Float[Array, "n D"] | None = None
) -> Decoder:
    """The decoder with n rows more at the end of the embedding, and of an output of its own.

    A pure function of arrays, so that training can differentiate it in the rows.
    """
    # A new module of the same arrays, and no copy of the old: inside jit that could not be changed.
    other = jax.tree.map(lambda leaf: leaf, decoder)
    other.config = dataclasses.replace(
        decoder.config, vocab_size=decoder.config.vocab_size + rows.shape[0]
    )
    other.embedding = nnx.Param(jnp.concatenate([decoder.embedding[...], rows]))
    if decoder.lm_head is not None:
        if head_rows is None:
            raise ValueError("head_rows are missing: the output is not tied to the embedding")
        other.lm_head = nnx.Param(jnp.concatenate([decoder.lm_head[...], head_rows]))
    return other


def draw_rows(decoder: Decoder, count: int, *, seed: int = 0) -> dict[str, Array]:
    """`rows`, and `head_rows` where the output is not tied: (count, D), to start training from.

    They have the mean of the old rows and half their spread: a row of the mean has the logit of an
    average token, and takes little from the others.
    """
    rng = np.random.default_rng(seed)
    made = {}
    for name, matrix in {"rows": decoder.embedding, "head_rows": decoder.lm_head}.items():
        if matrix is None:
            continue
        old = np.asarray(matrix[...], np.float32)
        noise = rng.standard_normal((count, old.shape[1]), dtype=np.float32)
        made[name] = jnp.asarray(old.mean(axis=0) + 0.5 * old.std(axis=0) * noise, matrix.dtype)
    return made


def old_rows(decoder: Decoder, count: int) -> list[np.ndarray]:
    """The first `count` rows of the embedding, and of the output where it is one of its own."""
    matrices = [decoder.embedding, decoder.lm_head]
    return [np.asarray(jax.device_get(each[...]))[:count] for each in matrices if each is not None]


def _extended_tokenizer(base: BaseModel, tokens: Sequence[str]) -> Tokenizer:
    old, vocab_size = base.tokenizer, base.config.vocab_size
    if not tokens:
        raise ValueError("tokens is empty: name at least one token to add")
    for at, token in enumerate(tokens):
        if not isinstance(token, str) or not token or token.split() != [token]:
            raise ValueError(f"tokens[{at}] is {token!r}; expected a text without blanks")
        if token in tokens[:at] or old.backend.token_to_id(token) is not None:
            where = "stands twice" if token in tokens[:at] else "is a token of the base already"
            raise ValueError(f"tokens[{at}] {token!r} {where}: choose another name")
    if old.vocab_size > vocab_size:
        raise ValueError(
            f"base {base.name!r}: its tokenizer has {old.vocab_size} tokens, its embedding "
            f"{vocab_size} rows; added tokens would get ids past the added rows"
        )
    backend = tokenizers.Tokenizer.from_str(old.backend.to_str())
    # Some embeddings have spare rows that no token has: these get names, or the ids would slip.
    spare = [f"<|spare_{at}|>" for at in range(old.vocab_size, vocab_size)]
    # Not special: a picture is a part of the text that a client is sent.
    backend.add_tokens([AddedToken(each, normalized=False) for each in (*spare, *tokens)])
    found = [backend.token_to_id(token) for token in tokens]
    if found != list(range(vocab_size, vocab_size + len(tokens))):
        raise ValueError(
            f"the tokenizer gave the added tokens the ids {found[:3]}…; expected "
            f"{vocab_size} and on: its vocabulary has gaps, so that they would have no row"
        )
    return Tokenizer(
        backend,
        eos_ids=old.eos_ids,
        bos_id=old.bos_id,
        chat_template=old.chat_template,
        special_tokens=old.special_tokens,
    )
