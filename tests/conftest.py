"""Settings and fixtures of every test: CPU by default, shape checks, real data, the real model."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib

# Read when JAX is imported; a GPU run says JAX_PLATFORMS=cuda.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling takes most of the time of a test of tiny arrays: a third less without LLVM's optimiser,
# and a third of that with the older writers of loops, which JAX 0.11 has no more. So the oldest JAX
# is quick, and the newest is tested as users have it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    * importlib.metadata.version("jax").startswith("0.10."),
)

import pytest

ROOT = pathlib.Path(__file__).parents[1]
COMPILED = ROOT / ".pytest_cache" / "programs"
CHECKED_PACKAGES = ["molora_jax", "pallas_kernels"]
# Half a minute and more each on a quiet core (--junitxml), the others less.
LONGEST = (
    "parallel/test_sharded.py",
    "pallas_kernels/test_lora_delta.py",
    "pallas_kernels/test_kernels.py",
    "models/test_decoder.py",
    "pallas_kernels/test_transforms.py",
    "generation/test_engine.py",
    "training/test_router.py",
    "experiments/test_compose.py",
)
MOST_MAPS = 0  # between modules; a single one needs up to 23,000 more
# What a marked test needs beyond the extra "dev", and the way to have it.
NEEDED_MODULES = {
    "parity": (("torch", "transformers", "peft"), "tests/parity/requirements.txt"),
    "deviceless": (("jax_cuda13_plugin",), "the extra 'deviceless'"),
}


def check_shapes():
    """Checks annotations, shapes included, of every call into the packages (beartype)."""
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


def share_programs():
    """Each program is compiled once for all modules, workers and the next run: half of the time.

    JAX finds it by the program itself, the flags and its own version. Only of this process and not
    by the environment, because a process that a test kills while it writes leaves half a file.
    """
    import jax

    if importlib.util.find_spec("jax_cuda13_plugin"):
        return  # what is compiled for a GPU is looked at as it comes from the compiler

    jax.config.update("jax_compilation_cache_dir", str(COMPILED))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


share_programs()

# Here and not in a hook of pytest: a folder's own conftest may import the packages before one runs.
if os.environ.get("MOLORA_SHAPES") != "off":
    check_shapes()


def pytest_runtest_setup(item):
    for marker, (modules, source) in NEEDED_MODULES.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if item.get_closest_marker(marker) and missing:
            pytest.skip(f"not installed: {', '.join(missing)} (from {source})")
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("no NVIDIA GPU, or JAX_PLATFORMS hides it")


def _fail_instead_of_skipping(report):
    """Under MOLORA_REQUIRE_ALL=1 (CI) nothing may go untested for want of something."""
    required = os.environ.get("MOLORA_REQUIRE_ALL", "0") not in ("", "0")
    if required and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (and MOLORA_REQUIRE_ALL is set)"
    return report


def pytest_collection_modifyitems(items):
    """The longest modules first: one that is begun last is waited for with an idle core."""
    order = {ROOT / "tests" / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _fail_instead_of_skipping((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _fail_instead_of_skipping((yield))


def pytest_terminal_summary(terminalreporter):
    """The largest differences that the parity tests measured (tests/parity/conftest.py)."""
    groups: dict[str, dict[str, float]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("parity "):
                cases = groups.setdefault(name, {})
                cases[report.nodeid] = max(value, cases.get(report.nodeid, 0.0))
    for name, cases in groups.items():
        terminalreporter.write_line(
            f"{name}: largest |Δ| {max(cases.values()):.2g} over {len(cases)} cases"
        )


@pytest.fixture(scope="module", autouse=True)
def _let_programs_go():
    """Frees compiled programs where they are many: each holds memory maps of its process, of which
    Linux allows 65,530, and XLA crashes where it gets no more. All modules together need more."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="session")
def molora_data() -> pathlib.Path:
    """The folder of real data sets that MOLORA_DATA names."""
    value = os.environ.get("MOLORA_DATA", "")
    if not value:
        pytest.skip("MOLORA_DATA is not set: it names the folder of real data sets")
    folder = pathlib.Path(value)
    if not folder.is_dir():  # set but wrong is a mistake on every machine
        pytest.fail(f"MOLORA_DATA is {value!r}, which is not a folder", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M with its tokenizer, fetched into the cache the first time."""
    from molora_jax.models import load_base

    try:
        return load_base("smollm2-135m")
    except ConnectionError as error:
        pytest.skip(f"smollm2-135m cannot be fetched: {error}")
