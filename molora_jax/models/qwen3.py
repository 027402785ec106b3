"""The dense Qwen3 models by size, for plans and for random weights; nothing is fetched.

The numbers are those of the config.json files of Qwen/Qwen3-1.7B, -4B, -8B and -32B on Hugging Face
(Qwen3 Technical Report, arXiv 2505.09388, table 1); all parameters together are as published there.
"""

from molora_jax.models.config import ModelConfig


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=heads, num_kv_heads=8, head_dim=128, rope_theta=1e6,
        tie_word_embeddings=tied, qk_norm=True, max_positions=40960,
    )  # fmt: skip


QWEN3 = {
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
}
