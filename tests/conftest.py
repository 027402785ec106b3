"""Settings and fixtures of every test: CPU by default, shape checks, real data, the real model."""

import functools
import os
import pathlib

# Read when JAX is imported; a GPU run says JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

CHECKED_PACKAGES = ["molora_jax", "pallas_kernels"]


def pytest_addoption(parser):
    parser.addoption(
        "--shapes",
        choices=("on", "off"),
        default="on",
        help="check annotations, shapes included, of every call into the packages (beartype)",
    )


def pytest_configure(config):
    if config.getoption("--shapes") == "off":
        return
    import jax
    import jaxtyping

    register = jax.tree_util.register_dataclass

    @functools.wraps(register)
    def register_unchecked(nodetype, *args, **kwargs):
        # JAX calls the constructor to rebuild a pytree from anything: slices inside a scan, shapes,
        # shardings, None. The functions that take one are checked; its constructor cannot be.
        nodetype.__no_type_check__ = True
        return register(nodetype, *args, **kwargs)

    jax.tree_util.register_dataclass = register_unchecked
    jaxtyping.install_import_hook(CHECKED_PACKAGES, "beartype.beartype")


def require(reason: str):
    """Skips the test for `reason`, or fails it where MOLORA_REQUIRE_ALL=1 forbids that (CI)."""
    if os.environ.get("MOLORA_REQUIRE_ALL", "0") not in ("", "0"):
        pytest.fail(f"{reason} (MOLORA_REQUIRE_ALL is set)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def molora_data() -> pathlib.Path:
    """The folder of real data sets that MOLORA_DATA names."""
    value = os.environ.get("MOLORA_DATA", "")
    if not value:
        require("MOLORA_DATA is not set: it names the folder of real data sets")
    folder = pathlib.Path(value)
    if not folder.is_dir():
        # Set but wrong is a mistake on every machine.
        pytest.fail(f"MOLORA_DATA is {value!r}, which is not a folder", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M with its tokenizer, fetched into the cache the first time."""
    from molora_jax.models import load_base

    try:
        return load_base("smollm2-135m")
    except ConnectionError as error:
        require(f"smollm2-135m cannot be fetched: {error}")
