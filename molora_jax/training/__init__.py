"""Training of adapters and routers: data, losses, one loop with exact resume, evaluation."""

from molora_jax.training.adapter import train_adapter
from molora_jax.training.config import AdapterTrainConfig, RouterTrainConfig, TrainConfig
from molora_jax.training.data import Batch, BatchOrder, joined_windows, pack, split_documents
from molora_jax.training.evaluate import (
    Evaluation,
    base_arm,
    evaluate,
    oracle_arm,
    single_arm,
    uniform_arm,
)
from molora_jax.training.jsonl import DataReport, read_windows
from molora_jax.training.loop import NonFiniteLossError, fit
from molora_jax.training.pretrain import pretrain
from molora_jax.training.router import RouterTraining, train_router
from molora_jax.training.statistics import gather_statistics

__all__ = [
    "AdapterTrainConfig",
    "Batch",
    "BatchOrder",
    "DataReport",
    "Evaluation",
    "NonFiniteLossError",
    "RouterTrainConfig",
    "RouterTraining",
    "TrainConfig",
    "base_arm",
    "evaluate",
    "fit",
    "gather_statistics",
    "joined_windows",
    "oracle_arm",
    "pack",
    "pretrain",
    "read_windows",
    "single_arm",
    "split_documents",
    "train_adapter",
    "train_router",
    "uniform_arm",
]
