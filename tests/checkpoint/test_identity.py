"""Which changes to weight files a fingerprint sees, and what is noted for those that it does not."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetool.checkpoint import sampling
from moetool.checkpoint.files import file_sha256
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.identity import (
    check_read,
    check_unchanged,
    file_states,
    hub_sha256,
    is_known_as,
    is_known_by_earlier,
)
from moetool.checkpoint.manifest import Manifest, write_manifest
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError

WEIGHTS = "model.safetensors"


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a thousandth of its size, so that small models have large matrices."""
    for name in ("_WHOLE_BYTES", "_PART_BYTES", "_BLOCK_BYTES", "_OWN_MATRIX"):
        monkeypatch.setattr(sampling, name, getattr(sampling, name) // 1024)


def tensors() -> dict[str, Tensor]:
    """Norms, routers, attention, and experts on their own and fused; 1.8 MB."""
    numbers = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"head.weight": (500, 64), "scale": ()}
    for layer in range(2):
        shapes |= {f"{layer}.norm": (64,), f"{layer}.router": (8, 64), f"{layer}.q": (64, 64), f"{layer}.k": (16, 64)}
        shapes |= {f"{layer}.experts.{expert}.up": (192, 64) for expert in range(8)}
        shapes |= {f"{layer}.fused": (8, 96, 64)}
    return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}


def write(path: Path, content: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(content, path / WEIGHTS)
    return path


def fingerprint(path: Path) -> str:
    return Checkpoint.open(path).fingerprint()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", tensors())


def edits(content: dict[str, Tensor], count: int) -> Iterator[tuple[str, dict[str, Tensor], bool]]:
    """Changes to one random tensor each, and whether every one of its kind has to be seen."""
    draw = random.Random(1)
    for _ in range(count):
        name = draw.choice(sorted(content))
        tensor = content[name].clone()
        kinds = ["whole", "matrix" if tensor.ndim == 3 else "whole", "row", "element"]
        kind = draw.choice(kinds if tensor.ndim else ["whole"])
        if kind == "whole":
            tensor *= 1.5
        elif kind == "element":
            tensor.view(-1)[draw.randrange(tensor.numel())] += 1
        else:
            tensor[draw.randrange(len(tensor))] *= 1.5
        yield f"{kind} of {name}", {**content, name: tensor}, kind in ("whole", "matrix") or tensor.nbytes <= 16 << 10


def test_every_edit_of_a_small_model_is_seen(model: Path) -> None:
    before, content = fingerprint(model), tensors()
    for what, edited, _ in edits(content, 200):
        assert fingerprint(write(model, edited)) != before, what


@pytest.mark.usefixtures("small_budget")
def test_edits_of_whole_tensors_matrices_and_small_tensors_are_seen_in_a_large_one(model: Path) -> None:
    before, content = fingerprint(model), tensors()
    counts = {False: 0, True: 0}
    for what, edited, must_be_seen in edits(content, 200):
        is_seen = fingerprint(write(model, edited)) != before
        assert is_seen or not must_be_seen, what
        counts[must_be_seen] += is_seen
    assert counts[True] > 100


@pytest.mark.usefixtures("small_budget")
def test_little_of_a_large_model_is_read(model: Path) -> None:
    infos = list(Checkpoint.open(model).tensors.values())
    limit = sampling.whole_limit(infos)
    assert max(info.nbytes for info in infos if info.nbytes <= limit) < 20_000
    for info in infos:
        found = list(sampling.spans(info, limit))
        assert found == sorted(set(found))
        assert all(info.offset <= start < start + length <= info.offset + info.nbytes for start, length in found)
        if info.nbytes > limit:
            assert sum(length for _, length in found) <= info.nbytes / 50
    fused = next(info for info in infos if info.name == "0.fused")
    matrix = fused.nbytes // 8
    assert {(start - fused.offset) // matrix for start, _ in sampling.spans(fused, limit)} == set(range(8))


@pytest.mark.parametrize(
    ("name", "count", "shape"), [("Mixtral 8x7B", 992, (14336, 4096)), ("DeepSeek-V3", 22000, (2, 7168, 2048))]
)
def test_what_is_read_of_published_models(name: str, count: int, shape: tuple[int, ...]) -> None:
    """At most .5 % of the bytes, in 100 to 280 places per GB."""
    nbytes = 2 * torch.Size(shape).numel()
    infos = [TensorInfo(str(i), torch.bfloat16, shape, nbytes, Path("x"), i * nbytes) for i in range(count)]
    limit = sampling.whole_limit(infos)
    found = [span for info in infos for span in sampling.spans(info, limit)]
    total = count * nbytes
    assert sum(length for _, length in found) < total / 200
    assert 100 < len(found) / (total / 1e9) < 280, name


def test_tensors_of_one_size_are_read_whole_together_or_not_at_all() -> None:
    def infos(count: int) -> list[TensorInfo]:
        return [TensorInfo(str(i), torch.uint8, (64 << 20,), 64 << 20, Path("x"), 0) for i in range(count)]

    assert sampling.whole_limit(infos(4)) == 64 << 20
    assert sampling.whole_limit(infos(5)) == 0
    assert sampling.whole_limit([]) == 0


@pytest.mark.usefixtures("small_budget")
def test_a_file_that_shrinks_is_told(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    os.truncate(model / WEIGHTS, 1000)
    with pytest.raises(InvalidInputError, match="has changed"):
        checkpoint.fingerprint()


def test_opening_reads_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("weights were read")

    monkeypatch.setattr(os, "pread", refuse)
    checkpoint = Checkpoint.open(model)
    monkeypatch.undo()
    assert checkpoint.fingerprint() == fingerprint(model)


def test_earlier_fingerprints_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "model", {"a": torch.arange(360_000.0).view(600, 600), "b": torch.arange(10.0)})
    checkpoint = Checkpoint.open(path)
    earlier = "350b0c152faee4295ae8d7530ffeec15206cf77c8f0b818326696c17da84f0d1"  # by moetool in November 2026
    assert is_known_by_earlier(checkpoint, earlier)
    assert is_known_as(checkpoint, earlier)
    assert is_known_as(checkpoint, checkpoint.fingerprint())
    assert checkpoint.fingerprint() != earlier
    assert not is_known_as(checkpoint, "0" * 64)


def touch(file: Path, seconds: int) -> None:
    """Shift a file's time."""
    time = file.stat().st_mtime_ns + seconds * 10**9
    os.utime(file, ns=(time, time))


def test_nothing_is_noted_of_what_is_hashed_whole(model: Path) -> None:
    assert file_states(Checkpoint.open(model)) == {}
    touch(model / WEIGHTS, 5)
    check_unchanged(Checkpoint.open(model), {WEIGHTS: {"written": 1}})


@pytest.mark.usefixtures("small_budget")
def test_a_file_that_was_written_again_is_asked_about(model: Path, tmp_path: Path) -> None:
    noted = file_states(Checkpoint.open(model))
    assert noted == {WEIGHTS: {"written": (model / WEIGHTS).stat().st_mtime_ns}}
    shutil.copytree(model, tmp_path / "copy")  # with its times
    check_unchanged(Checkpoint.open(tmp_path / "copy"), noted)
    touch(model / WEIGHTS, 5)
    with pytest.raises(UsageError, match=r"written again.*--same-input.*--overwrite"):
        check_unchanged(Checkpoint.open(model), noted)
    check_unchanged(Checkpoint.open(model), noted, said_same=True)


@pytest.mark.usefixtures("small_budget")
def test_digests_of_a_manifest_settle_it(model: Path) -> None:
    digest = file_sha256(model / WEIGHTS)
    write_manifest(model, Manifest(source="s", source_fingerprint="", recipe={}, seed=0, files={WEIGHTS: digest}))
    noted = file_states(Checkpoint.open(model))
    assert noted[WEIGHTS]["sha256"] == digest
    touch(model / WEIGHTS, 5)
    assert "sha256" not in file_states(Checkpoint.open(model))[WEIGHTS]
    check_unchanged(Checkpoint.open(model), noted)
    content = load_file(model / WEIGHTS)
    content["head.weight"][7, 7] += 1
    write(model, content)
    touch(model / WEIGHTS, 9)
    with pytest.raises(InvalidInputError, match="SHA-256 differs"):
        check_unchanged(Checkpoint.open(model), noted, said_same=True)


def hub_cache(model: Path, root: Path) -> Path:
    """The same as the hub's library lays it out: a snapshot of links to files that are named by their digests."""
    snapshot, blobs = root / "snapshots" / "1", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(model / "config.json", snapshot)
    blob = blobs / file_sha256(model / WEIGHTS)
    shutil.copy(model / WEIGHTS, blob)
    (snapshot / WEIGHTS).symlink_to(blob)
    return snapshot


@pytest.mark.usefixtures("small_budget")
def test_digests_of_the_hubs_cache(model: Path, tmp_path: Path) -> None:
    digest = file_sha256(model / WEIGHTS)
    first, second = hub_cache(model, tmp_path / "a"), hub_cache(model, tmp_path / "b")
    noted = file_states(Checkpoint.open(first))
    assert noted[WEIGHTS]["sha256"] == digest
    blob = (second / WEIGHTS).resolve()
    os.utime(blob, ns=(1, 1))  # downloaded again, at another time
    check_unchanged(Checkpoint.open(second), noted)
    touch(blob, int((second / WEIGHTS).lstat().st_mtime) + 10)  # written after the link was made
    assert hub_sha256(second / WEIGHTS) is None
    assert fingerprint(first) == fingerprint(second) == fingerprint(model)


@pytest.mark.parametrize(
    ("told", "is_trusted"),
    [
        ("{commit}\n{digest}\n{later}\n", True),
        ("{commit}\n{digest}\n{earlier}\n", False),
        ("{commit}\n3a5b\n{later}\n", False),
        ("{digest}\n", False),
        ("{commit}\n{digest}\nnoon\n", False),
        ("", False),
    ],
)
def test_digests_beside_a_download(model: Path, told: str, is_trusted: bool) -> None:
    digest, time = file_sha256(model / WEIGHTS), (model / WEIGHTS).stat().st_mtime
    metadata = model / ".cache" / "huggingface" / "download" / f"{WEIGHTS}.metadata"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(told.format(commit="c" * 40, digest=digest, later=time + 1, earlier=time - 60))
    assert hub_sha256(model / WEIGHTS) == (digest if is_trusted else None)


def test_a_model_that_is_replaced_while_it_is_read(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    checkpoint.fingerprint()
    touch(model / WEIGHTS, 5)
    check_read(checkpoint)
    write(model, {**tensors(), "0.router": torch.zeros(8, 64)})
    touch(model / WEIGHTS, 9)
    with pytest.raises(InvalidInputError, match="two models"):
        check_read(checkpoint)
