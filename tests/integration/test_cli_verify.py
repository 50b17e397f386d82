"""`moetool verify`: every file of a result, and where it comes from."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_config, contents, copy_of
from sampling import sampled

from moetool.errors import InvalidInputError, VerificationError
from moetool.measure.verification import verify_checkpoint

MANIFEST = "moetool.json"
FLIPS = 2 * int(os.environ.get("MOETOOL_TEST_DAMAGES", "25"))


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("made", "among"),
    [
        ("small", {"tokenizer.json", "moetool/costs.json", "moetool/statistics.safetensors", "config.json"}),
        ("base", {"README.md", "moetool/costs.json", "base-00001.safetensors", "metric-00001.safetensors"}),
    ],
)
def test_one_flipped_bit_in_any_file(
    run_cli: Any, request: pytest.FixtureRequest, tmp_path: Path, made: str, among: set[str]
) -> None:
    """At the beginning, in the middle and at the end of each: 5, or 3 where the file cannot be read any more."""
    written = request.getfixturevalue(made)
    output, files = copy_of(written, tmp_path / "out"), contents(written, costs=True)
    assert among <= set(files)
    for name, data in files.items():
        for place in (1, len(data) // 2, len(data) - 3):
            (output / name).write_bytes(flipped(data, place))
            result = run_cli("verify", output)
            assert result.code in (3, 5), (name, place)
            assert "Traceback" not in result.stderr
            assert name in result.stderr or name == MANIFEST, (name, place, result.stderr)
        (output / name).write_bytes(data)
    assert run_cli("verify", output).code == 0


def test_a_base_knows_whose_it_is(
    run_cli: Any, base: Path, tiny_mixtral: Path, tiny_mixtral_bf16: Path, tmp_path: Path
) -> None:
    result = run_cli("verify", base, "--against", tiny_mixtral)
    assert result.code == 0, result.stderr
    assert "it was made from that by fisher-merge" in result.stdout
    assert f"next: moetool decompose {tiny_mixtral} base-decomposed --base {base}" in result.stderr
    other = run_cli("verify", base, "--against", tiny_mixtral_bf16)
    assert other.code == 5
    assert "not made from" in other.stderr


def test_a_damaged_base_is_not_used(run_cli: Any, base: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    damaged = copy_of(base, tmp_path / "base") / "base-00001.safetensors"
    data = damaged.read_bytes()
    damaged.write_bytes(flipped(data, len(data) // 2))
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--base", damaged.parent)
    assert result.code == 3
    assert "base-00001.safetensors is not the file that fisher-merge wrote" in result.stderr
    assert not (tmp_path / "out").exists()


def test_random_flips(run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path) -> None:
    """Of one bit anywhere, in every file in turn: each is found, and the result is sound again without it."""
    output, draw = tmp_path / "out", random.Random(0)
    made = run_cli(
        "compress", tiny_mixtral, "--method", "d2moe", output, "--ratio", 0.35, *calibration, "--shard-size", 40_000
    )
    assert made.code == 0, made.stderr
    files = contents(output, costs=True)
    assert {
        "README.md",
        "moetool/costs.json",
        "generation_config.json",
        "model.safetensors.index.json",
        MANIFEST,
    } <= set(files)
    names = sorted(files)
    for number in range(FLIPS):
        name = names[number % len(names)]
        place, bit = draw.randrange(len(files[name])), draw.randrange(8)
        damaged = bytearray(files[name])
        damaged[place] ^= 1 << bit
        (output / name).write_bytes(damaged)
        with pytest.raises((InvalidInputError, VerificationError)):
            verify_checkpoint(output)
        (output / name).write_bytes(files[name])
    assert not verify_checkpoint(output).notes


def test_large_errors_of_matrices_are_explained(
    run_cli: Any, small: Path, compress: Any, tiny_mixtral: Path, tiny_text: Path
) -> None:
    """Where nothing says yet what they do to outputs."""
    merged = compress(tiny_mixtral, "--method", "quantize", "--bits", 1).path
    explained = "Errors near 1 may do no harm"
    assert explained in run_cli("verify", merged, "--against", tiny_mixtral).stdout
    assert explained not in run_cli("verify", merged, "--against", tiny_mixtral, "--text", tiny_text).stdout
    assert explained not in run_cli("verify", small, "--against", tiny_mixtral).stdout


def test_a_damaged_account_of_costs_can_be_deleted(run_cli: Any, small: Path, tmp_path: Path) -> None:
    output = copy_of(small, tmp_path / "out")
    costs = output / "moetool" / "costs.json"
    costs.write_bytes(flipped(costs.read_bytes(), 50))
    refused = run_cli("verify", output)
    assert refused.code == 5
    assert "costs.json is not what was written (its own digest differs): delete it" in refused.stderr
    costs.unlink()
    assert run_cli("verify", output, "--json").json["notes"] == []


def test_the_same_in_other_bytes(small: Path, tmp_path: Path) -> None:
    """What a parser does not see, as `1e-5` written `1E-5`."""
    output = copy_of(small, tmp_path / "out")
    text = (output / MANIFEST).read_text()
    (output / MANIFEST).write_text(text.replace('"seed": 0', '"seed":  0'))
    with pytest.raises(VerificationError, match="in other bytes"):
        verify_checkpoint(output)


def test_a_result_is_verified_as_it_is_written(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card, say, which a disk did not keep."""
    monkeypatch.setattr("moetool.job.writing.write_bytes", lambda path, data: path.write_bytes(data + b"x"))
    result = run_cli("decompose", tiny_mixtral, tmp_path / "out")
    assert result.code == 5
    assert "README.md is not the file that was written" in result.stderr


def test_a_changed_number_in_the_manifest(run_cli: Any, small: Path, tmp_path: Path) -> None:
    """What no file contradicts is kept by the manifest's own digest."""
    output = copy_of(small, tmp_path / "out")
    manifest = json.loads((output / MANIFEST).read_text())
    manifest["recipe"]["ratio"] = 0.36
    (output / MANIFEST).write_text(json.dumps(manifest, indent=2))
    result = run_cli("verify", output)
    assert result.code == 5
    assert f"{MANIFEST} is not what was written" in result.stderr


def test_what_people_add_and_write_is_noted(run_cli: Any, small: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    source = copy_of(tiny_mixtral, tmp_path / "source")
    (source / ".gitattributes").write_text("*.safetensors filter=lfs")
    output = tmp_path / "out"
    assert run_cli("decompose", source, output).code == 0
    assert run_cli("verify", output, "--json").json["notes"] == []
    (output / "README.md").write_text("A smaller model.")
    (output / "picture.png").touch()
    (output / ".gitattributes").write_text("*.bin filter=lfs")
    refused = run_cli("verify", output)
    assert refused.code == 5
    assert "README.md is not the file that was written" in refused.stderr
    assert "--edited-documents" in refused.stderr
    notes = run_cli("verify", output, "--edited-documents", "--json").json["notes"]
    assert [note.split(" ")[0] for note in notes] == [".gitattributes", "README.md", "added"]
    assert "added since it was written: picture.png" in notes[2]
    (output / "README.md").unlink()
    assert "README.md is missing" in run_cli("verify", output, "--json").json["notes"]
    (output / "tokenizer_config.json").unlink()
    result = run_cli("verify", output)
    assert result.code == 5
    assert "tokenizer_config.json is missing" in result.stderr


def test_an_older_manifest_keeps_what_it_says(
    run_cli: Any, small: Path, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path
) -> None:
    output = copy_of(small, tmp_path / "out")
    manifest = json.loads((output / MANIFEST).read_text())
    weights = {name: digest for name, digest in manifest["files"].items() if name == "model.safetensors"}
    older = {**manifest, "format_version": 1, "files": weights}
    for name in ("digest", "run", "lineage"):
        del older[name]
    (output / MANIFEST).write_text(json.dumps(older, indent=2))
    result = run_cli("verify", output, "--against", tiny_mixtral, "--json")
    assert result.code == 0, result.stderr
    assert result.json["notes"] == []
    data = (output / "model.safetensors").read_bytes()
    (output / "model.safetensors").write_bytes(flipped(data, len(data) - 3))
    assert run_cli("verify", output).code == 5
    again = run_cli(
        "compress",
        tiny_mixtral,
        "--method",
        "d2moe",
        output,
        "--ratio",
        0.35,
        "--calibration",
        tiny_text,
        "--mix",
        0,
        "--resume",
    )
    assert again.code == 2
    assert "does not say with which settings" in again.stderr


STAGES: dict[str, tuple[Any, ...]] = {
    "decompose": ("decompose", "{mixtral}", "{out}"),
    "ders-quantize": ("compress", "{mixtral}", "{out}", "--method", "ders-quantize", "--bits", 4, "--group-size", 16),
    "hybrid": ("compress", "{mixtral}", "{out}", "--method", "hybrid", "--ratio", 0.4, "--group-size", 16, "{text}"),
    "vanilla": ("upcycle", "{llama}", "{out}", "--experts", 2, "--top-k", 1),
    "g-moefication": ("moefy", "{llama}", "{out}", "--experts", 4, "{text}"),
    "tune": ("tune", "{mixtral}", "{out}", "--data", "{examples}", "--steps", 1, "--warmup", 0),
}  # fmt: skip


@pytest.mark.parametrize("stage", sampled(STAGES, ("ders-quantize", "g-moefication", "tune")))
def test_every_stage_knows_its_source(
    run_cli: Any, dense: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, stage: str
) -> None:
    """Verified against its source, and refused against its twin: one number of the config differs, which no tensor
    shows."""
    llama = dense("llama")
    examples = tmp_path / "examples.jsonl"
    examples.write_text("\n".join(json.dumps({"prompt": "Say it: ", "completion": f"word {n}"}) for n in range(4)))
    places = {"mixtral": tiny_mixtral, "llama": llama, "out": tmp_path / "out", "examples": examples}
    arguments: list[Any] = []
    for part in STAGES[stage]:
        if part == "{text}":
            arguments += ["--calibration", tiny_text, "--mix", 0, "--samples", 8, "--sequence-length", 32]
        else:
            arguments.append(part.format(**places) if isinstance(part, str) else part)
    made = run_cli(*arguments)
    assert made.code == 0, made.stderr
    source = llama if "{llama}" in STAGES[stage] else tiny_mixtral
    result = run_cli("verify", tmp_path / "out", "--against", source, "--json")
    assert result.code == 0, result.stderr
    assert result.json["stages"] == [stage]
    twin = change_config(copy_of(source, tmp_path / "twin"), initializer_range=0.03)
    refused = run_cli("verify", tmp_path / "out", "--against", twin)
    assert refused.code == 5, refused.stderr
    assert "its manifest has the fingerprint of other files" in refused.stderr


def test_a_chain_of_stages_knows_where_it_began(
    run_cli: Any, decomposed: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    chain = {"svd-compress": ("--svd", "vanilla", "--rank", 4), "export": ()}
    last = decomposed
    for stage, options in chain.items():
        made = run_cli(stage, last, tmp_path / stage, *options)
        assert made.code == 0, made.stderr
        last = tmp_path / stage
    result = run_cli("verify", last, "--against", tiny_mixtral, "--json")
    assert result.code == 0, result.stderr
    assert result.json["stages"] == ["dense-experts", "svd-compress", "decompose"]
    card = (last / "README.md").read_text().splitlines()
    assert any(line.startswith("1. `decompose` of `tiny-mixtral`") for line in card)
    second = next(line for line in card if line.startswith("2. `svd-compress` of `model`: "))
    assert "--svd vanilla" in second
    assert "--rank 4" in second
    assert any(line.startswith("- It is an ordinary checkpoint of the family `mixtral`") for line in card)
    assert (
        "decompose, then svd-compress, then dense-experts" in run_cli("verify", last, "--against", tiny_mixtral).stdout
    )
    assert run_cli("verify", last, "--against", decomposed, "--json").json["stages"] == [
        "dense-experts",
        "svd-compress",
    ]
    twin = change_config(copy_of(tiny_mixtral, tmp_path / "twin"), initializer_range=0.03)
    refused = run_cli("verify", last, "--against", twin)
    assert refused.code == 5
    assert "its manifest has the fingerprint of other files" in refused.stderr
