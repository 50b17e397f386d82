"""Presets: options from a file, with variants, under what is typed."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from checkpoints import contents, weights
from dense_families import build_dense

from moetool.cli.presets import files, preset_options


@pytest.fixture(scope="module")
def preset(tmp_path_factory, calibration) -> Path:
    """A preset with a variant that prunes and one that compresses less."""
    _, text, _, samples, _, length, *_ = calibration
    path = tmp_path_factory.mktemp("preset") / "preset.yaml"
    content = {
        "command": "compress",
        "method": "d2moe",
        "description": "for a test",
        "options": {"calibration": str(text), "mix": 0, "samples": samples, "sequence_length": length, "ratio": 0.35},
        "variants": {"pruned": {"prune_base": 0.25, "shard_size": "40kB"}, "gentle": {"ratio": 0.2}},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def made(run_cli, tiny_mixtral_bf16, tmp_path_factory) -> Callable[..., dict[str, bytes]]:
    """What `compress` with these options writes, once for the same options."""

    @cache
    def run(*options: object) -> dict[str, bytes]:
        output = tmp_path_factory.mktemp("made") / "out"
        result = run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", output, *options)
        assert result.code == 0, result.stderr
        return contents(output)

    return run


def test_a_preset_is_its_options(made, preset, compress, tiny_mixtral_bf16):
    assert made("--preset", preset) == contents(compress(tiny_mixtral_bf16, "--ratio", 0.35).path)


def test_a_variant_overrides_its_preset(made, preset, calibration, compress, tiny_mixtral_bf16):
    assert made("--preset", f"{preset}:gentle") == contents(compress(tiny_mixtral_bf16, "--ratio", 0.2).path)
    typed = made("--ratio", 0.35, *calibration, "--prune-base", 0.25, "--shard-size", "40kB")
    assert made("--preset", f"{preset}:pruned") == typed


def test_names_are_spelled_as_options_or_as_fields(preset, tmp_path):
    content = yaml.safe_load(preset.read_text())
    typed = tmp_path / "typed.yaml"
    options = {name.replace("_", "-"): value for name, value in content["options"].items()}
    typed.write_text(yaml.safe_dump({**content, "options": options}))
    assert preset_options(str(typed), "compress", "d2moe") == preset_options(str(preset), "compress", "d2moe")


def test_the_command_line_overrides_both(made, preset, compress, tiny_mixtral_bf16):
    expected = contents(compress(tiny_mixtral_bf16, "--ratio", 0.2).path)
    assert made("--preset", preset, "--ratio", 0.2) == expected
    assert made("--preset", f"{preset}:gentle", "--ratio", 0.35) == made("--preset", preset)


def test_the_manifest_says_what_was_done(made, preset):
    manifest = json.loads(made("--preset", preset, "--seed", 3)["moetool.json"])
    told = manifest["recipe"]
    assert (told["stage"], told["ratio"], told["samples"], told["seed"]) == ("d2moe", 0.35, 16, 3)
    assert manifest["seed"] == 3


@pytest.mark.parametrize("is_beside", [True, False])
def test_paths_are_taken_from_where_one_types(run_cli, tiny_mixtral, calibration, tmp_path, monkeypatch, is_beside):
    (tmp_path / "presets").mkdir()
    monkeypatch.chdir(tmp_path)
    text, beside = Path(calibration[1]), tmp_path / "presets" / "texts" / "a.txt"
    if is_beside:
        beside.parent.mkdir()
        beside.write_bytes(text.read_bytes())
    path = tmp_path / "presets" / "own.yaml"
    path.write_text("{command: compress, method: hybrid, options: {ratio: 0.3, calibration: texts/a.txt@2}}")
    words = ("compress", tiny_mixtral, "out", "--preset", path, "--dry-run")
    result, said = run_cli(*words), "texts/a.txt. A preset's paths are taken from where the command is typed."
    assert result.code == 3
    assert said in result.stderr
    assert (f" {beside} is there." in result.stderr) == is_beside
    assert "A preset's" not in run_cli(*words, "--calibration", "other.txt").stderr
    assert "A preset's" not in run_cli("compress", "no/such/model", *words[2:]).stderr


def test_a_value_of_the_preset_that_does_not_fit_is_told_to_be_the_presets(run_cli, tiny_mixtral, tmp_path):
    words = (
        "compress",
        tiny_mixtral,
        tmp_path / "out",
        "--preset",
        "hybrid-75",
        "--calibration",
        "bundled",
        "--dry-run",
    )
    result, said = run_cli(*words), "of the preset hybrid-75: type --sequence-length to replace it."
    assert result.code == 2
    assert f"context of 128 tokens. It is {said}" in result.stderr
    typed = run_cli(*words, "--sequence-length", 4096)
    assert typed.code == 2
    assert "preset" not in typed.stderr


def test_a_file_of_shared_experts_gives_them_without_a_variant_too():
    [file] = [file for file in files() if file.stem == "upcycle_shared"]
    assert preset_options(str(file), "upcycle", "vanilla")["shared"] == "half"


def test_a_preset_that_is_not_there(run_cli, tiny_mixtral, tmp_path):
    near, far = (run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", name) for name in ("hybrid-4", "xyz"))
    assert (near.code, far.code) == (2, 2)
    assert "`moetool list presets` shows all" in far.stderr
    assert len(far.stderr) < 200
    assert "Did you mean" in near.stderr


def test_presets_of_other_commands(run_cli, tiny_mixtral, tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text("command: fisher-merge\noptions: {merge: mean}\n")
    assert run_cli("fisher-merge", tiny_mixtral, tmp_path / "base", "--preset", path).code == 0
    path.write_text(f"command: decompose\noptions: {{base: {tmp_path / 'base'}}}\n")
    assert run_cli("decompose", tiny_mixtral, tmp_path / "one", "--preset", path).code == 0
    assert run_cli("decompose", tiny_mixtral, tmp_path / "two").code == 0
    assert weights(tmp_path / "one") == weights(tmp_path / "two")


def test_a_preset_of_no_command_is_told_what_it_lacks(run_cli, tiny_mixtral, tmp_path):
    for text, said in (
        ("options: {ratio: 0.4}", "it needs an entry `command: compress`"),
        ("stage: hybrid\noptions: {ratio: 0.4}", "stage. A preset has command, method, description, options, variants"),
    ):
        (tmp_path / "own.yaml").write_text(text)
        result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", tmp_path / "own.yaml", "--dry-run")
        assert result.code == 3
        assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{command: compress, method: hybird, options: {}}", "In the preset: --method hybird: there is auto"),
        ("{command: upcycle, method: vanilla, options: {}}", "own.yaml is a preset for `moetool upcycle`"),
        ("{command: compress, options: {ration: 0.3}}", "In the preset: no such option 'ration'"),
        ("{command: compress, options: {ratio: many}}", "In the preset: --ratio many: write a share"),
        ("{command: compress, options: {ratio: 0.3, samples: yes}}", "In the preset: --samples true: it takes a value"),
        ("{command: compress, options: {ratio: 0.3, samples: }}", "In the preset: --samples has no value."),
        ("{command: compress, options: {ratio: 0.3, size: 1MB}}", "--ratio and --size exclude each other"),
    ],
)
def test_what_is_wrong_in_a_preset_is_told_to_be_in_it(run_cli, tiny_mixtral, tmp_path, text, said):
    (tmp_path / "own.yaml").write_text(text)
    result = run_cli("compress", tiny_mixtral, tmp_path / "out", "--preset", tmp_path / "own.yaml")
    assert result.code in (2, 3)
    assert said in result.stderr
    typed = run_cli("compress", tiny_mixtral, tmp_path / "out", "--ratio", 7, "--preset", tmp_path / "own.yaml")
    assert "In the preset: --ratio" not in typed.stderr


@pytest.mark.parametrize("path", files(), ids=lambda path: path.stem)
def test_packaged_presets_are_valid(run_cli, tiny_mixtral, save_model, tiny_text, tmp_path, path):
    """Every variant of every preset names options that exist, with values they can have."""
    content = yaml.safe_load(path.read_text())
    typed = ("--calibration", tiny_text, "--sequence-length", 32, "--dry-run", "--json")
    source = tiny_mixtral
    method = content.get("method")
    if content["command"] in ("upcycle", "moefy"):
        source = save_model(build_dense("llama"), tmp_path / "llama")
    if content["command"] == "tune":
        typed = ("--data", tiny_text, "--sequence-length", 32, "--dry-run", "--json")
    if content["command"] == "moefy":  # its models are wider than this one
        typed = (*typed, "--experts", 2)
    if method == "branch-train-mix":  # its models are on the hub
        local = [{**entry, "source_model": str(source)} for entry in content["options"]["sources"]]
        content["options"]["sources"] = local
        path = tmp_path / path.name
        path.write_text(yaml.safe_dump(content))
    for variant in ("", *(f":{name}" for name in content.get("variants", {}))):
        reference = f"{path}{variant}"
        # The model of a preset is wider than this one, and can be made smaller.
        if method in ("hybrid", "ders-quantize"):
            typed = (*typed, "--group-size", 16)
        for ratio in ((), ("--ratio", 0.2)) if "ratio" in content["options"] else ((),):
            result = run_cli(content["command"], source, tmp_path / "out", "--preset", reference, *typed, *ratio)
            assert result.code == 0 or (not ratio and "is not possible here" in result.stderr), result.stderr
