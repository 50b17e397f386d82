"""Every command on configs that leave out one key each: a sentence, or what transformers computes for that config.

transformers fills in a default. So a command has to do what it does where the config has that default written out; and
what is to predict as the source did has to predict as transformers does with the config that lacks the key.
"""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_whole
from damage import linked, replace_file
from dense_families import build_dense
from families import build
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from moetool.checkpoint.settings import settings_of

CASES = 1  # of each kind, by seed; all are about a thousand, and take minutes
# What went another way than transformers: heads of keys that rows are turned by, groups that experts are dropped from,
# a number of experts that the result has to say, and what a dense family has another default of.
FOUND = (
    ("mixtral", "num_key_value_heads", "gguf"),
    ("deepseek_v3", "n_group", "frequency"),
    ("mixtral", "num_local_experts", "frequency"),
    ("mixtral", "rms_norm_eps", "dense"),
    ("mixtral", "num_attention_heads", "gguf"),
    ("d2moe", "num_local_experts", "dense-experts"),
)
TEXT = ("--samples", 2, "--sequence-length", 16)
TOKENS = torch.randint(1, 288, (2, 24), generator=torch.Generator().manual_seed(0))
# What names a model or its format, and what no model computes with.
UNTOUCHED = {"model_type", "quantization_config", *vars(PreTrainedConfig())}
SMALL = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 2}
# As many of the defaults as a tiny model can have, so that it is one without these keys, too.
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: build("mixtral", **SMALL, num_local_experts=8, sliding_window=8),
    "qwen2_moe": lambda: build("qwen2_moe", num_hidden_layers=2, num_experts_per_tok=4),
    "qwen3_moe": lambda: build("qwen3_moe", num_hidden_layers=2, decoder_sparse_step=1, num_key_value_heads=4),
    "deepseek_v3": lambda: build("deepseek_v3", num_hidden_layers=2, n_routed_experts=32, topk_group=1),
    "granitemoe": lambda: build("granitemoe", num_local_experts=8, num_key_value_heads=4),
    "llama": lambda: build_dense("llama", num_key_value_heads=4),
    "mistral": lambda: build_dense("mistral", **SMALL, head_dim=8),
    "qwen2": lambda: build_dense("qwen2", num_key_value_heads=4, tie_word_embeddings=True),
}
DENSE = ("llama", "mistral", "qwen2")
KINDS = (*MODELS, "d2moe")

Command = tuple[object, ...]


def spelled_out(path: Path, *, as_on_the_hub: bool) -> None:
    """Give a saved model a config that leaves nothing to a default, with rotary positions as in files on the hub."""
    config = json.loads((path / "config.json").read_text())
    own = {key: config.pop(key) for key in ("quantization_config",) if key in config}
    whole = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    if as_on_the_hub:
        rope = whole.pop("rope_parameters")
        whole |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    replace_file(path / "config.json", json.dumps({**config, **whole, **own}))


@pytest.fixture(scope="module")
def sources(
    save_model: Any, run_cli: Any, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A checkpoint of every kind, whose config says all, by name."""
    made = tmp_path_factory.mktemp("kinds")
    found = {name: save_model(model(), made / name) for name, model in MODELS.items()}
    for number, path in enumerate(found.values()):
        spelled_out(path, as_on_the_hub=number % 2 == 0)
    arguments = (
        "compress",
        found["mixtral"],
        "--method",
        "d2moe",
        made / "d2moe",
        "--ratio",
        0.3,
        "--calibration",
        tiny_text,
        "--mix",
        0,
        *TEXT,
    )
    assert run_cli(*arguments).code == 0
    return found | {"d2moe": made / "d2moe"}


def commands(kind: str, source: Path, output: Path, text: Path) -> dict[str, Command]:
    calibrated = ("--calibration", text, "--mix", 0, *TEXT)
    found: dict[str, Command] = {
        "verify": ("verify", source),
        "eval": ("eval", source, "--data", text, "--windows", 1, "--sequence-length", 16),
        "gguf": ("export", source, output, "--format", "gguf"),
    }
    if kind in DENSE:
        return found | {
            "upcycle": ("upcycle", source, output, "--experts", 4, "--top-k", 2),
            "half": ("upcycle", source, output, "--experts", 4, "--top-k", 2, "--shared", "half"),
            "moefy": ("moefy", source, output, "--experts", 4, *calibrated, "--samples", 16),
        }
    if kind == "d2moe":
        return found | {"dense-experts": ("export", source, output, "--format", "dense-experts")}
    compress = ("compress", source, output, "--method")
    return found | {
        "inspect": ("inspect", source),
        "decompose": ("decompose", source, output, "--base", "mean"),
        "dense": ("export", source, output, "--format", "dense", "--expert", 1),
        "d2moe": (*compress, "d2moe", "--ratio", 0.2, *calibrated),
        "hybrid": (*compress, "hybrid", "--ratio", 0.3, "--group-size", 8, *calibrated),
        "quantize": (*compress, "quantize", "--bits", 8, "--group-size", 8),
        "reap": (*compress, "reap", "--ratio", 0.2, *calibrated),
        "frequency": (*compress, "frequency", "--experts", 8 if kind == "deepseek_v3" else 5, *calibrated),
    }


# What predicts as its source, by the largest difference of logits beside the largest logit.
PRESERVING = {"upcycle": 1e-4, "half": 1e-3, "decompose": 1e-4, "dense-experts": 1e-4}
TOLD = {"nll", "tokens", "windows", "layers", "moe_layers", "experts", "top_k", "parameters", "bytes", "ok"}
RUNS = {"upcycle", "half", "eval", "gguf", "moefy", "d2moe", "hybrid", "reap", "frequency"}


def cases(kind: str, source: Path) -> Iterator[tuple[str, str]]:
    """Every key and command, in an order that the kind decides."""
    keys = json.loads((source / "config.json").read_text()).keys() - UNTOUCHED
    found = sorted(itertools.product(keys, commands(kind, source, source, source)))
    random.Random(kind).shuffle(found)
    yield from found


def predicted(path: Path) -> Tensor | None:
    """The logits of a checkpoint; `None` of one that transformers cannot run or that is not all there."""
    try:
        with torch.no_grad():
            found: Tensor = load_whole(path)(input_ids=TOKENS, use_cache=False).logits
    except Exception:
        return None
    return found if bool(found.isfinite().all()) else None


def content(path: Path) -> dict[str, Any]:
    """The weights of an output: bytes of a GGUF, else tensors."""
    if (path / "model.gguf").exists():
        return {"model.gguf": (path / "model.gguf").read_bytes()}
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def explicit(lacking: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The config with the default of a key written out; `None` where there is none to write."""
    settings = settings_of(lacking, Path())
    return {**lacking, key: settings[key]} if key in settings else None


def check_case(run_cli: Any, source: Path, work: Path, text: Path, kind: str, key: str, command: str) -> str:
    """Run one command on a config without one key; returns how it ended."""
    config = json.loads((source / "config.json").read_text())
    lacking = {name: value for name, value in config.items() if name != key}
    told = f"{command} of {kind} without {key}"
    ended = {}
    for form in ("lacking", "explicit"):
        made = lacking
        if form == "explicit":
            try:
                written = explicit(lacking, key)
            except Exception:  # transformers refuses it
                written = None
            if written is None:
                break
            made = written
        folder = work / form
        linked(source, folder / "source")
        replace_file(folder / "source" / "config.json", json.dumps(made))
        ended[form] = run_cli(*commands(kind, folder / "source", folder / "output", text)[command], "--json")
    result, output = ended["lacking"], work / "lacking" / "output"
    assert result.code in {0, 2, 3, 4, 5}, f"{told}: {result.code}, {result.stderr[-3000:]}"
    expected = predicted(work / "lacking" / "source") if command in RUNS else None
    if result.code:
        assert result.stderr.splitlines()[-1].startswith("error: "), f"{told}: {result.stderr[-2000:]}"
        assert not output.exists(), told
        assert "explicit" not in ended or ended["explicit"].code, f"{told}: {result.stderr[-2000:]}"
        return f"refused{'' if expected is None else ' though it runs'}: {result.stderr.splitlines()[-1]}"
    assert command not in RUNS or expected is not None, f"{told}: transformers cannot run this"
    if "explicit" in ended:
        assert ended["explicit"].code == 0, f"{told}: {ended['explicit'].stderr[-2000:]}"
        if command in ("inspect", "verify", "eval"):
            said = (ended[form].json for form in ("lacking", "explicit"))
            ours, theirs = ({name: told for name, told in one.items() if name in TOLD} for one in said)
            assert ours == theirs, told
            return "same"
        ours, theirs = content(output), content(work / "explicit" / "output")
        assert ours.keys() == theirs.keys(), told
        unlike = {name for name in ours if not same(ours[name], theirs[name])}
        assert not unlike, f"{told}: {sorted(unlike)[:5]}"
    if command in ("inspect", "verify", "eval", "gguf"):
        return "same"
    found = predicted(output)
    if expected is not None:
        assert found is not None, f"{told}: the result cannot be run"
    if found is not None and "explicit" in ended:
        other = predicted(work / "explicit" / "output")
        assert other is not None, told
        assert torch.equal(found, other), f"{told}: {(found - other).abs().max()} from the explicit one"
    if command in PRESERVING and found is not None and expected is not None:
        error = float((found - expected).abs().max() / expected.abs().max())
        assert error < PRESERVING[command], f"{told}: {error}"
    return "same"


@pytest.mark.parametrize(("kind", "key", "command"), FOUND)
def test_what_went_another_way(
    run_cli: Any, sources: dict[str, Path], tiny_text: Path, tmp_path: Path, kind: str, key: str, command: str
) -> None:
    check_case(run_cli, sources[kind], tmp_path, tiny_text, kind, key, command)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_left_out_is_refused_or_the_default(
    run_cli: Any, sources: dict[str, Path], tiny_text: Path, tmp_path: Path, kind: str
) -> None:
    for number, (key, command) in enumerate(itertools.islice(cases(kind, sources[kind]), CASES)):
        work = tmp_path / str(number)
        work.mkdir()
        check_case(run_cli, sources[kind], work, tiny_text, kind, key, command)
        shutil.rmtree(work)
