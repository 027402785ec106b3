"""Adapters: one on the host, many in a bank of fixed slots, PEFT folders, compositions."""

from molora_jax.adapters.adapter import Adapter, LoraPair
from molora_jax.adapters.bank import AdapterBank, Occupant
from molora_jax.adapters.compose import compose
from molora_jax.adapters.composition import Composition
from molora_jax.adapters.hot_set import HotSet, Lease, Version
from molora_jax.adapters.names import PROJECTIONS
from molora_jax.adapters.peft_folder import PeftFolder, read_peft_folder
from molora_jax.adapters.peft_load import load_adapter
from molora_jax.adapters.peft_save import AdapterCard, save_adapter
from molora_jax.adapters.report import LoadReport
from molora_jax.adapters.stack import AdapterStack
from molora_jax.adapters.trainable import TrainableAdapter, init_adapter

__all__ = [
    "PROJECTIONS",
    "Adapter",
    "AdapterBank",
    "AdapterCard",
    "AdapterStack",
    "Composition",
    "HotSet",
    "Lease",
    "LoadReport",
    "LoraPair",
    "Occupant",
    "PeftFolder",
    "TrainableAdapter",
    "Version",
    "compose",
    "init_adapter",
    "load_adapter",
    "read_peft_folder",
    "save_adapter",
]
