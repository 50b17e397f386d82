"""Real models by their `config.json` alone: published parameter counts, and plans without a weight in sight."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled

CONFIGS = Path(__file__).parent.parent / "configs"

# As published, in billions: total and active per token (embeddings counted).
PUBLISHED = {
    "mixtral-8x7b": (46.70, 12.88),
    "mixtral-8x22b": (140.62, 39.15),
    "qwen3-30b-a3b": (30.53, 3.35),
    "qwen3-235b-a22b": (235.09, 22.19),
    "qwen2-57b-a14b": (57.41, 14.25),
    "qwen1.5-moe-a2.7b": (14.32, 2.69),
    "deepseek-moe-16b": (16.38, 2.83),
    "deepseek-v2-lite": (15.71, 2.66),
    "deepseek-v3": (671.03, 37.55),
    "olmoe-1b-7b": (6.92, 1.28),
    "phi-3.5-moe": (41.87, 6.64),
    "glm-4.5-air": (106.85, 13.42),
    "granite-3.0-3b-a800m": (3.30, 0.88),
}


@pytest.fixture
def config_only(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path / request.param
    directory.mkdir()
    shutil.copy(CONFIGS / f"{request.param}.json", directory / "config.json")
    return directory


# Plans that take little: few layers, or few experts.
PLANNED = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite", "phi-3.5-moe", "granite-3.0-3b-a800m")


@pytest.mark.parametrize(
    "config_only", sampled(PUBLISHED, PUBLISHED.keys() - {"deepseek-v3", "qwen3-235b-a22b"}), indirect=True
)
def test_parameter_counts(run_cli: Any, config_only: Path) -> None:
    told = run_cli("inspect", config_only, "--json").json
    counts = tuple(round(told["parameters"][kind] / 1e9, 2) for kind in ("total", "active"))
    assert counts == PUBLISHED[config_only.name]
    assert told["parameters"]["stored"] == told["parameters"]["total"]
    assert told["bytes"] == pytest.approx(2 * told["parameters"]["total"], rel=0.001)
    assert told["headers"] == "config.json alone"


@pytest.mark.parametrize("config_only", sampled(PUBLISHED, PLANNED), indirect=True)
def test_plans(run_cli: Any, config_only: Path, tmp_path: Path) -> None:
    arguments = (
        "compress",
        config_only,
        "--method",
        "d2moe",
        tmp_path / "out",
        "--ratio",
        0.3,
        "--calibration",
        "text.txt",
        "--dry-run",
    )
    arguments = (*arguments, "--memory", "1TB")  # for all experts of a layer at once
    plan = run_cli(*arguments, "--json").json
    assert plan["output_bytes"] == pytest.approx(0.7 * plan["input_bytes"], rel=1e-6)
    # Far below the model, and enough for one layer of it in fp32.
    layer = 2 * plan["input_bytes"] / plan["layers"]
    assert layer < plan["peak_memory_bytes"] < layer * 6 + 6e9
    assert plan["headers"] == "config.json alone"
    if config_only.name == "mixtral-8x7b":  # people are told of each in the same words
        assert "config.json alone" in run_cli(*arguments).stdout
    assert list(tmp_path.iterdir()) == [config_only]


@pytest.mark.parametrize("config_only", ["mixtral-8x7b"], indirect=True)
def test_paper_counting(run_cli: Any, config_only: Path, tmp_path: Path) -> None:
    arguments = ("compress", config_only, tmp_path / "out", "--preset", "d2moe-60-throughput", "--dry-run", "--json")
    plan = run_cli(*arguments).json
    assert round(plan["kept_of_differences"], 4) == 0.3286
    assert plan["rank"] == 1047
    assert plan["output_bytes"] > 0.43 * plan["input_bytes"], "not 40 %: the file still holds half of what is pruned"


@pytest.mark.parametrize("config_only", ["mixtral-8x7b"], indirect=True)
def test_without_weights_nothing_else_goes(run_cli: Any, config_only: Path, tmp_path: Path) -> None:
    result = run_cli(
        "compress", config_only, "--method", "d2moe", tmp_path / "out", "--ratio", 0.3, "--calibration", "text.txt"
    )
    assert result.code == 3
    assert "has no safetensors weights" in result.stderr
    config = json.loads((config_only / "config.json").read_text())
    (config_only / "config.json").write_text(json.dumps({**config, "use_cache": "many"}))
    result = run_cli("inspect", config_only)
    assert result.code == 3
    assert "transformers cannot build the model" in result.stderr


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("inspect", ()),
        ("compress", ("out", "--method", "quantize", "--bits", 4, "--dry-run")),
        ("upcycle", ("out", "--dry-run")),
    ],
)
def test_what_says_nothing_of_its_language_model_is_refused(
    run_cli: Any, command: str, arguments: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4v_moe"}))
    result = run_cli(command, tmp_path, *arguments)
    assert result.code == 3
    assert "has no text_config" in result.stderr or "names no experts" in result.stderr
