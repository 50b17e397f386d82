"""The command that makes a model again."""

import shlex

import pytest
import yaml

from moetool.checkpoint.manifest import Manifest, Origin
from moetool.report.gathering import _made, remaking
from moetool.report.sections import how_made
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


def test_every_step_that_is_known() -> None:
    """From the first; one of an older moetool is told to be missing."""
    steps = [
        Origin(stage="tune", source="my up", source_fingerprint="", chosen={"data": "a.txt", "seed": 3}),
        Origin(stage="vanilla", source="dense", source_fingerprint="", chosen={"experts": 4}),
    ]
    last = {"source": "tuned", "source_fingerprint": "", "recipe": {"stage": "decompose"}, "seed": 0}
    section = how_made(_made(Manifest(**last, lineage=tuple(steps))))
    assert shlex.split(section.code[0].text.replace("\\\n", "")) == shlex.split(
        "moetool upcycle dense 'my up' --method vanilla --experts 4 moetool tune 'my up' tuned --data a.txt --seed 3 "
        "moetool decompose tuned OUTPUT"
    )
    assert not any("other steps" in note for note in section.notes)
    steps[1] = steps[1].model_copy(update={"chosen": None})
    section = how_made(_made(Manifest(**last, lineage=tuple(steps))))
    assert section.code[0].text.startswith("moetool tune")
    assert any("other steps" in note for note in section.notes)
