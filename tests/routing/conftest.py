"""Strict promotion for routers and losses, and calls whose own error messages are the subject."""

import jaxtyping
import pytest

from tests.helpers import strict_promotion


@pytest.fixture
def strict():
    """Strict dtype promotion and no implicit rank promotion."""
    with strict_promotion():
        yield


@pytest.fixture
def unchecked():
    """No shape checks, which would otherwise refuse a wrong shape before our own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
