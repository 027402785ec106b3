"""Fixtures of the experiments' tests."""

import signal

import pytest


@pytest.fixture
def heeds_ctrl_c():
    """A shell starts what runs in its background with SIGINT ignored, and so does pytest there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
