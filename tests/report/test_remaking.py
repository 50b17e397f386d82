"""The command that makes a model again."""

import shlex

import pytest
import yaml

from moetool.report.remaking import remaking
from moetool.stages import stages


@pytest.mark.parametrize("name", sorted(stages()))
def test_what_is_the_default_is_not_said(name: str) -> None:
    kind = stages()[name]
    fields = kind.options_type.model_fields
    recipe = {"stage": name, **{field: info.get_default(call_default_factory=True) for field, info in fields.items()}}
    required = {field for field, info in fields.items() if info.is_required()}
    recipe |= dict.fromkeys(required, "given")
    found = remaking(recipe, "a model")
    assert found is not None
    words = shlex.split(found.command)
    assert words[:4] == ["moetool", kind.method_of or name, "a model", "OUTPUT"]
    choice = [] if kind.method_of is None else [*words[4:6]]
    assert choice in ([], ["--method", name], ["--format", name])
    said = [word for word in words[4 + len(choice) :] if word != "given"]
    assert said == [f"--{field.replace('_', '-')}" for field in fields if field in required]


def test_switches_and_numbers() -> None:
    recipe = {"stage": "g-moefication", "proof": False, "keep": 0.5, "calibration": "a b.txt", "dtype": "auto"}
    found = remaking(recipe, "m")
    assert found is not None
    assert (
        found.command == "moetool moefy m OUTPUT --method g-moefication --no-proof --keep 0.5 --calibration 'a b.txt'"
    )


def test_lists_need_a_preset() -> None:
    kind = stages()["branch-train-mix"].options_type
    given = kind.model_validate({"source": [{"model": "x", "prompts": ["$HOME: é"]}, {"model": "y"}], "top_k": 1})
    found = remaking({"stage": "branch-train-mix", **given.model_dump(mode="json")}, "m")
    assert found is not None
    assert found.command == "moetool upcycle m OUTPUT --method branch-train-mix --preset preset.yaml"
    assert found.preset is not None
    preset = yaml.safe_load(found.preset)
    assert (preset["command"], preset["method"]) == ("upcycle", "branch-train-mix")
    assert kind.model_validate(preset["options"]) == given
    assert set(preset["options"]) == {"source", "top_k"}


@pytest.mark.parametrize("recipe", [{"stage": "of-tomorrow"}, {}, {"stage": "d2moe", "gone": 1}])
def test_what_this_version_does_not_know(recipe: dict[str, object]) -> None:
    assert remaking(recipe, "m") is None
