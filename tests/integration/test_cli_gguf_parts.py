"""A GGUF model in several files, as models that are too large for one lie on the hub."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.checkpoint.reader import Checkpoint

gguf = pytest.importorskip("gguf", reason="wants the library gguf: pip install moetool[gguf]")

PARTS = 3


def part(directory: Path, number: int) -> Path:
    return directory / f"mixtral-{number:05d}-of-{PARTS:05d}.gguf"


def split(file: Path, directory: Path) -> None:
    """A model in parts as `llama-gguf-split` makes them: the first has the metadata, all have their number."""
    directory.mkdir()
    whole = gguf.GGUFReader(file)
    for number in range(PARTS):
        own = part(directory, number + 1)
        writer = gguf.GGUFWriter(own, whole.fields["general.architecture"].contents())
        for key, field in whole.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], items)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", PARTS)
        for tensor in whole.tensors[number::PARTS]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_parts_are_read_as_one_file(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    exported = run_cli("export", tiny_mixtral, tmp_path / "whole", "--format", "gguf", "--type", "q8_0")
    assert exported.code == 0, exported.stderr
    split(tmp_path / "whole" / "model.gguf", tmp_path / "parts")
    whole = Checkpoint.open(tmp_path / "whole")
    for source in (tmp_path / "parts", part(tmp_path / "parts", 1), part(tmp_path / "parts", 3)):
        opened = Checkpoint.open(source)
        assert opened.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(opened.read(name), whole.read(name)) for name in whole.tensors)
        assert opened.gguf_bytes == sum(file.stat().st_size for file in (tmp_path / "parts").iterdir())
    job = ("compress", tmp_path / "parts", tmp_path / "small", "--method", "quantize", "--bits", 4)
    made = run_cli(*job, "--sensitivity", "none", "--json")
    assert made.code == 0, made.stderr
    refused = run_cli("repair", tmp_path / "parts", tmp_path / "better", "--to", tiny_mixtral)
    assert refused.code == 3
    assert "one of 3 parts of a model, and a repair writes one file: join them first" in refused.stderr
    part(tmp_path / "parts", 2).unlink()
    refused = run_cli("inspect", tmp_path / "parts")
    assert refused.code == 3
    assert f"and 1 of them are missing: {part(tmp_path, 2).name}" in refused.stderr
