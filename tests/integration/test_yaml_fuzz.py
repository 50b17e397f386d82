"""Random edits of plans and presets: each is refused in a sentence, or followed to the letter."""

import copy
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import change_tensors, copy_of
from damage import SPECS, WRONG, Nested
from torch import Tensor

from moetool.cli.generate import build_options
from moetool.cli.presets import preset_options
from moetool.compress.methods.auto import AutoOptions
from moetool.compress.mixing.plan_file import read_plan
from moetool.errors import MoetoolError
from moetool.job.job import Source

PLANS = int(os.environ.get("MOETOOL_TEST_EDITS", "4"))  # edited ones
PRESETS = int(os.environ.get("MOETOOL_TEST_EDITS", "30"))
VALUES = tuple(value for value in WRONG if not isinstance(value, Nested))
BASES = ("none", "quantised-weight:2:16", "nf4", "int8", "dense", "trellis-weight:2:16", "low-rank:4", "quantised:8:16")
FORMS = (
    "int8", "nf4", "dense", "low-rank:0", "low-rank:6", "quantised:1:16", "quantised:4:16", "quantised:8:row",
    "quantised-weight:1:16", "quantised-weight:2:16", "quantised-weight:8:16", "trellis:2:16", "trellis-weight:3:16",
    "quantised-low-rank:6:3:2", "quantised-rows:4.4.4.4:16", "sparse:0.5:3", "sparse-magnitude:0.3",
    "low-rank-sparse:2:sparse-magnitude:0.2",
)  # fmt: skip


def related(tensors: dict[str, Tensor]) -> None:
    """Experts that have much in common, so that what stands beside a base and what stands on it differ."""
    for name in sorted(tensors):
        if ".experts." in name:
            first = name.replace(f".experts.{name.split('.experts.')[1].split('.')[0]}.", ".experts.0.")
            tensors[name] = (tensors[first] + 0.3 * tensors[name]).contiguous()


@pytest.fixture(scope="module")
def kin(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_tensors(copy_of(tiny_mixtral, tmp_path_factory.mktemp("kin") / "model"), related)


def edits(plan: dict[str, Any], seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plans with one thing changed, and what that is."""
    draw = random.Random(seed)
    while True:
        found = copy.deepcopy(plan)
        layer = draw.choice(list(found["layers"]))
        role = draw.choice(["gate", "up", "down"])
        group = ["down"] if role == "down" else ["gate", "up"]
        entry, kind = found["layers"][layer][role], draw.randrange(8)
        if kind <= 2:  # another form for some
            spec, moved = draw.choice(FORMS if kind else SPECS), draw.sample(range(4), draw.randint(1, 4))
            kept = {form: [one for one in own if one not in moved] for form, own in entry["forms"].items()}
            entry["forms"] = {form: own for form, own in kept.items() if own}
            entry["forms"][spec] = sorted({*entry["forms"].get(spec, []), *moved})
            yield f"{layer}.{role}: {spec} for {moved}", found
        elif kind == 3:  # another base
            base = draw.choice(BASES)
            for own in group:
                found["layers"][layer][own]["base"] = base
            yield f"{layer}.{group}: base {base}", found
        elif kind == 4:
            seeds = draw.choice([0, 7, 2**31, 2**63 - 1, 2**63, -1])
            for own in group:
                found["layers"][layer][own]["rotation"] = seeds
            yield f"{layer}.{group}: rotation {seeds}", found
        else:  # another value somewhere
            places: list[tuple[Any, Any]] = [(found, key) for key in found] + [(found["layers"], layer)]
            places += [(entry, key) for key in entry] + [(entry["forms"], key) for key in entry["forms"]]
            place, key = draw.choice(places)
            if draw.random() < 0.2:
                del place[key]
                yield f"without {key} in {layer}.{role}", found
            else:
                place[key] = draw.choice(VALUES)
                yield f"{key} in {layer}.{role}: {place[key]!r}", found


def deserved(made: Path, source: Path) -> None:
    """Every matrix is what its form makes of it, or of its delta; a text may lead codes away from the nearest."""
    stored, original = Source.open(made).experts, Source.open(source).experts
    for layer in stored.moe_layers:
        layout = stored.layout(layer)
        for expert, role, form in layout.deltas():
            matrix = original.dense(layer, expert, role).float()
            target = matrix
            if form.uses_base and layout.has_base(role):
                target = matrix - stored.full_base(layer, role)
            turn = layout.input_rotation(role)
            target = target if turn is None else turn(target)
            fresh = form.decode(form.encode(target, stored.dtype), stored.shape.matrix(role), stored.dtype)
            limit = 3 * (fresh.float() - target).norm() + 1e-3 * matrix.norm()
            assert (stored.dense(layer, expert, role) - matrix).norm() <= limit, (layer, role, expert, form.spec)


@pytest.mark.parametrize("count", [PLANS])
def test_an_edited_plan_is_followed_or_refused(
    run_cli: Any, kin: Path, tiny_text: Path, tmp_path: Path, count: int
) -> None:
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 4, "--sequence-length", 32)
    file, output, source = tmp_path / "plan.yaml", tmp_path / "out", Source.open(kin).experts
    base = {"base": "quantised-weight:2:16", "forms": {"quantised:2:16": [0, 1, 2], "low-rank:0": [3]}}
    layers = {layer: {role: copy.deepcopy(base) for role in source.shape.roles} for layer in source.moe_layers}
    followed = 0
    for what, plan in edits({"format": 1, "layers": layers}, seed=count):
        file.write_text(yaml.safe_dump(plan))
        result = run_cli("compress", kin, output, "--method", "auto", "--plan", file, *text)
        assert result.code in (0, 2, 3), (what, result.code, result.stderr[-2000:])
        if result.code:
            assert result.stderr.splitlines()[-1].startswith("error: "), (what, result.stderr)
            assert not output.exists(), what
        else:
            followed += 1
            found, told = Source.open(output).experts, read_plan(file, source.shape, source.moe_layers)
            for layer in source.moe_layers:
                assert found.layout(layer).to_config() == told[layer].to_config(), what
            deserved(output, kin)
            verified = run_cli("verify", output, "--against", kin)
            assert verified.code == 0, (what, verified.stderr)
            shutil.rmtree(output)
        count -= 1
        if not count:
            break
    print(f"{followed} followed")
    assert followed


NAMES = (
    "ratio",
    "bytes",
    "samples",
    "seed",
    "group_size",
    "trellis",
    "merge",
    "base_bits",
    "rotate",
    "plan",
    "include",
)


@pytest.mark.parametrize("count", [PRESETS])
def test_an_edited_preset_is_what_it_says_or_refused(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, count: int
) -> None:
    draw, file = random.Random(count), tmp_path / "preset.yaml"
    options = {
        "calibration": str(tiny_text),
        "mix": 0,
        "samples": 4,
        "sequence_length": 32,
        "ratio": 0.4,
        "group_size": 16,
    }
    plain: dict[str, Any] = {
        "command": "compress",
        "method": "auto",
        "options": options,
        "variants": {"a": {"seed": 1}},
    }
    accepted = 0
    for number in range(count):
        preset = copy.deepcopy(plain)
        inside = draw.random() < 0.7
        place = preset["options"] if inside else draw.choice([preset, preset["variants"], preset["variants"]["a"]])
        key = draw.choice(NAMES if inside else [*place, "seed", 7, None, True])
        place[key] = draw.choice(VALUES)
        file.write_text(yaml.safe_dump(preset))
        what, reference = f"{key}: {place[key]!r}", f"{file}{draw.choice(['', ':a'])}"
        if number % 10 == 0:
            result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", reference, "--dry-run")
            assert result.code in (0, 2, 3, 4), (what, result.stderr[-2000:])
            assert result.code == 0 or result.stderr.splitlines()[-1].startswith("error: "), (what, result.stderr)
        try:
            given = preset_options(reference, "compress", "auto")
            found = build_options(AutoOptions, {}, given)
        except MoetoolError:
            continue
        accepted += 1
        for name, value in given.items():
            assert is_same(getattr(found, name), value), (what, getattr(found, name), value)
    assert accepted


def is_same(found: Any, given: Any) -> bool:
    """Whether a value is the one that was given, at most as text or as a number of another type."""
    if isinstance(found, bool) or isinstance(given, bool):
        return isinstance(found, bool) and str(found) in (str(given), str(bool(given)))
    if isinstance(found, int | float) and isinstance(given, int | float | str):
        return float(found) == float(given)
    return str(found) == str(given) or (not found and not given) or list(found) == given
