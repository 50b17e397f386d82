"""Plans as files: what is written is read again, and what cannot be is refused."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from moetool.architectures import MoEShape
from moetool.compress.mixing.plan_file import plan_text, read_plan
from moetool.errors import InvalidInputError
from moetool.format.layout import NO_BASE, LayerLayout
from moetool.representations import parse_representation

SHAPE = MoEShape(hidden=16, intermediate=32, experts=3, top_k=2)
FORMS = tuple(map(parse_representation, ("quantised:2:16", "low-rank:0", "quantised:2:16")))
BASE = parse_representation("quantised:2:16")
BASED = LayerLayout(
    SHAPE,
    dict.fromkeys(SHAPE.roles, FORMS),
    32,
    base=dict.fromkeys(SHAPE.roles, BASE),
)
TURNED = LayerLayout(
    SHAPE,
    dict.fromkeys(SHAPE.roles, (FORMS[0],) * 3),
    32,
    base=NO_BASE,
    rotation={"gate": 5, "up": 5, "down": 7},
)


def test_there_and_back(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(plan_text({0: BASED, 2: TURNED}, (0, 2)))
    found = read_plan(file, SHAPE, (0, 2))
    for layer, layout in ((0, BASED), (2, TURNED)):
        assert found[layer].weights == layout.weights
        assert found[layer].rotation == layout.rotation
        assert all(found[layer].base[role] == layout.base[role] for role in SHAPE.roles)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forms": {"quantised:2:16": [0, 1]}}, "each of the experts 0 to 2 once"),
        ({"forms": {"quantised:2:16": [0, 1, 2], "low-rank:0": [2]}}, "expert 2 has more than one form"),
        ({"forms": {"magic:2": [0, 1, 2]}}, "Unknown representation 'magic:2'"),
        ({"forms": {"quantised:2:13": [0, 1, 2]}}, "cannot be stored as 'quantised:2:13'"),
        ({"forms": {"shared-v:3": [0, 1, 2]}}, "'shared-v:3' shares a factor among experts"),
        ({"base": "shared-u:3"}, "'shared-u:3' shares a factor among experts"),
        (
            {"forms": {"low-rank-sparse:17:sparse-magnitude:0.1": [0, 1, 2]}},
            "17 directions; a matrix of 32 × 16 has 16",
        ),
        ({"base": "none"}, "gate and up have either both a base or both none"),
        ({"rotation": "often"}, "a rotation is a seed, not 'often'"),
        ({"rotation": 2**70}, r"a rotation's seed lies from 0 to 2\^63 - 1, not at 1180591620717411303424"),
        ({"rotation": -1}, "not at -1"),
        ({"rotation": True}, "a rotation is a seed, not True"),
        ({"rotation": float("nan")}, "a rotation is a seed, not nan"),
        ({"forms": {"quantised:2:16": [[0, 1], 2]}}, r"takes a list of numbers of experts, not \[0, 1\]"),
        ({"forms": {"quantised:2:16": [0, True, 2]}}, "takes a list of numbers of experts, not True"),
        ({"forms": {"quantised:2:16": 7}}, "takes a list of numbers of experts, not 7"),
        ({"forms": {"quantised:2:16": [0, 1, 2, 2**70]}}, "each of the experts 0 to 2 once"),
        ({"forms": {4: [0, 1, 2]}}, "a form is a name such as 'quantised:4:128', not 4"),
        ({"forms": [0, 1, 2]}, "`forms` gives for each form the experts"),
        ({"base": ["none"]}, r"a form is a name such as 'quantised:4:128', not \['none'\]"),
        ({"base": float("nan")}, "a form is a name such as 'quantised:4:128', not nan"),
        ({"more": 1}, "needs `base` and `forms`"),
    ],
)
def test_what_cannot_be(tmp_path: Path, change: dict[str, object], says: str) -> None:
    file = tmp_path / "plan.yaml"
    content = yaml.safe_load(plan_text({0: BASED}, (0,)))
    content["layers"][0]["up"] |= change
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(InvalidInputError, match=says):
        read_plan(file, SHAPE, (0,))


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not valid YAML"),
        ("[]", "is not a plan"),
        ("format: 2\nlayers: {}\n", "has format 2"),
        ("format: true\nlayers: {}\n", "has format True"),
        ("format: 1\nlayers: [1]\n", "is not a plan"),
        ("format: 1\nlayers: {'0': {}}\n", "a layer is a number without quotes, not '0'"),
        ("format: 1\nlayers: {false: {}}\n", "a layer is a number without quotes, not False"),
        ("format: 1\nlayers: {.nan: {}}\n", "a layer is a number without quotes, not nan"),
        ("format: 1\nlayers: {0: {}, 0: {}}\n", "'0' is there twice"),
        ("format: 1\nlayers: {3: {}}\n", "is for layers 3; the model has experts in 0"),
        ("format: 1\nlayers: " + 5000 * "[", "is nested too deep"),
        ("format: 1\nlayers: 2026-13-45\n", "is not valid YAML"),
        (BOMB + "format: *z\nlayers: {}\n", "is not a plan"),
    ],
)
def test_other_files(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(InvalidInputError, match=says) as error:
        read_plan(tmp_path / "plan.yaml", SHAPE, (0,))
    assert "plan.yaml" in str(error.value)
    assert len(str(error.value)) < 1000
