"""The reader against files that safetensors wrote, and against every way in which they can be broken."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moetool.checkpoint.gguf import gguf_in
from moetool.checkpoint.header import DTYPES
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import model_name
from moetool.errors import InvalidInputError, ResourceError

CONFIG = {"model_type": "some_family", "hidden_size": 8, "unheard_of": [1, 2]}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bits, NaN among them, as a tensor of any dtype."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensors() -> dict[str, Tensor]:
    return {
        "b.weight": torch.arange(24, dtype=torch.float32).view(4, 6),
        "a.weight": torch.arange(15).view(5, 3).to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 4, dtype=torch.float16),
    }


def write_checkpoint(path: Path, content: dict[str, Tensor] | None = None, config: Any = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(content or tensors(), path / "model.safetensors", {"format": "pt"})
    return path


def write_shards(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors().items(), start=1):
        weight_map[name] = f"model-{i:05d}-of-00004.safetensors"
        save_file({name: tensor}, path / weight_map[name])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A checkpoint around a hand-made weight file."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = (len(raw) if length is None else length).to_bytes(8, "little")
    (path / "model.safetensors").write_bytes(start + raw + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path: Path) -> str:
    with pytest.raises(InvalidInputError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def test_reads_what_safetensors_wrote_in_every_dtype(tmp_path: Path) -> None:
    content = {f"{code}/{i}": random_tensor(dtype, (3, 5), i) for i, (code, dtype) in enumerate(DTYPES.items())}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", content))
    assert set(checkpoint.tensors) == set(content)
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as reference:
        for name, tensor in content.items():
            read = checkpoint.read(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert bits(read) == bits(tensor) == bits(reference.get_tensor(name))
            assert bits(checkpoint.read_rows(name, 1, 3)) == bits(tensor[1:3])


def test_open_reads_headers_only_and_lists_them(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    checkpoint = Checkpoint.open(str(path))
    file = path / "model.safetensors"
    assert checkpoint.path == path
    assert checkpoint.config == CONFIG
    assert list(checkpoint.tensors) == ["a.weight", "b.weight", "none", "scalar"]
    assert checkpoint.weight_files == (file,)
    assert checkpoint.weight_bytes == file.stat().st_size
    info = checkpoint.tensors["b.weight"]
    assert (info.name, info.dtype, info.shape, info.nbytes, info.file) == (
        "b.weight",
        torch.float32,
        (4, 6),
        96,
        file,
    )
    assert file.read_bytes()[info.offset : info.offset + 96] == bits(tensors()["b.weight"])


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_shards(tmp_path / "model"))
    assert len(checkpoint.weight_files) == 4
    assert checkpoint.weight_bytes == sum(file.stat().st_size for file in checkpoint.weight_files)
    for name, tensor in tensors().items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).shape == tensor.shape


def test_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "model")
    write_checkpoint(path, {"only": torch.ones(2)})
    assert list(Checkpoint.open(path).tensors) == ["only"]


def test_reads_through_the_links_of_a_hub_cache(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    checkpoint = Checkpoint.open(snapshot)
    assert torch.equal(checkpoint.read("b.weight"), tensors()["b.weight"])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_rows_out_of_range(tmp_path: Path, start: int, stop: int) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    with pytest.raises(IndexError, match=f"{start}:{stop}"):
        checkpoint.read_rows("b.weight", start, stop)


def test_empty_rows_and_zero_size_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    assert checkpoint.read_rows("b.weight", 2, 2).shape == (0, 6)
    assert checkpoint.read("none").shape == (0, 4)
    assert checkpoint.read("scalar").shape == ()
    with pytest.raises(IndexError):
        checkpoint.read_rows("scalar", 0, 1)


@pytest.mark.parametrize("elements", [1, 4, 7, 8, 44, 95, 96, 1 << 20])
def test_blocks_one_after_the_other_are_the_tensor(tmp_path: Path, elements: int) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    for name, tensor in tensors().items():
        blocks = list(checkpoint.blocks(name, elements))
        assert all(block.ndim == 1 and block.dtype == tensor.dtype for block in blocks)
        assert all(0 < block.numel() <= elements for block in blocks)
        assert b"".join(map(bits, blocks)) == bits(tensor)
        # As few as can be: all but the last are full.
        assert len(blocks) == -(-tensor.numel() // elements)


def test_blocks_of_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    with pytest.raises(InvalidInputError, match=r"no tensor a\.weigth\. Did you mean a\.weight"):
        next(checkpoint.blocks("a.weigth"))
    os.truncate(tmp_path / "model" / "model.safetensors", 100)
    with pytest.raises(InvalidInputError, match="changed since it was opened"):
        list(checkpoint.blocks("b.weight"))


def test_unknown_tensor_suggests_the_nearest(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    with pytest.raises(InvalidInputError, match=r"no tensor b\.wieght\. Did you mean b\.weight"):
        checkpoint.read("b.wieght")


def test_memory_does_not_keep_what_was_read(tmp_path: Path) -> None:
    names = [f"t{i}" for i in range(8)]
    content = {name: torch.ones(1 << 20) for name in names}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", content))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    read = [checkpoint.read(name) for name in names]
    assert all(tensor.sum() == 1 << 20 for tensor in read)
    assert str(tmp_path) not in maps.read_text()


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    first = Checkpoint.open(path).fingerprint()
    assert len(first) == 64
    shutil.copytree(path, tmp_path / "copy")
    assert Checkpoint.open(tmp_path / "copy").fingerprint() == first
    (path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 9}))
    second = Checkpoint.open(path).fingerprint()
    write_checkpoint(path, {**tensors(), "b.weight": torch.zeros(6, 4)})
    assert len({first, second, Checkpoint.open(path).fingerprint()}) == 3


def test_sidecars(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    kept = [
        "tokenizer.json",
        "docs/README.md",
        "generation_config.json",
        "templates/chat.jinja",
        "sub/config.json",
        ".gitattributes",
    ]
    skipped = [
        "README.md",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors.tmp",
        "training_args.bin",
        "original/consolidated.00.pth",
        "old.PT",
        "flax_model.msgpack",
        "model.gguf",
        "onnx/model.onnx",
        "moetool.json",
        ".git/HEAD",
        ".cache/huggingface/x.json",
        ".moetool/journal.jsonl",
        "sub/__pycache__/x.pyc",
    ]
    for name in kept + skipped:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    found = Checkpoint.open(path).sidecars()
    assert found == sorted(path / name for name in kept)


def test_truncated_shard_gives_the_numbers(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    file = path / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 5)
    message = refusal(path)
    assert f"expected {size} bytes, found {size - 5}" in message
    assert str(file) in message
    os.truncate(file, 20)
    assert "expected at least" in refusal(path)
    os.truncate(file, 3)
    assert "3 bytes" in refusal(path)


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    checkpoint = Checkpoint.open(path)
    os.truncate(path / "model.safetensors", checkpoint.weight_bytes - 8)
    last = max(checkpoint.tensors.values(), key=lambda info: info.offset + info.nbytes).name
    with pytest.raises(InvalidInputError, match="changed since"):
        checkpoint.read(last)
    (path / "model.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="No such file"):
        checkpoint.read(last)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry([4], 0, 4)}, b"12345", "something follows"),
        ({"a": entry([4], 0, 3)}, b"123", "needs 4 bytes; its offsets span 3"),
        ({"a": entry([2], 0, 2), "b": entry([2], 1, 3)}, b"123", "overlaps"),
        ({"a": entry([2], 0, 2), "b": entry([2], 3, 5)}, b"12345", "gap"),
        ({"a": entry([2], 1, 3)}, b"123", "gap"),
        ({"a": entry([1], 0, 1, "F3")}, b"1", "unknown dtype 'F3'"),
        ({"a": entry([-1], 0, -1)}, b"", "natural numbers"),
        ({"a": {"dtype": "U8", "shape": []}}, b"", "lacks dtype, shape or data_offsets"),
        ({"a": 3}, b"", "lacks"),
        (b'{"a":{},"a":{}}', b"", "duplicate key 'a'"),
        (b"[]", b"", "not a JSON object"),
        (b"{nonsense", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        ({"__metadata__": {"format": "pt"}}, b"", "no tensors"),
    ],
)
def test_broken_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    assert message in refusal(write_raw(tmp_path / "model", header, data))


def test_absurd_header_length(tmp_path: Path) -> None:
    assert "header of 1099511627776 bytes" in refusal(write_raw(tmp_path / "model", {}, length=1 << 40))


def test_lfs_pointer(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refusal(path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "model")
    (path / "model-00003-of-00004.safetensors").unlink()
    message = refusal(path)
    assert "model-00003-of-00004.safetensors" in message
    assert "4 shards; 1 missing" in message


def test_index_that_contradicts_its_shards(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "model")
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**weight_map, "ghost": weight_map["scalar"]}}))
    assert "tensor ghost is in model-00003-of-00004.safetensors, but it is not" in refusal(path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "scalar": weight_map["b.weight"]}}))
    # Nothing but the index mentions the file of `scalar`, so now it is not read at all.
    assert "tensor scalar is in model-00001-of-00004.safetensors, but it is not" in refusal(path)
    swapped = {**weight_map, "scalar": weight_map["b.weight"], "b.weight": weight_map["scalar"]}
    index.write_text(json.dumps({"weight_map": swapped}))
    assert "but it is not" in refusal(path)
    for bad in ("../secret.safetensors", "/etc/secret.safetensors", "model.bin", 3):
        index.write_text(json.dumps({"weight_map": {"a": bad}}))
        assert repr(bad) in refusal(path)
    for content in ({}, {"weight_map": []}, {"weight_map": {}}):
        index.write_text(json.dumps(content))
        assert "no weight_map" in refusal(path)
    index.write_text("[]")
    assert "JSON list, not an object" in refusal(path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "model")
    twice = {"a.weight": tensors()["a.weight"], "b.weight": tensors()["b.weight"]}
    save_file(twice, path / "model-00002-of-00004.safetensors")
    message = refusal(path)
    assert "Tensor b.weight is in model-00001-of-00004.safetensors and in model-00002-of-00004.safetensors" in message


def test_config_must_be_there_and_an_object(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    for content, message in (("[1]", "JSON list, not an object"), ("{", "not valid JSON"), ("", "not valid JSON")):
        (path / "config.json").write_text(content)
        assert message in refusal(path)
    (path / "config.json").unlink()
    assert "no config.json" in refusal(path)


def test_the_gguf_file_of_a_directory(tmp_path: Path) -> None:
    """The only one, or that of an export; what was measured for `llama-quantize` is none."""
    (tmp_path / "imatrix.gguf").touch()
    assert gguf_in(tmp_path) is None
    first, second, exported = (tmp_path / name for name in ("a.GGUF", "b.gguf", "model.gguf"))
    first.touch()
    assert gguf_in(tmp_path) == gguf_in(first) == first
    second.touch()
    assert gguf_in(tmp_path) is None
    told = f"2 GGUF files (a.GGUF, b.gguf): give one of them, such as {first}."
    assert f"no config.json, but {told}" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # as some put it beside their files
    assert gguf_in(tmp_path) is None
    assert f"no safetensors weights, but {told}" in refusal(tmp_path)
    exported.touch()
    assert gguf_in(tmp_path) == exported
    for other in (".moetool", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / other).touch()  # an unfinished run, a checkpoint
        assert gguf_in(tmp_path) is None
        (tmp_path / other).unlink()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hub/Model-v0.1", "Model-v0.1"),
        ("a/b/model.gguf", "b"),
        ("theirs-Q4.gguf", "theirs-Q4"),
        ("a/b/", "b"),
        ("Q4-00001-of-00003.gguf", "Q4"),
    ],
)
def test_what_a_model_is_called(source: str, name: str) -> None:
    assert model_name(source) == name


def test_a_model_here_is_called_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "inside")
    assert [model_name(name) for name in (".", "..", "model.gguf")] == ["inside", "mine", "inside"]


def test_pickles_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    message = refusal(path)
    assert "pytorch_model.bin" in message
    assert "can run code" in message
    assert "save_pretrained" in message


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(tmp_path / "empty")
    path = write_checkpoint(tmp_path / "model")
    (path / "model.safetensors").rename(path / "adapter_model.safetensors")
    message = refusal(path)
    assert "no safetensors weights" in message
    assert "adapter_model.safetensors" in message
    (path / "adapter_model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    assert "not finished" in refusal(path)


@pytest.mark.parametrize(
    "source", ["./nowhere", "~/nowhere/at/all", "/nowhere", "some/deeper/path", "..//nowhere", Path("no/where")]
)
def test_missing_directory(source: str | Path) -> None:
    with pytest.raises(InvalidInputError, match="No such directory"):
        Checkpoint.open(source)


def test_file_instead_of_directory(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    assert "is a file" in refusal(path / "config.json")


def test_hub_id_is_downloaded_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def download(name: str, **arguments: Any) -> str:
        asked.update(arguments, name=name)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = Checkpoint.open("owner/name")
    assert (checkpoint.source, checkpoint.path) == ("owner/name", path)
    assert asked["name"] == "owner/name"
    assert {"*.safetensors", "*.json"} < set(asked["allow_patterns"])
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("failure", "expected", "message"),
    [
        (LocalEntryNotFoundError("Got: ConnectError.\nPlease check"), InvalidInputError, "failed (Got: ConnectError)"),
        (HFValidationError("Repo id must"), InvalidInputError, "neither a directory here nor a repository"),
        (RuntimeError(), InvalidInputError, "failed (RuntimeError)"),
        (OSError(28, "No space left on device"), ResourceError, "disk is full"),
    ],
)
def test_hub_failures(
    failure: Exception, expected: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **arguments: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(expected) as caught:
        Checkpoint.open("owner/name")
    assert message in str(caught.value)
    assert "owner/name" in str(caught.value)
