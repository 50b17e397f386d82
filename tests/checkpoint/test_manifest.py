"""The manifest: what is written is read back, and what is not a manifest is refused with a reason."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import moetool
from moetool.checkpoint.digests import check_files
from moetool.checkpoint.manifest import Manifest, Provenance, Upcycling, library_versions, read_manifest, write_manifest
from moetool.checkpoint.sealed import read_sealed
from moetool.errors import InvalidInputError


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "source": "owner/name",
        "source_fingerprint": "0" * 64,
        "recipe": {"method": "d2moe", "ratio": 0.4},
        "seed": 7,
        "statistics": {"tokens": 1024},
        "layers": {"3": {"error": 0.125, "rank": 16}},
    }
    return Manifest(**{**fields, **changes})


def test_round_trip_and_equal_bytes(tmp_path: Path) -> None:
    file = write_manifest(tmp_path, manifest())
    assert file == tmp_path / "moetool.json"
    read = read_manifest(tmp_path)
    assert read.model_copy(update={"digest": ""}) == manifest()
    assert read_sealed(file) == manifest().model_dump(mode="json", exclude={"digest"})
    first = file.read_bytes()
    write_manifest(tmp_path, manifest())
    assert file.read_bytes() == first
    content = json.loads(first)
    assert list(content) == list(Manifest.model_fields)
    assert content["moetool_version"] == moetool.__version__
    assert content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_versions_cover_what_results_depend_on() -> None:
    assert {"torch", "transformers", "safetensors"} <= set(library_versions())


def test_frozen_and_strict_about_names() -> None:
    with pytest.raises(ValidationError):
        manifest().seed = 8  # type: ignore[misc]
    with pytest.raises(ValidationError):
        manifest(sede=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ("{}", "source: Field required"),
        (json.dumps({**manifest().model_dump(), "colour": "red"}), "colour: Extra inputs"),
        (json.dumps({"format_version": 6}), "format version 6; this moetool reads up to 5. Upgrade"),
        (json.dumps({**manifest().model_dump(), "provenance": {"merged": {}}}), "provenance.merged: Extra inputs"),
    ],
)
def test_refusals(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "moetool.json").write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        read_manifest(tmp_path)
    assert message in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"has no moetool\.json"):
        read_manifest(tmp_path)


UPCYCLED = {"source_config": {"model_type": "llama"}, "target": "mixtral", "mixture": {"experts": 4}, "granularity": 1}


def test_provenance_comes_back(tmp_path: Path) -> None:
    given = Provenance(upcycled=Upcycling.model_validate({**UPCYCLED, "dtype": "bfloat16"}))
    write_manifest(tmp_path, manifest(provenance=given))
    assert read_manifest(tmp_path).provenance == given
    assert json.loads((tmp_path / "moetool.json").read_text())["provenance"]["moefied"] is None


@pytest.mark.parametrize("version", [1, 2])
def test_older_formats_hid_it_among_the_statistics(version: int, tmp_path: Path) -> None:
    """Their digests are over what they say, which knows nothing of it."""
    old = json.loads(manifest(format_version=version, statistics={"upcycled": UPCYCLED}).model_dump_json())
    del old["provenance"], old["digest"], old["chosen"]
    digest = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    (tmp_path / "moetool.json").write_text(json.dumps({**old, "digest": digest}))
    read = read_manifest(tmp_path)
    assert read.provenance == Provenance(upcycled=Upcycling.model_validate(UPCYCLED))
    assert not check_files(tmp_path, read).problems
    (tmp_path / "moetool.json").write_text(json.dumps({**old, "statistics": {"upcycled": {"target": 3}}}))
    with pytest.raises(InvalidInputError, match=r"provenance\.upcycled\.source_config"):
        read_manifest(tmp_path)
