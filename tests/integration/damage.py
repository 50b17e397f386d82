"""Random damage to checkpoints, by seed: what is still in place of a field of a JSON file, a header, an index, a file.

`damages(directory, seed)` is an endless series of `Damage`, each of which `apply` does to a copy of the directory.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_JSON = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "moetool.json")


class Nested(list[Any]):
    """Lists in lists, so deep that a parser or what comes after it runs out of stack; as text, since `json` would."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth


WRONG: tuple[Any, ...] = (
    "x", "", "8", -1, -8, 0, 1, 2, 3, 7, 5000, 2**31 - 1, 2**31, 10**12, 2**63, 10**30, 0.5, -0.5, 1e308, 2.0,
    float("nan"), float("inf"), None, True, False, [], [1], [-1], ["x"], [None], {}, {"a": 1}, Nested(90), Nested(900),
    Nested(30_000),
)  # fmt: skip
SPECS = (
    "dense", "low-rank:0", "low-rank:5", "low-rank:-1", "low-rank:\u00b2", "low-rank:99999999", "low-rank:" + "9" * 40,
    "quantised:4:7", "quantised:3:0", "quantised:0:8", "quantised:99:8", "quantised:4:-8", "quantised:4:99999999",
    "quantised:4:row", "quantised-weight:4:8", "quantised-low-rank:3:3:5", "quantised-low-rank:0:4:8", "sparse:2:0",
    "sparse:nan:0", "sparse:0.5:\u00b2", "sparse:0.5:1", "sparse-magnitude:0", "sparse-magnitude:1e-9", "nf4", "int8",
    "low-rank-sparse:2:sparse:0.5:1", "low-rank-sparse:2", "shared-u:3", "shared-v:0", "shared-v:3", "magic", ":", "",
    "low-rank:5:6", "quantised:4", "quantised:four:8",
)  # fmt: skip
ENTRIES: tuple[Any, ...] = (
    None, {}, [], "x", 7, True, {"quant_method": "gptq", "bits": 4, "group_size": 8}, {"quant_method": "moetool"},
    {"quant_method": "fp8"}, {"quant_method": 7}, {"quant_method": None}, {"quant_method": "moetool", "layers": []},
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "moetool", "format_version": 99},
    {"quant_method": "moetool", "mixture": {}}, {"quant_method": "moetool", "adapter_experts": {}},
    {"quant_method": "moetool", "interpolated": {}}, {"quant_method": "moetool", "neuron_experts": {}},
    {"quant_method": "moetool", "mixture": []}, {"quant_method": "moetool", "layers": {"0": {}}},
    {"quant_method": "moetool", "layers": {"0": {"gate": None, "up": None, "down": None}}},
    {"quant_method": "moetool", "layers": {"\u00b2": {}}}, {"quant_method": "moetool", "layers": {"99": {}}},
    {"mixture": {"experts": 4}}, {"quant_method": "awq"}, {"load_in_8bit": True},
)  # fmt: skip
MORE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "relu2", "nothing", "prelu", "xielu"),
    "hidden_activation": ("nothing",),
    "rope_parameters": ({"rope_type": "nothing"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": "x"}),
    "rope_scaling": ({"type": "nothing", "factor": 2.0}, {"rope_type": "longrope"}, {"type": "dynamic", "factor": 0}),
    "rope_type": ("nothing", "yarn", "longrope"),
    "model_type": ("llama", "mixtral", "qwen2_moe", "nothing", "bert", "gpt2"),
    "dtype": ("float16", "float64", "int8", "nothing", "bfloat16"),
    "quantization_config": ENTRIES,
    "head_dim": (-4, 0, 3, 16),
    "sliding_window": (0, -4, 2),
}


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        what: as a person would say it.
        apply: does it to a directory, whose files may be links to those of the original.
    """

    what: str
    apply: Callable[[Path], None]


def linked(source: Path, target: Path) -> Path:
    """A copy without copying: replace files, never write into them."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


def replace_file(file: Path, data: bytes | str) -> None:
    """New content, in a new file."""
    file.unlink(missing_ok=True)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())


def damages(source: Path, seed: int) -> Iterator[Damage]:
    """One damage after the other, the same for the same seed. About half are to the config."""
    draw = random.Random(seed)
    others = [name for name in OTHER_JSON if (source / name).exists()]
    statistics = "moetool/statistics.safetensors"
    kinds: list[tuple[float, Callable[[], Damage]]] = [
        (5, lambda: _field(draw, source, "config.json")),
        (1, lambda: _pair(draw, source)),
        (2, lambda: _header(draw, source, WEIGHTS)),
        (1, lambda: _index(draw, source)),
        (1.5, lambda: _field(draw, source, draw.choice(others))),
        (0.7, lambda: _content(draw, source, draw.choice(["config.json", *others]))),
    ]
    if (source / statistics).exists():
        kinds.append((0.5, lambda: _header(draw, source, statistics)))
    while True:
        (kind,) = draw.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])
        yield kind()


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a parsed JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _show(value: Any) -> str:
    return f"{value.depth} lists" if isinstance(value, Nested) else repr(value)[:60]


def _wrong(draw: random.Random, key: Any, now: Any) -> Any:
    if isinstance(now, str) and ":" in now and draw.random() < 0.8:
        return draw.choice(SPECS)
    if key in MORE and draw.random() < 0.6:
        return draw.choice(MORE[key])
    if isinstance(now, int) and not isinstance(now, bool) and draw.random() < 0.3:
        return draw.choice([now + 1, now - 1, now * 2, now * 10**9, -now, now // 2, float(now), str(now)])
    return draw.choice(WRONG)


def _pick(draw: random.Random, parsed: Any, own: float = 0.5) -> tuple[Any, ...]:
    entry = parsed.get("quantization_config") if isinstance(parsed, dict) else None
    if entry and draw.random() < own:
        return "quantization_config", *draw.choice(list(_places(entry)))
    places = [path for path in _places(parsed) if path[0] != "quantization_config" or len(path) == 1]
    return draw.choice(places)


def _set(parsed: Any, path: tuple[Any, ...], value: Any, *, gone: bool) -> None:
    for key in path[:-1]:
        parsed = parsed[key]
    if gone:
        del parsed[path[-1]]
    else:
        parsed[path[-1]] = value


def _dump(parsed: Any) -> str:
    """`json.dumps`, with `Nested` as what it stands for."""
    text = json.dumps(parsed, default=None)
    for depth in {value.depth for value in WRONG if isinstance(value, Nested)}:
        text = text.replace(f'"nested {depth}"', "[" * depth + "]" * depth)
    return text


def _change(source: Path, name: str, changes: list[tuple[tuple[Any, ...], Any, bool]]) -> Damage:
    def apply(directory: Path) -> None:
        parsed = json.loads((source / name).read_text())
        for path, value, gone in changes:
            _set(parsed, path, f"nested {value.depth}" if isinstance(value, Nested) else value, gone=gone)
        replace_file(directory / name, _dump(parsed))

    said = [
        f"{'.'.join(map(str, path))} {'is gone' if gone else f'is {_show(value)}'}" for path, value, gone in changes
    ]
    return Damage(f"{name}: {' and '.join(said)}", apply)


def _one(draw: random.Random, parsed: Any) -> tuple[tuple[Any, ...], Any, bool]:
    keys = [key for key in MORE if key not in ("rope_type", "model_type")]
    if "hidden_size" in parsed and draw.random() < 0.1:
        path: tuple[Any, ...] = (draw.choice(keys),)
    else:
        path = _pick(draw, parsed)
    now: Any = parsed
    for key in path:
        now = now[key] if not isinstance(now, dict) else now.get(key)
    gone = now is not None and draw.random() < 0.1
    return path, _wrong(draw, path[-1], now), gone


def _field(draw: random.Random, source: Path, name: str) -> Damage:
    return _change(source, name, [_one(draw, json.loads((source / name).read_text()))])


def _pair(draw: random.Random, source: Path) -> Damage:
    """Two fields of the config, neither inside the other."""
    parsed = json.loads((source / "config.json").read_text())
    first, second = _one(draw, parsed), _one(draw, parsed)
    if first[0][0] == second[0][0]:
        return _change(source, "config.json", [first])
    return _change(source, "config.json", [first, second])


def _content(draw: random.Random, source: Path, name: str) -> Damage:
    """A file cut, emptied, of another kind, or with some bytes flipped."""
    data = (source / name).read_bytes()
    cut = draw.randrange(len(data))
    flipped = bytearray(data)
    for _ in range(3):
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    kinds: dict[str, bytes] = {
        f"cut at {cut}": data[:cut], "empty": b"", "some bytes flipped": bytes(flipped), "no text": bytes(range(256)),
        "a list": b"[]", "a number": b"7", "null": b"null", "an object": b"{}", "a string": b'"x"',
        "20000 lists": b"[" * 20_000 + b"]" * 20_000, "900 objects": b'{"a":' * 900 + b"1" + b"}" * 900,
        "a long number": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    }  # fmt: skip
    what = draw.choice(list(kinds))
    return Damage(f"{name}: {what}", lambda directory: replace_file(directory / name, kinds[what]))


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _header(draw: random.Random, source: Path, name: str) -> Damage:
    """A safetensors file whose header says something else than its data, or nothing at all."""
    whole = (source / name).read_bytes()
    entries, data = _split(whole)
    names = [tensor for tensor in entries if tensor != "__metadata__"]
    tensor, other = draw.choice(names), draw.choice(names)
    entry = entries[tensor]
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    cut, shift = draw.randrange(len(whole)), draw.choice([1, 2, 64, 10**9, -1, -64])

    def patched(**changes: Any) -> bytes:
        return _joined(json.dumps({**entries, tensor: {**entry, **changes}}).encode(), data)

    twice = json.dumps(entries)[:-1] + f", {json.dumps(tensor)}: {json.dumps(entry)}}}"
    kinds: dict[str, Callable[[], bytes]] = {
        f"cut at {cut}": lambda: whole[:cut],
        f"{shift} bytes off": lambda: patched(data_offsets=[begin + shift, end + shift]),
        "on another's bytes": lambda: patched(data_offsets=entries[other]["data_offsets"]),
        "far outside": lambda: patched(data_offsets=[begin + 10**15, end + 10**15]),
        "backwards": lambda: patched(data_offsets=[end, begin]),
        "offsets of another kind": lambda: patched(data_offsets=draw.choice([[], [1], "x", None, [None, 1], {}])),
        "negative": lambda: patched(shape=[-size for size in shape]),
        "transposed": lambda: patched(shape=shape[::-1]),
        "flat": lambda: patched(shape=[max(1, (end - begin) // 4)]),
        "huge": lambda: patched(shape=[2**62, 4]),
        "of another kind": lambda: patched(shape=draw.choice([None, "x", {}, [[1]], [1.5], ["1"], [None]])),
        "another dtype": lambda: patched(dtype=draw.choice(["F16", "I32", "F8_E4M3", "BOOL", "C64", "F4", "x", 7])),
        "no entry": lambda: _joined(
            json.dumps({key: value for key, value in entries.items() if key != tensor}).encode(), data
        ),
        "renamed": lambda: _joined(
            json.dumps({f"{key}.x" if key == tensor else key: value for key, value in entries.items()}).encode(), data
        ),
        "twice": lambda: _joined(twice.encode(), data),
        "null": lambda: _joined(json.dumps({**entries, tensor: None}).encode(), data),
        "no object": lambda: _joined(draw.choice([b"[]", b"7", b"", b"{", b"null", b"\xff\xfe"]), data),
        "20000 lists": lambda: _joined(b"[" * 20_000 + b"]" * 20_000, data),
        "long": lambda: (10**15).to_bytes(8, "little") + whole[8:],
        "NaN": lambda: whole[:-4] + b"\xff\xff\xff\xff",
    }
    what = draw.choice(list(kinds))
    made = kinds[what]()
    return Damage(f"{name}: {tensor} {what}", lambda directory: replace_file(directory / name, made))


def _index(draw: random.Random, source: Path) -> Damage:
    """An index in the place of the single file, with something wrong in it."""
    entries, _ = _split((source / WEIGHTS).read_bytes())
    shard = "model-00001-of-00001.safetensors"
    mapped: dict[str, Any] = {name: shard for name in entries if name != "__metadata__"}
    tensor = draw.choice(list(mapped))
    value = draw.choice(["x", "../x.safetensors", "/etc/passwd", "no.safetensors", "config.json", "", 7, None, [], {}])
    nul, deep = "a\0b.safetensors", {**mapped, tensor: "x" * 5000 + ".safetensors"}
    kinds: dict[str, Any] = {
        f"maps {tensor} to {value!r}": {"weight_map": {**mapped, tensor: value}},
        "lacks a tensor": {"weight_map": {name: own for name, own in mapped.items() if name != tensor}},
        "has one more": {"weight_map": {**mapped, "more": shard}},
        "a byte of zero": {"weight_map": {**mapped, tensor: nul}},
        "a long name": {"weight_map": deep},
        "no map": {"metadata": {}},
        "a map of another kind": {"weight_map": draw.choice([[], "x", None, 7, {}])},
        "a list": [],
        "metadata of another kind": {"metadata": draw.choice([7, "x", [], None]), "weight_map": mapped},
    }
    what = draw.choice(list(kinds))

    def apply(directory: Path) -> None:
        (directory / WEIGHTS).rename(directory / shard)
        replace_file(directory / INDEX, json.dumps(kinds[what]))

    return Damage(f"{INDEX}: {what}", apply)
