"""Random damage to GGUF files and to LoRA adapters, by seed, as `damage` does it to checkpoints."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from damage import Damage, _content, _field, _header, replace_file

MODEL = "model.gguf"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRONG_NUMBERS = (0, 1, 2, 3, 7, -1, 5000, 2**31 - 1, 2**32 - 1, 2**63 - 1)
_WRONG_FRACTIONS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"))


def gguf_damages(source: Path, seed: int) -> Iterator[Damage]:
    """One damage after the other to `model.gguf` of a directory, the same for the same seed."""
    draw, whole = random.Random(seed), (source / MODEL).read_bytes()
    reader = gguf.GGUFReader(source / MODEL)
    start = int(reader.data_offset)
    kinds: list[tuple[float, Callable[[], tuple[str, bytes]]]] = [
        (3, lambda: _metadata(draw, reader, whole)),
        (3, lambda: _tensor_entry(draw, reader, whole)),
        (1, lambda: _flipped(draw, whole, 0, start, "the header")),
        (0.5, lambda: _flipped(draw, whole, 8, 24, "the counts")),
        (0.5, lambda: _not_a_number(draw, reader, whole)),
        (1, lambda: _cut(draw, whole, start)),
        (0.5, lambda: _other_kind(draw, whole)),
    ]
    while True:
        (kind,) = draw.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        what, data = kind()
        yield Damage(what, lambda directory, data=data: replace_file(directory / MODEL, data))


def _at(reader: Any, part: Any) -> int:
    """Where a part of a file's header begins."""
    start: int = part.__array_interface__["data"][0] - reader.data.__array_interface__["data"][0]
    return start


def _put(whole: bytes, position: int, content: bytes) -> bytes:
    return whole[:position] + content + whole[position + len(content) :]


def _wrong(draw: random.Random, part: Any) -> bytes:
    """Another number of the same type, or a name with another letter."""
    if part.dtype == np.uint8 and part.size > 1:
        letters = bytearray(part.tobytes())
        letters[draw.randrange(len(letters))] = draw.choice(b"xZ_0\xff\x00")
        return bytes(letters)
    if part.dtype.kind == "f":
        return np.array([draw.choice([*_WRONG_FRACTIONS, part[0] * 2])], part.dtype).tobytes()
    bits = 8 * part.dtype.itemsize
    wrong = draw.choice([*_WRONG_NUMBERS, int(part[0]) + 1, int(part[0]) - 1, int(part[0]) * 2]) % 2**bits
    return wrong.to_bytes(part.dtype.itemsize, "little")


def _metadata(draw: random.Random, reader: Any, whole: bytes) -> tuple[str, bytes]:
    """A key, a type, a length or a value; those that are not of the tokenizer more often."""
    names = [name for name in reader.fields if not name.startswith("GGUF.")]
    own = [name for name in names if not name.startswith("tokenizer")]
    field = reader.fields[draw.choice(own if draw.random() < 0.8 else names)]
    number = draw.choice([*range(min(4, len(field.parts))), len(field.parts) - 1, len(field.parts) - 1])
    part = field.parts[number]
    return f"{field.name}, part {number}", _put(whole, _at(reader, part), _wrong(draw, part))


def _tensor_entry(draw: random.Random, reader: Any, whole: bytes) -> tuple[str, bytes]:
    """A tensor's name, number of dimensions, sizes, type or place."""
    tensor = draw.choice(reader.tensors)
    number = draw.randrange(len(tensor.field.parts))
    part = tensor.field.parts[number]
    if part.dtype.kind != "f" and part.dtype != np.uint8 and part.size > 1:  # one of its sizes
        part = part[draw.randrange(part.size) :][:1]
    return f"{tensor.name}, part {number}", _put(whole, _at(reader, part), _wrong(draw, part))


def _flipped(draw: random.Random, whole: bytes, start: int, stop: int, what: str) -> tuple[str, bytes]:
    flipped = bytearray(whole)
    for _ in range(3):
        flipped[draw.randrange(start, stop)] ^= 1 << draw.randrange(8)
    return f"bits of {what} flipped", bytes(flipped)


def _not_a_number(draw: random.Random, reader: Any, whole: bytes) -> tuple[str, bytes]:
    tensor = draw.choice([each for each in reader.tensors if each.tensor_type.name in ("F32", "F16", "BF16")])
    return f"{tensor.name} begins with NaN", _put(whole, int(tensor.data_offset), b"\xff" * 4)


def _cut(draw: random.Random, whole: bytes, start: int) -> tuple[str, bytes]:
    at = draw.choice([draw.randrange(start), draw.randrange(start, len(whole)), len(whole) - 1])
    return f"cut at {at}", whole[:at]


def _other_kind(draw: random.Random, whole: bytes) -> tuple[str, bytes]:
    kinds = {"empty": b"", "text": b"text" * 100, "zeros": bytes(1000), "of version 1": _put(whole, 4, b"\x01")}
    what = draw.choice([*kinds])
    return what, kinds[what]


def adapter_damages(source: Path, seed: int) -> Iterator[Damage]:
    """One damage after the other to the config or the weights of an adapter, the same for the same seed."""
    draw = random.Random(seed)
    kinds: list[Callable[[], Damage]] = [
        lambda: _field(draw, source, ADAPTER_CONFIG),
        lambda: _content(draw, source, ADAPTER_CONFIG),
        lambda: _header(draw, source, ADAPTER_WEIGHTS),
    ]
    while True:
        (kind,) = draw.choices(kinds, [5, 1, 4])
        yield kind()
