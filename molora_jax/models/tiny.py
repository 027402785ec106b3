"""A small Llama with random weights and a tokenizer over bytes: the real one's path in no time."""

import numpy as np
from tokenizers import AddedToken

from molora_jax.models.config import ModelConfig
from molora_jax.models.tokenizer import Tokenizer, byte_alphabet, byte_level_bpe
from molora_jax.models.weights import random_arrays

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config() -> ModelConfig:
    """Four layers of width 64, two query heads per key/value head."""
    return ModelConfig(
        model_type="llama",
        vocab_size=256 + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_positions=2048,
        bos_id=256,
        eos_ids=(256, 258),
    )


def tiny_arrays() -> dict[str, np.ndarray]:
    """Deterministic weights; logits with a spread of about 1, so no token wins everywhere."""
    return random_arrays(tiny_config(), seed=0)


def tiny_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, and 256.. the special tokens."""
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocab |= {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    backend = byte_level_bpe(vocab, [], split="gpt-2")
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    end_of_text, _, end_of_turn, pad = SPECIAL_TOKENS
    return Tokenizer(
        backend,
        eos_ids=tiny_config().eos_ids,
        bos_id=256,
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": end_of_text, "eos_token": end_of_turn, "pad_token": pad},
    )
