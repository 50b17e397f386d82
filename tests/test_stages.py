"""What every stage promises: options that go through JSON and YAML, and a plan from headers alone."""

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dense_families import build_dense
from pydantic import ValidationError

from moetool.cli.choosing import CHOICES
from moetool.cli.names import COMMANDS, commands
from moetool.costs.machine import Machine
from moetool.job.execute import run_stage
from moetool.job.options import RunOptions
from moetool.job.planning import plan_stage
from moetool.job.progress import Progress
from moetool.stages import PLACES, stages

STAGES = sorted(stages())
# What a stage cannot be planned without; the files that are named are found below.
NEEDED: dict[str, dict[str, Any]] = {
    "add-expert": {"source": "DENSE"},
    "branch-train-mix": {"source": ["DENSE", "DENSE"]},
    "d2moe": {"ratio": 0.2},
    "drop-experts": {"drop": [1]},
    "hybrid": {"ratio": 0.5, "group_size": 16},
    "moefication": {"experts": 4},
    "g-moefication": {"experts": 4},
    **{method: {"experts": 3} for method in ("frequency", "hc-smoe", "m-smoe", "naee", "reap")},
    "prune-base": {"ratio": 0.2},
    "auto": {"ratio": 0.5, "group_size": 16},
    "compressed-tensors": {"group_size": 16},
    "mlx": {"group_size": 32},
    "mean-svd": {"ratio": 0.2},
    "plain-svd": {"ratio": 0.2},
    "quantize": {"bits": "4", "group_size": 16},
    "quantize-delta": {"group_size": 16},
    "repair": {"to": "MOE", "steps": 1},
    "svd-compress": {"ratio": 0.2},
    "tune": {"data": "TEXT", "sequence_length": 32},
}
# What a stage starts from, if not from the MoE model that it is for.
INPUTS = {
    **dict.fromkeys((name for name, stage in stages().items() if stage.method_of in ("upcycle", "moefy")), "dense"),
    **dict.fromkeys(("dense-experts", "prune-base", "quantize-delta", "sparsify-delta", "svd-compress"), "decomposed"),
    **dict.fromkeys(("dense", "add-expert"), "upcycled"),
    "mlx": "wide",
}

Inputs = Callable[[str], Path]


def test_labels_are_for_stages_that_take_gradients() -> None:
    assert {name for name, stage in stages().items() if "labels" in stage.options_type.model_fields} == {
        "auto",
        "d2moe",
        "fisher-merge",
        "hybrid",
        "quantize",
    }


@pytest.fixture(scope="module")
def inputs(
    tiny_mixtral: Path,
    make_mixtral: Callable[..., Any],
    save_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Inputs:
    """`inputs("decomposed")`: a tiny model of that kind."""
    dense = save_model(build_dense("llama"), tmp_path_factory.mktemp("inputs") / "dense")
    wide = save_model(make_mixtral(intermediate_size=64), tmp_path_factory.mktemp("inputs") / "wide")
    made = {"moe": tiny_mixtral, "dense": dense, "wide": wide}
    ways: dict[str, tuple[str, str]] = {"decomposed": ("decompose", "moe"), "upcycled": ("vanilla", "dense")}

    def find(kind: str) -> Path:
        if kind not in made:
            stage, source = ways[kind]
            made[kind] = tmp_path_factory.mktemp("inputs") / kind
            run_stage(stages()[stage], made[source], made[kind], stages()[stage].options_type())
        return made[kind]

    return find


@pytest.fixture
def options(name: str, inputs: Inputs, tiny_text: Path) -> RunOptions:
    """Of a stage, no more than it needs."""
    kind = stages()[name].options_type
    given: dict[str, Any] = dict(NEEDED.get(name, {}))
    if "data" in given:
        given["data"] = str(tiny_text)
    if "to" in given:
        given["to"] = str(inputs("moe"))
    if "source" in given:
        given["source"] = str(inputs("dense")) if given["source"] == "DENSE" else [str(inputs("dense"))] * 2
    if "calibration" in kind.model_fields:
        mix = 0.5 if name == "add-expert" else 0  # which tells the text from others
        given |= {"calibration": str(tiny_text), "mix": mix, "samples": 8, "sequence_length": 32}
    return kind(**given)


def test_every_file_is_a_stage() -> None:
    known = {stage.__module__ for stage in stages().values()}
    for place in PLACES:
        home = importlib.import_module(f"moetool.{place}")
        inside = [f"{home.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(home, "__path__", ()))]
        assert set(inside or [home.__name__]) <= known
    assert {*NEEDED, *INPUTS} <= set(STAGES)


def test_every_command_is_called_as_its_file() -> None:
    """The help shows files of this directory that nobody imported."""
    called = {name for name, stage in stages().items() if stage.__module__.startswith("moetool.compress.stages.")}
    alone = {name for name in called if stages()[name].method_of is None}
    assert {stages()[name].__module__.rpartition(".")[2].replace("_", "-") for name in alone} == alone
    assert {*commands()} == {*COMMANDS}


def test_a_command_that_is_not_called_as_its_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(stages()["decompose"], "name", "take-apart")
    with pytest.raises(TypeError, match=r"decompose\.py: a stage's name is that of its file, here 'decompose'"):
        stages.__wrapped__()


@pytest.mark.parametrize("name", STAGES)
def test_options_go_through_json_and_yaml(name: str, options: RunOptions) -> None:
    kind = stages()[name].options_type
    assert kind.model_validate_json(options.model_dump_json()) == options
    assert kind(**yaml.safe_load(yaml.safe_dump(options.model_dump(mode="json")))) == options


@pytest.mark.parametrize("name", STAGES)
def test_options_that_do_not_exist_are_refused(name: str, options: RunOptions) -> None:
    with pytest.raises(ValidationError, match="no_such_option"):
        stages()[name].options_type(**options.model_dump(mode="json"), no_such_option=1)


@pytest.mark.parametrize("name", STAGES)
def test_a_plan_is_of_headers_and_options(name: str, options: RunOptions, inputs: Inputs) -> None:
    source = inputs(INPUTS.get(name, "moe"))
    costs = plan_stage(stages()[name], source, options)
    plan = costs.to_json()
    assert plan["stage"] == name
    assert costs.phases, "it says nothing of its work"
    assert plan["input_bytes"] >= sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert min(plan["output_bytes"], plan["disk_bytes"], plan["peak_memory_bytes"]) > 0
    again = stages()[name].options_type.model_validate_json(options.model_dump_json())
    assert plan_stage(stages()[name], source, again).to_json() == json.loads(json.dumps(plan)) == plan


class Steps(Progress):
    """Steps done and steps in all, of each phase."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int]] = []
        self._now, self._total, self._done = "", 0, 0

    def start(self, phase: str, total: int, unit: str = "") -> None:
        assert unit or not total, f"of what are there {total}?"
        self._now, self._total, self._done = phase, total, 0

    def advance(self) -> None:
        self._done += 1

    def skip(self, steps: int) -> None:
        self._done += steps

    def finish(self, *, stopped: bool = False) -> None:
        self.phases.append((self._now, self._done, self._total))


@pytest.mark.parametrize("name", STAGES)
def test_progress_counts_to_its_end(name: str, options: RunOptions, inputs: Inputs, tmp_path: Path) -> None:
    steps = Steps()
    run_stage(stages()[name], inputs(INPUTS.get(name, "moe")), tmp_path / "out", options, progress=steps)
    assert steps.phases
    assert [phase for phase in steps.phases if phase[2] and phase[1] != phase[2]] == []


@pytest.mark.parametrize("stopped", [False, True])
def test_progress_of_a_deep_model_counts_every_step_once(
    make_mixtral: Any, save_model: Any, inputs: Inputs, tiny_text: Path, tmp_path: Path, stopped: bool
) -> None:
    """Layers whose hidden states are not kept run again on the way back, once for all layers of their stretch."""
    model, steps = save_model(make_mixtral(num_hidden_layers=7), tmp_path / "deep"), Steps()
    options = stages()["d2moe"].options_type(calibration=str(tiny_text), samples=4, sequence_length=16, ratio=0.3)
    if stopped:
        with pytest.raises(KeyboardInterrupt):
            run_stage(stages()["d2moe"], model, tmp_path / "out", options, progress=Stopped(after=12))
    run_stage(stages()["d2moe"], model, tmp_path / "out", options, progress=steps, resume=stopped)
    assert "Backward" in [phase[0] for phase in steps.phases]
    assert [phase for phase in steps.phases if phase[2] and phase[1] != phase[2]] == []


class Stopped(Steps):
    """Ends the job after so many steps of the way back."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def advance(self) -> None:
        super().advance()
        if self._now == "Backward" and self._done >= self._after:
            raise KeyboardInterrupt


def machine(bf16: float, fp32: float, call: float = 1e-5) -> Machine:
    """One that does so many multiply-adds per second."""
    return Machine(
        products={"bfloat16": bf16, "float32": fp32, "float64": fp32 / 2, "widened": max(bf16 / 2, fp32)},
        eigen={96: 0.003, 384: 0.06},
        cholesky={96: 0.0002, 384: 0.003},
        moved=1e10,
        hashed=1e9,
        call=call,
        read=2e9,
        written=1e9,
    )


MACHINES = {
    "a processor without bf16": machine(2e9, 4e10),
    "a processor with bf16 units": machine(1e15, 4e10, 1e-12),
    "a card": machine(4e14, 4e13, 1e-7),
}


@pytest.mark.parametrize("name", STAGES)
def test_dry_runs_on_every_machine(
    name: str,
    options: RunOptions,
    inputs: Inputs,
    run_cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is faster in bfloat16 is said with an option that the command takes."""
    kind = stages()[name]
    words: list[object] = [kind.method_of or name, inputs(INPUTS.get(name, "moe")), tmp_path / "out", "--dry-run"]
    if kind.method_of is not None:
        words += [f"--{CHOICES[kind.method_of][0]}", name]
    for field in options.model_fields_set - {"bos"}:
        value = getattr(options, field)
        for each in value if isinstance(value, tuple) else (value,):
            words += ["--" + field.replace("_", "-"), getattr(each, "model", each)]
    for title, here in MACHINES.items():
        monkeypatch.setattr("moetool.job.estimate.this_machine", lambda device, output, here=here: here)
        result = run_cli(*words)
        assert result.code == 0, (title, result.stderr)
        quicker = re.search(r"^in bfloat16 +about .* with (.+)$", result.stdout, re.M)
        assert quicker is None or title != "a processor without bf16"
        assert quicker is not None or (name, title) != ("tune", "a processor with bf16 units")
        if quicker is not None:
            assert run_cli(*words, *quicker[1].split()).code == 0
        assert not (tmp_path / "out").exists()
