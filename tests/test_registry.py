from importlib.metadata import EntryPoint
from typing import Literal

import pytest

from shardlib import registry
from shardlib.config import configclass
from shardlib.errors import ModelError


def install(monkeypatch, **entries):
    """Makes these the installed entry points."""
    found = [EntryPoint(name, value, registry.GROUP) for name, value in entries.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)


@configclass
class Config:
    name: Literal["mine"] = "mine"


FAMILY = registry.ModelFamily(config=Config, make=print, loss=print)


def test_the_built_in_families_are_installed():
    families = registry.families()
    assert {"resnet", "transformer"} <= families.keys()
    assert registry.family("transformer") is families["transformer"]
    assert families["transformer"].inputs is registry.TEXT
    assert families["transformer"].generate is not None
    assert families["resnet"].inputs is registry.IMAGES
    assert families["resnet"].generate is None


def test_a_package_of_a_user_plugs_in(monkeypatch):
    install(monkeypatch, mine=f"{__name__}:FAMILY")
    assert registry.families() == {"mine": FAMILY}


def test_unknown_family(monkeypatch):
    install(monkeypatch, transformer="a:b", resnet="c:d")
    fault = r"'transfomer'; installed: resnet, .*Did you mean 'transformer'\?\n  Choose one of them"
    with pytest.raises(ModelError, match=fault):
        registry.family("transfomer")


@pytest.mark.parametrize(
    ("name", "value", "fault", "fix"),
    [
        ("mine", "no_such_package:FAMILY", "cannot be loaded from", "Repair or reinstall"),
        ("mine", "math:pi", "is a float, not a", "Point it at a ModelFamily object."),
        ("other", f"{__name__}:FAMILY", "name is 'mine'", 'Declare `name: Literal["other"]'),
    ],
)
def test_what_is_wrong_with_a_family(monkeypatch, name, value, fault, fix):
    install(monkeypatch, **{name: value})
    with pytest.raises(ModelError) as error:
        registry.family(name)
    for part in (f"'{name}'", value, fault, f"\n  {fix}"):
        assert part in str(error.value)


def test_two_packages_of_one_name(monkeypatch):
    entries = [EntryPoint("mine", value, registry.GROUP) for value in ("a:F", "b:F")]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    with pytest.raises(ModelError, match=r"family 'mine': a:F and b:F\.\n  Uninstall one of them"):
        registry.families()
