"""A base or none, whatever loses least: `compress --method auto`."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import (
    CrashDriver,
    change_tensors,
    config_of,
    copy_of,
    load,
    logits,
    relative_error,
    weight_bytes,
    weights,
)
from sampling import sampled
from torch import Tensor

import moetool
from moetool.compress.methods.auto import Auto, AutoOptions
from moetool.compress.mixing.trials import Trials
from moetool.job.job import Source
from moetool.job.windows import held_out

GROUP = ("--group-size", 16)
METHOD = ("--method", "auto", *GROUP)


def related(tensors: dict[str, Tensor]) -> None:
    """Experts that are one expert and a little of their own."""
    torch.manual_seed(0)
    for name in tensors:
        if ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            common = tensors[name.replace(f".experts.{expert}.", ".experts.0.")]
            tensors[name] = common + 0.02 * common.std() * torch.randn_like(common) * (expert > 0)


def opposed(tensors: dict[str, Tensor]) -> None:
    """Pairs of experts, one minus the other: there is no mean."""
    for name in tensors:
        if ".experts.1." in name or ".experts.3." in name:
            other = name.replace(".experts.1.", ".experts.0.").replace(".experts.3.", ".experts.2.")
            tensors[name] = -tensors[other]


@pytest.fixture(scope="module")
def unlike(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_tensors(copy_of(tiny_mixtral, tmp_path_factory.mktemp("unlike") / "model"), opposed)


@pytest.fixture(scope="module")
def alike(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return change_tensors(copy_of(tiny_mixtral, tmp_path_factory.mktemp("alike") / "model"), related)


def bases(made: Any) -> set[str]:
    return {base for layer in made.told["layers"].values() for base in layer["base"].values()}


def lost(made: Any) -> float:
    """Loss of all matrices by the estimate that forms are chosen by."""
    return sum(sum(layer["loss"].values()) for layer in made.told["layers"].values())


def test_a_base_where_experts_are_alike_and_none_where_they_are_not(compress: Any, unlike: Path, alike: Path) -> None:
    apart, together = (compress(model, *METHOD, "--ratio", 0.5) for model in (unlike, alike))
    assert bases(apart) == {"none"}
    assert apart.told["notes"] == ["No layer has a shared base: without one, less is lost in the same bytes."]
    assert bases(together) <= {"2", "4", "8"}
    assert together.told["notes"] == ["Experts are stored as deltas to a shared base in every layer."]
    readers = [Source.open(made.path).experts for made in (apart, together)]
    assert [all(reader.layout(layer).is_baseless for layer in reader.moe_layers) for reader in readers] == [True, False]


def test_a_base_in_more_bits_where_deltas_are_small(compress: Any, alike: Path) -> None:
    """A base of 2 bits has an error that every delta must make up for; that of 8 has hardly any, and is shared."""
    chosen = compress(alike, *METHOD, "--ratio", 0.5)
    two = compress(alike, *METHOD, "--ratio", 0.5, "--base-bits", 2)
    assert bases(two) == {"2"}
    assert bases(chosen) <= {"4", "8"}
    assert lost(chosen) < 0.5 * lost(two)


@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.exhaustive), ("--rotate",)], ids=["plain", "rotated"]
)
def test_the_result_runs(
    run_cli: Any, compress: Any, alike: Path, tokens: Tensor, tmp_path: Path, more: tuple[str, ...]
) -> None:
    made = compress(alike, *METHOD, "--ratio", 0.6, *more)
    assert 0.6 <= made.told["achieved_ratio"] < 0.605
    expected = logits(made.path, tokens)
    with torch.no_grad():
        assert relative_error(moetool.synthesize(load(made.path))(tokens).logits, expected) < 1e-4
    assert run_cli("export", made.path, tmp_path / "dense").code == 0
    assert relative_error(logits(tmp_path / "dense", tokens), expected) < 1e-4
    assert run_cli("verify", made.path, "--against", alike).code == 0


@pytest.mark.parametrize(
    ("method", "name"), sampled(product(["hybrid", "quantize"], ["alike", "tiny_mixtral"]), [("hybrid", "alike")])
)
def test_no_worse_than_either_alone(request: Any, compress: Any, method: str, name: str) -> None:
    """By the measure that it goes by."""
    model = request.getfixturevalue(name)
    one, best = (compress(model, "--method", each, *GROUP, "--ratio", 0.5) for each in (method, "auto"))
    assert lost(best) <= 1.01 * lost(one)


def rotated_hybrid(compress: Any, alike: Path) -> Any:
    return compress(alike, "--method", "hybrid", *GROUP, "--ratio", 0.6, "--rotate")


def test_a_rotated_base(compress: Any, alike: Path, tokens: Tensor) -> None:
    made = rotated_hybrid(compress, alike)
    for layer in config_of(made.path)["quantization_config"]["layers"].values():
        assert layer["rotation"]["gate"] == layer["rotation"]["up"] != layer["rotation"]["down"]
    with torch.no_grad():
        dense = moetool.synthesize(load(made.path))(tokens).logits
    assert relative_error(dense, logits(made.path, tokens)) < 1e-4
    plain = compress(alike, "--method", "hybrid", *GROUP, "--ratio", 0.6)
    expected = logits(alike, tokens)
    assert relative_error(dense, expected) < 1.2 * relative_error(logits(plain.path, tokens), expected)


@pytest.mark.parametrize(
    "method",
    sampled(["auto", "hybrid", "quantize", "d2moe", "plain-svd", "reap"], ["auto", "d2moe", "plain-svd", "reap"]),
)
def test_so_many_bytes(run_cli: Any, calibration: Any, tiny_mixtral: Path, tmp_path: Path, method: str) -> None:
    """Every method that has a ratio has a size, which is as good as its ratio."""
    total, text = weight_bytes(tiny_mixtral), () if method == "plain-svd" else calibration
    room = total * 3 // 4
    for name, target in (("sized", ("--size", room)), ("shared", ("--ratio", 1 - room / total))):
        result = run_cli("compress", tiny_mixtral, tmp_path / name, "--method", method, *target, *text)
        assert result.code == 0, result.stderr
    assert weight_bytes(tmp_path / "sized") <= room
    assert weight_bytes(tmp_path / "sized") == weight_bytes(tmp_path / "shared")


def test_an_effort_stands_for_other_options_and_what_is_typed_goes_before() -> None:
    best = AutoOptions.model_validate({"ratio": 0.5, "effort": "best"})
    assert (best.trellis, best.include, best.refine) == (True, None, 120)
    typed = AutoOptions.model_validate({"ratio": 0.5, "effort": "best", "refine": 8, "include": "attention"})
    assert (typed.trellis, typed.include, typed.refine) == (True, ("attention",), 8)
    assert AutoOptions(ratio=0.5, effort="fast").samples == 32
    plain, normal = AutoOptions(ratio=0.5), AutoOptions(ratio=0.5, effort="normal")
    assert plain.model_dump() == normal.model_dump()


@pytest.mark.parametrize("method", ["hybrid", "d2moe", "plain-svd", "reap"])
@pytest.mark.parametrize(("size", "says"), [("1GB", "as they are. Give less."), ("1kB", "--size 1.0 kB ")])
def test_a_size_that_cannot_be(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, method: str, size: str, says: str
) -> None:
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--method", method, "--size", size)
    assert result.code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def planned(run_cli: Any, calibration: Any, alike: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, and the `plan.yaml` that was saved with it. Read-only."""
    folder = tmp_path_factory.mktemp("planned")
    options = ("--ratio", 0.6, "--save-plan", folder / "plan.yaml", *calibration)
    saved = run_cli("compress", alike, folder / "model", *METHOD, *options)
    assert saved.code == 0, saved.stderr
    return folder


def test_a_plan_is_followed(run_cli: Any, calibration: Any, alike: Path, planned: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    command = ("compress", alike)
    followed = run_cli(*command, tmp_path / "two", *METHOD, "--plan", planned / "plan.yaml", *calibration, "--json")
    assert followed.code == 0, followed.stderr
    assert weights(planned / "model") == weights(tmp_path / "two")
    plan = yaml.safe_load((planned / "plan.yaml").read_text())
    plan["layers"][1]["down"] = {"base": "none", "forms": {"quantised:4:16": [3, 1], "quantised:8:16": [0, 2]}}
    file.write_text(yaml.safe_dump(plan))
    assert run_cli(*command, tmp_path / "three", *METHOD, "--plan", file, *calibration).code == 0
    layout = Source.open(tmp_path / "three").experts.layout(1)
    assert not layout.has_base("down")
    assert layout.has_base("up")
    assert [form.spec for form in layout.weights["down"] or ()] == [f"quantised:{bits}:16" for bits in (8, 4, 8, 4)]


def test_a_matrix_of_its_own_on_a_base(
    run_cli: Any, calibration: Any, alike: Path, planned: Path, tmp_path: Path
) -> None:
    """What does not use the base is the expert's own matrix: a reader adds no base to it."""
    file, command = tmp_path / "plan.yaml", ("compress", alike)
    plan = yaml.safe_load((planned / "plan.yaml").read_text())
    forms = {"int8": [0], "nf4": [1], "quantised-weight:8:16": [2], "trellis-weight:4:16": [3]}
    plan["layers"][1]["down"] = {"base": "quantised-weight:2:16", "forms": forms}
    file.write_text(yaml.safe_dump(plan))
    assert run_cli(*command, tmp_path / "two", *METHOD, "--plan", file, *calibration).code == 0
    told = run_cli("verify", tmp_path / "two", "--against", alike, "--json")
    assert told.code == 0, told.stderr
    assert told.json["relative_error"]["1"]["down"] < 0.15


def test_plan_and_run_mix_the_same(alike: Path, tiny_text: Path) -> None:
    """What both go by is computed once: target, schemes on offer, experts in memory."""
    stage = Auto(Source.open(alike), AutoOptions(ratio=0.5, calibration=str(tiny_text), group_size=16))
    plan = stage.plan()
    assert stage.offered is stage.offered
    assert stage.target == plan.output_bytes
    assert stage.experts_at_once == plan.experts_at_once


@pytest.mark.exhaustive
def test_killed_runs_resume_to_the_same_bytes(
    crash: CrashDriver, calibration: Any, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    arguments = ("compress", tiny_mixtral_bf16, *METHOD, "--ratio", 0.4, *calibration, "--shard-size", "40kB")
    crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, 40, tmp_path / "whole")


SEARCH = ("--max-increase", "3%", "--held-out", 12, "--samples", 8)


def test_the_smallest_that_holds(run_cli: Any, calibration: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its increase is that of the model that is written; its plan makes the same weights again; what it was expected to
    take, and what was still to come, is not what one of its trials was."""
    file, command = tmp_path / "plan.yaml", ("compress", tiny_mixtral)
    plan = run_cli(*command, tmp_path / "one", *METHOD, *calibration, *SEARCH, "--dry-run", "--json").json
    more = ("--save-plan", file, "--log-json", tmp_path / "log", "--json")
    made = run_cli(*command, tmp_path / "one", *METHOD, *calibration, *SEARCH, *more)
    assert made.code == 0, made.stderr
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    expected = [event["phases"] for event in events if event["event"] == "expected"]
    assert expected[0] == plan["phases"]
    assert [len(phases) for phases in expected[1:]] == [14, *(13 - 2 * i for i, _ in enumerate(made.json["trials"])), 1]
    told = {phase["name"]: phase.get("expected_seconds") for phase in made.json["phases"]}
    assert told.items() >= {phase["name"]: phase["seconds"] for phase in plan["phases"]}.items()
    *others, kept = made.json["trials"]
    assert 0 < len(others) < 6
    assert kept["increase"] <= 0.03
    assert all(trial["increase"] > 0.03 for trial in others if trial["bytes"] < kept["bytes"])
    assert 0.97 * kept["bytes"] < weight_bytes(tmp_path / "one") <= kept["bytes"]
    assert f"perplexity grows by {kept['increase']:.2%} ± {kept['increase_error']:.2%}" in made.json["notes"][-1]
    source = Source.open(tiny_mixtral)
    options = AutoOptions(max_increase=0.03, calibration=str(calibration[1]), mix=0, samples=8, sequence_length=32)
    windows = held_out(source, options, 12)
    lost = [window_losses(path, windows) for path in (tmp_path / "one", tiny_mixtral)]
    assert kept["increase"] == pytest.approx((lost[0] - lost[1]).mean().expm1().item(), rel=1e-3, abs=1e-5)
    followed = run_cli(*command, tmp_path / "two", *METHOD, *calibration, "--samples", 8, "--plan", file)
    assert followed.code == 0, followed.stderr
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


def window_losses(path: Path, windows: Tensor) -> Tensor:
    """Mean next-token loss of each window, by the whole model."""
    scores = logits(path, windows)[:, :-1].double().log_softmax(-1)
    return -scores.gather(-1, windows[:, 1:, None])[..., 0].mean(-1)


@pytest.mark.exhaustive
def test_a_search_that_was_killed_goes_on(
    crash: CrashDriver, calibration: Any, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Among sizes, with some of them done."""
    arguments = ("compress", tiny_mixtral, *METHOD, *calibration, *SEARCH)
    changes = crash.whole(tmp_path / "whole", arguments)
    crash.goes_on(tmp_path / "out", arguments, changes // 2, tmp_path / "whole")


@pytest.mark.exhaustive
def test_an_increase_that_nothing_holds(
    run_cli: Any, calibration: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(search: Trials, checkpoint: Any) -> Tensor:
        worse = 0.0 if checkpoint.path == tiny_mixtral else 1e4 / checkpoint.weight_bytes
        return torch.linspace(1, 2, len(search.windows), dtype=torch.float64) * (1 + worse)

    monkeypatch.setattr(Trials, "_losses", losses)
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", *METHOD, *calibration, *SEARCH)
    assert result.code == 2
    assert "--max-increase 3.000% is not possible" in result.stderr
    assert "The least that was measured: " in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "Give one of --ratio, --size, --max-increase or --plan."),
        (("--ratio", 0.5, "--max-increase", "2%"), 2, "one of them"),
        (("--max-increase", "0%"), 2, "greater than 0"),
        (("--max-increase=-2%",), 2, "greater than 0"),
        (("--max-increase", "2"), 2, "if that is meant, write 200%"),
        (("--max-increase", "little"), 2, "write it like 2% or 0.02"),
        (("--max-increase", "2%", "--held-out", 1), 2, "--held-out"),
        (("--max-increase", "2%", "--held-out", 100_000), 2, "and 100000 are to be held out"),
        (("--ratio", 0.5, "--size", "1MB"), 2, "--ratio and --size exclude each other: give one of them."),
        (("--plan", "PLAN", "--save-plan", "x.yaml"), 2, "with --plan nothing is"),
        (("--size", "1kB"), 2, "--size 1.0 kB is not possible here: the weight files take"),
        (("--ratio", 0.99), 2, "--ratio 0.99 is not possible here: the weight files take"),
        (("--plan", "none.yaml"), 3, "Cannot read the plan"),
        (("--plan", "PLAN"), 3, "is for layers 0; the model has experts in"),
    ],
)
def test_what_cannot_be(
    run_cli: Any,
    calibration: Any,
    tiny_mixtral: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    code: int,
    says: str,
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("format: 1\nlayers: {0: {}}\n")
    given = [plan if option == "PLAN" else option for option in options]
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", *METHOD, *given, *calibration)
    assert result.code == code
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_inputs_that_cannot_be_rotated_are_told_before_the_text_is_read(
    run_cli: Any, calibration: Any, make_mixtral: Any, save_model: Any, tmp_path: Path
) -> None:
    source = save_model(make_mixtral(intermediate_size=44), tmp_path / "odd")
    options = ("--group-size", 4, "--ratio", 0.5, "--rotate", *calibration)
    result = run_cli("compress", source, tmp_path / "out", "--method", "auto", *options, "--dry-run")
    assert result.code == 2
    assert "of the 44 inputs of down, blocks of 4 are all that fit" in result.stderr
