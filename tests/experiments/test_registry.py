"""Checks of Config types, and combinations of sweeps."""

import dataclasses

import pytest

from experiments import registry
from tests.experiments.toy import Config


def test_values_become_what_the_annotation_says():
    config = Config(rate=2, sizes=[3, 4])
    assert (type(config.rate), config.sizes) == (float, (3, 4))
    assert Config(limit=3).limit == 3
    assert Config().limit is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("steps", 1.0, "expected int"),
        ("steps", True, "expected int"),
        ("steps", None, "expected int"),
        ("rate", "0.5", "expected float"),
        ("rate", float("nan"), "finite"),
        ("verbose", 1, "expected bool"),
        ("kind", "cubik", "did you mean 'cubic'?"),
        ("sizes", 3, "list or tuple"),
        ("sizes", (1, 2.5), "expected int"),
        ("limit", 2.5, "int | None"),
        ("out", 3, "expected str"),
    ],
)
def test_a_wrong_type_is_refused_with_field_value_and_expectation(field, value, said):
    with pytest.raises(ValueError, match="expected") as caught:
        Config(**{field: value})
    assert f"Config.{field} = {value!r}" in str(caught.value)
    assert said in str(caught.value)


def test_a_place_keeps_its_default_and_its_mark():
    (field,) = [each for each in dataclasses.fields(Config) if each.name == "out"]
    assert field.default == ""
    assert field.metadata["place"]


def test_a_home_folder_is_expanded_in_places_alone(monkeypatch):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Places:
        files: tuple[str, ...] = registry.place(())
        out: str = registry.place()
        text: str = ""

    monkeypatch.setenv("HOME", "/home/ada")
    config = Places(files=("~/a", "b"), out="~/x", text="~/x")
    registry.check_config(config)
    assert config == Places(files=("/home/ada/a", "b"), out="/home/ada/x", text="~/x")


def test_product_of_sweeps():
    assert registry.product([]) == [""]
    assert registry.product([["a"], ["b", "c"]]) == ["a\nb", "a\nc"]


def test_every_entry_names_a_module_and_fits_a_line():
    assert max(map(len, str(registry.table()).splitlines())) <= 120
    for entry in registry.EXPERIMENTS.values():
        assert entry.load().__doc__
