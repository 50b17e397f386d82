"""The model card of a result: what it takes from the source's, and what it tells nobody."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from moetool.checkpoint.manifest import Manifest, Origin
from moetool.checkpoint.reader import Checkpoint
from moetool.job.card import SOURCE_CARD, chosen_options, model_card, public
from moetool.job.options import RunOptions, TextOptions

FRONT = """---
license: apache-2.0
language:
- en
- no
datasets: wikitext
pipeline_tag: text-generation
base_model: owner/original
model-index: [{name: x}]
extra: {gated: true}
---

# The original
"""


class Shown(RunOptions, TextOptions):
    ratio: float = 0.5


def made(source: str = "owner/name", **changes: Any) -> Manifest:
    fields = {"chosen": {}, **changes}
    return Manifest(source=source, source_fingerprint="", recipe={"stage": "hybrid"}, seed=3, **fields)


def front(card: str) -> dict[str, Any]:
    parsed = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(parsed, dict)
    return parsed


@pytest.fixture
def source(tiny_mixtral: Path, tmp_path: Path) -> Path:
    path = tmp_path / "secret" / "mixtral"
    path.mkdir(parents=True)
    (path / "config.json").write_bytes((tiny_mixtral / "config.json").read_bytes())
    save_file(load_file(tiny_mixtral / "model.safetensors"), path / "model.safetensors", {"format": "pt"})
    return path


def test_what_the_source_says_is_passed_on(source: Path) -> None:
    (source / "README.md").write_text(FRONT)
    checkpoint = Checkpoint.open(source)
    card = model_card(made(str(source)), checkpoint, (checkpoint.config, 1000))
    assert front(card) == {
        "base_model": "owner/original",
        "license": "apache-2.0",
        "language": ["en", "no"],
        "datasets": "wikitext",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["moetool"],
    }
    assert "# The original" not in card


@pytest.mark.parametrize("text", [None, b"# no front matter", b"\xff\xfe", b"---\n- a\n---\n", b"---\n{: [\n---\n"])
def test_nothing_is_guessed(source: Path, text: bytes | None) -> None:
    if text is not None:
        (source / "README.md").write_bytes(text)
    checkpoint = Checkpoint.open(source)
    card = model_card(made(str(source)), checkpoint, (checkpoint.config, 1000))
    assert front(card) == {"library_name": "transformers", "tags": ["moetool"]}
    assert "No licence is named" in card
    assert "secret" not in card


def test_steps_and_options(source: Path, tmp_path: Path) -> None:
    steps = (
        Origin(stage="tune", source=f"{source}", source_fingerprint=""),
        Origin(stage="vanilla", source="owner/dense", source_fingerprint="", chosen={"experts": 4, "of": ["a", "b"]}),
    )
    text = tmp_path / "my text.txt"
    text.touch()
    recipe = {"stage": "hybrid", "ratio": 0.75, "calibration": str(text), "samples": 128, "seed": 0}
    config = {"max_position_embeddings": 512}
    chosen = chosen_options(Shown(), {**recipe, "sequence_length": 512}, config)
    assert chosen == chosen_options(Shown(), {**recipe, "sequence_length": 2048}, {})
    assert chosen_options(Shown(), {"sequence_length": 512}, {}) == {"sequence_length": 512}
    assert chosen == {"ratio": 0.75, "calibration": "my text.txt"}
    facts = {"calibration": {"windows": 8, "tokens": 256, "loss": 2.5}}
    layers: dict[str, dict[str, object]] = {"0": {"relative_error": {"up": [0.1, 0.3]}}}
    manifest = made(str(source), chosen=chosen, lineage=steps, statistics=facts, layers=layers)
    checkpoint = Checkpoint.open(source)
    card = model_card(manifest, checkpoint, (checkpoint.config, checkpoint.weight_bytes // 4), has_source_card=True)
    lines = card.splitlines()
    assert "# `owner/dense` after vanilla, fine-tuned, after hybrid" in lines
    assert "1. `vanilla` of `owner/dense`: `--experts 4 --of a,b`" in lines
    assert "2. `tune` of `mixtral`, by an older moetool, which did not note what was chosen" in lines
    assert "3. `hybrid` of `mixtral`: `--ratio 0.75 --calibration my text.txt`" in lines
    assert "Calibrated on `my text.txt`: 8 windows, 256 tokens." in lines
    assert "75.00% smaller than the source." in lines
    assert any("2.5000 nats" in line for line in lines)
    assert "- `moetool eval MODEL --data TEXT --against SOURCE` measures what it loses on held-out text." in lines
    assert any("0.2000" in line for line in lines)
    assert f"({SOURCE_CARD})" in card


@pytest.mark.parametrize(
    ("stage", "chosen", "title"),
    [
        ("gguf", {"type": "q8_0"}, "in GGUF (Q8_0)"),
        ("gguf", {"size": "20GB"}, "in GGUF"),
        ("dense", {"expert": 1}, "as a dense model"),
    ],
)
def test_titles_of_exports(source: Path, stage: str, chosen: dict[str, object], title: str) -> None:
    manifest = made().model_copy(update={"recipe": {"stage": stage}, "chosen": chosen})
    assert f"# `owner/name` {title}" in model_card(manifest, Checkpoint.open(source), None).splitlines()


def test_how_it_loads_and_what_does_not(source: Path) -> None:
    checkpoint = replace(Checkpoint.open(source), source="owner/name")
    entries = {
        "moetool": "import moetool",
        "compressed-tensors": "is installed, other engines",
        None: "ordinary checkpoint",
    }
    for method, told in entries.items():
        config = checkpoint.config | ({"quantization_config": {"quant_method": method}} if method else {})
        card = model_card(made(), checkpoint, (config, 1000))
        assert front(card)["base_model"] == "owner/name"
        assert [words for words in entries.values() if words in card] == [told]
    assert "decompose --base" in model_card(made(), checkpoint, None)


def test_vllm_has_a_plug_in_for_some(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    beside = {"model.layers.0.self_attn.q_proj": "quantised-weight:8:128"}
    for more, told in (
        ({}, "vllm serve MODEL --enforce-eager`"),
        ({"beside": beside}, "vllm serve MODEL --enforce-eager --load-format moetool`"),
    ):
        entry = {"quant_method": "moetool", **more}
        card = model_card(made(), checkpoint, ({**checkpoint.config, "quantization_config": entry}, 1000))
        assert told in card


def test_paths_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").touch()
    told = {
        "/home/me/a.txt@2,data/a.txt:::text,owner/set:config:train": "a.txt@2,a.txt:::text,owner/set:config:train",
        "~/x/b.jsonl": "b.jsonl",
        "d2moe": "d2moe",
        "": "",
    }
    assert {text: public(text) for text in told} == told
    assert public({"of": ["../x/model", 3]}) == {"of": ["model", 3]}
