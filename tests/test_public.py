"""Every public callable takes the arguments it names and no others."""

import importlib
import inspect
import pkgutil

import pytest

import molora_jax
import pallas_kernels


def public_callables():
    """Functions and classes of both packages, by qualified name, each where it is defined."""
    for package in (molora_jax, pallas_kernels):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if found.name.rpartition(".")[2].startswith("_"):
                continue
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                if (
                    callable(value)
                    and not name.startswith("_")
                    and getattr(value, "__module__", None) == found.name
                ):
                    yield f"{found.name}.{name}", value


CALLABLES = dict(public_callables())
# The columns of a row of measurements are its writer's to name.
FREE_FORM = {"pallas_kernels.device_check.Rows.write"}


def methods(cls: type):
    """Its public methods; what it only refers to, such as a class of its own, is no method."""
    for name in vars(cls):
        value = getattr(cls, name)
        if not name.startswith("_") and callable(value) and not inspect.isclass(value):
            yield name, value


def test_a_misspelt_argument_is_a_type_error_everywhere():
    assert len(CALLABLES) > 150
    for name, function in CALLABLES.items():
        try:
            function(loar_path="x")
        except TypeError:
            continue
        pytest.fail(f"{name} took an argument that it does not have")


def test_nothing_public_swallows_arguments_by_name():
    sinks = []
    for name, value in CALLABLES.items():
        own = [(name, value)]
        if inspect.isclass(value):
            own = [(f"{name}.{method}", each) for method, each in methods(value)]
        for label, each in own:
            try:
                parameters = inspect.signature(each).parameters.values()
            except ValueError:  # a C function, whose own signature is not there to read
                continue
            sinks += [label for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert set(sinks) == FREE_FORM
