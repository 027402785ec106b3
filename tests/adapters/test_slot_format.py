"""A slot on the host: memory that a CPU reads in place, and that no bank writes to."""

import jax
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.slot_format import ALIGNMENT, aligned_zeros
from tests.adapters.make import BASE, make_adapter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_transfer_on_a_cpu_copies_nothing_and_the_bank_leaves_the_host_alone(dtype):
    bank = AdapterBank(BASE, num_slots=2, max_rank=5, dtype=dtype)
    staged = bank.stage(make_adapter(rank=4))
    before = jax.tree.map(np.array, staged.content)
    transferred = staged.transfer()
    for projection, arrays in staged.content.items():
        on_device = jax.tree.leaves(transferred[projection])
        for array, other in zip(arrays, on_device, strict=True):
            assert array.ctypes.data % ALIGNMENT == 0
            if jax.default_backend() == "cpu":
                assert other.unsafe_buffer_pointer() == array.ctypes.data
    bank.load(staged, transferred=transferred)
    bank.replace("sql", make_adapter("other", rank=5, seed=9))
    jax.tree.map(np.testing.assert_array_equal, staged.content, before)


def test_aligned_memory_is_zero_and_of_the_size_asked_for():
    array = aligned_zeros((3, 1, 5), np.float32)
    assert array.shape == (3, 1, 5) and array.flags["C_CONTIGUOUS"] and not array.any()
    assert aligned_zeros((0, 4), np.int32).shape == (0, 4)
