"""Sidecars, configs and JSON files: byte for byte, whole or not at all."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moetool.checkpoint.files import atomically, copy_sidecars, file_sha256, patch_config, write_json
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, ResourceError, UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    (path / "templates").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    (path / "tokenizer.json").write_bytes(b'{"a":\r\n 1}\x00\xff')
    (path / "templates" / "tool.jinja").write_bytes(b"{{ x }}")
    return path


def test_sidecars_are_copied_byte_for_byte(source: Path, tmp_path: Path) -> None:
    copies = copy_sidecars(Checkpoint.open(source), tmp_path / "out")
    assert copies == [tmp_path / "out" / "templates" / "tool.jinja", tmp_path / "out" / "tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"a":\r\n 1}\x00\xff'
    assert (tmp_path / "out" / "templates" / "tool.jinja").read_bytes() == b"{{ x }}"
    assert len([file for file in (tmp_path / "out").rglob("*") if file.is_file()]) == 2


def test_sidecars_are_copied_not_linked(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").rename(tmp_path / "blob")
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    copy_sidecars(Checkpoint.open(source), tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert file_sha256(tmp_path / "out" / "tokenizer.json") == file_sha256(tmp_path / "blob")


@pytest.mark.parametrize("inside", [".", "out", "deeper/out"])
def test_output_inside_the_input(source: Path, inside: str) -> None:
    with pytest.raises(UsageError, match="inside the input"):
        copy_sidecars(Checkpoint.open(source), source / inside)


def test_unreadable_sidecar(source: Path, tmp_path: Path) -> None:
    (source / "LICENSE").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="LICENSE: No such file"):
        copy_sidecars(Checkpoint.open(source), tmp_path / "out")


def test_patch_config_is_pure_and_keeps_the_order() -> None:
    config = {"model_type": "llama", "rope_theta": 5e5, "old": 1, "nested": {"a": [1]}}
    patched = patch_config(config, {"model_type": "mixtral", "num_local_experts": 8}, remove=["old", "absent"])
    assert list(patched.items()) == [
        ("model_type", "mixtral"),
        ("rope_theta", 5e5),
        ("nested", {"a": [1]}),
        ("num_local_experts", 8),
    ]
    patched["nested"]["a"].append(2)
    assert config == {"model_type": "llama", "rope_theta": 5e5, "old": 1, "nested": {"a": [1]}}


def test_write_json(tmp_path: Path) -> None:
    write_json(tmp_path / "sub" / "x.json", {"z": 1, "a": ["é", "\ud800", float("inf")]})
    text = (tmp_path / "sub" / "x.json").read_text()
    assert text == '{\n  "z": 1,\n  "a": [\n    "\\u00e9",\n    "\\ud800",\n    Infinity\n  ]\n}\n'
    assert json.loads(text)["a"][1] == "\ud800"
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["x.json"]


def test_write_json_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    before = (tmp_path / "x.json").read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ResourceError, match=r"No space left on device\. It needs 14 bytes"):
        write_json(tmp_path / "x.json", {"a": 22})
    assert (tmp_path / "x.json").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_synced_before_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = os.fsync, Path.replace

    def recording_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def recording_sync(descriptor: int) -> None:
        events.append("sync")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_sync)
    monkeypatch.setattr(Path, "replace", recording_rename)
    with atomically(tmp_path / "x") as temporary:
        temporary.write_text("content")
        assert not (tmp_path / "x").exists()
    assert events == ["sync", "rename", "sync"]
    assert (tmp_path / "x").read_text() == "content"


def test_file_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert file_sha256(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
