"""docs/adding.md: every section's one file is put where it says, and its commands run on tiny models.

Files are put into directories beside the package's own, which the package then looks into as well.
"""

import contextlib
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ADDING, ROOT, Block, blocks, commands, smaller
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.architectures import architectures, find_architecture
from moetool.architectures.dense import dense_architectures
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.reader import Checkpoint
from moetool.representations import parse_representation, representations
from moetool.runtime.quiet import quiet
from moetool.stages import stages
from moetool.upcycle.targets import targets

DENSE, FAMILY, TARGET, REPRESENTATION, METHOD = SHOWN = [block for block in blocks(ADDING) if block.file]
SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
TOKENS = torch.randint(1, 288, (2, 24), generator=torch.Generator().manual_seed(0))
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
# By what the page calls a model: its type, and what its config has beyond `SIZES`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "stabilityai/stablelm-2-1_6b": ("stablelm", {}),
    "JetBrains/Mellum2-12B-A2.5B-Base": ("mellum", {**WINDOWS, "num_experts": 8, "moe_intermediate_size": 48}),
    "QWEN3_WITH_WINDOWS": ("qwen3", {**WINDOWS, "use_sliding_window": True}),
    "meta-llama/Llama-3.2-3B": ("llama", {}),
}


@contextlib.contextmanager
def added(root: Path, files: Sequence[Block]) -> Iterator[None]:
    """The package with these files in it."""
    placed = []
    try:
        for block in files:
            path = root / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(block.lines) + "\n")
            home, _, name = block.file.removesuffix(".py").replace("/", ".").rpartition(".")
            package = importlib.import_module(home)
            package.__path__.append(str(path.parent))
            placed.append((package, name, str(path.parent)))
        forget()
        yield
    finally:
        for package, name, directory in placed:
            package.__path__.remove(directory)
            sys.modules.pop(f"{package.__name__}.{name}", None)
            vars(package).pop(name, None)
        forget()


def forget() -> None:
    """What was found in directories before."""
    importlib.invalidate_caches()
    for found in (architectures, dense_architectures, targets, representations, stages):
        found.cache_clear()


class Section:
    """Runs the commands under a file of the page, with this file and those before it in their places."""

    def __init__(self, run_cli: Callable[..., Any], save_model: Callable[..., Path], root: Path) -> None:
        self._run_cli, self._save_model, self.root = run_cli, save_model, root

    def model(self, name: str) -> Path:
        """The tiny model that stands for one of the page."""
        path = self.root / "models" / name.replace("/", "-")
        if not path.exists():
            model_type, more = MODELS[name]
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **more}))
            self._save_model(model, path)
        return path

    def run(self, file: Block) -> list[Any]:
        """What the commands under a file print with `--json`."""
        return [self.call(*words[1:]) for words in shown_under(file)]

    def call(self, *shown: str) -> Any:
        words = [str(self.model(word)) if word in MODELS else word for word in smaller(list(shown))]
        with contextlib.chdir(self.root):
            result = self._run_cli(*words, "--json")
        assert result.code == 0, f"{' '.join(shown)}\n{result.stderr}"
        return result.json

    def logits(self, path: Path) -> torch.Tensor:
        with quiet(), torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            return model(input_ids=TOKENS, use_cache=False).logits


def streamed_logits(path: Path, scratch: Path) -> torch.Tensor:
    """The same with one layer in memory at a time, as calibration runs the model."""
    checkpoint = Checkpoint.open(path)
    model = StreamedModel(checkpoint, find_architecture(checkpoint.config), torch.float32, torch.device("cpu"))
    sweep = Sweep(model, TOKENS, scratch)
    sweep.embed()
    for index in range(model.layer_count):
        with model.layer(index) as layer:
            sweep.forward(index, layer)
    with torch.no_grad():
        return model.head(TOKENS, sweep.hidden(model.layer_count).read(0, sweep.count))


def shown_under(file: Block) -> list[list[str]]:
    """The words of the commands between a file of the page and the next."""
    later = [block.line for block in SHOWN if block.line > file.line]
    end = min(later, default=10**9)
    between = [block for block in blocks(ADDING) if block.language == "console" and file.line < block.line < end]
    return [words for block in between for words in commands(block)]


@pytest.fixture
def section(run_cli: Any, save_model: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Section]:
    """With the file that the test is about, and those before it."""
    file: Block = request.param
    if file in (FAMILY, TARGET):
        pytest.importorskip("transformers.models.mellum")
    (tmp_path / "my-text.txt").write_text(request.getfixturevalue("tiny_text").read_text(encoding="utf-8")[:300])
    (tmp_path / "instructions.jsonl").symlink_to(request.getfixturevalue("instructions"))
    with added(tmp_path / "files", SHOWN[: SHOWN.index(file) + 1]):
        yield Section(run_cli, save_model, tmp_path)


def about(file: Block) -> Any:
    return pytest.mark.parametrize("section", [file], indirect=True, ids=[file.file])


def test_every_section_is_one_new_file() -> None:
    text = (ROOT / ADDING).read_text(encoding="utf-8")
    titles = [part.splitlines()[0] for part in text.split("\n## ")[1:] if "\n```python" in part]
    assert len(titles) == len(SHOWN) == len({block.file for block in SHOWN})
    assert not any((ROOT / block.file).exists() for block in SHOWN)
    assert all(shown_under(block) for block in SHOWN)


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    def known() -> list[set[str]]:
        named = ({family.name for family in found()} for found in (architectures, dense_architectures))
        return [*named, set(targets()), set(representations()), set(stages())]

    before = known()
    with added(tmp_path, [DENSE, REPRESENTATION, METHOD]):
        more = [inside - outside for inside, outside in zip(known(), before, strict=True)]
        assert more == [set(), {"StableLM"}, set(), {"kronecker"}, {"kronecker"}]
    assert known() == before


@about(DENSE)
def test_a_dense_family(section: Section) -> None:
    [told] = section.run(DENSE)
    assert told["target"] == "moetool"
    assert told["proof"]["preserves"]
    assert told["proof"]["relative_logit_error"] < 1e-5


@about(FAMILY)
def test_a_family_of_moe_models(section: Section) -> None:
    [told] = section.run(FAMILY)
    assert told["achieved_ratio"] == pytest.approx(0.3, abs=0.02)
    found = section.call("inspect", "smaller")
    assert (found["architecture"], found["moe_layers"], found["experts"]) == ("Mellum", 2, 8)
    path = section.model("JetBrains/Mellum2-12B-A2.5B-Base")
    assert not torch.equal(section.logits(section.root / "smaller"), section.logits(path))
    torch.testing.assert_close(streamed_logits(path, section.root), section.logits(path), rtol=1e-4, atol=1e-4)


@about(TARGET)
def test_a_target(section: Section) -> None:
    [told] = section.run(TARGET)
    assert told["target"] == "mellum"
    assert told["proof"]["preserves"]
    made, dense = (section.logits(path) for path in (section.root / "coder", section.model("QWEN3_WITH_WINDOWS")))
    torch.testing.assert_close(made, dense, rtol=1e-4, atol=1e-4)


@about(REPRESENTATION)
def test_a_representation(section: Section) -> None:
    [told] = section.run(REPRESENTATION)
    assert {"representation": "kronecker", "stands for": "delta to the base"} in told["representations"]
    form: Any = parse_representation("kronecker:8")
    generator = torch.Generator().manual_seed(0)
    contract = runpy.run_path(str(ROOT / "tests" / "representations" / "test_contract.py"))
    assert {"kronecker:4", "kronecker:8"} <= set(contract["SPECS"])
    for known in (contract["NOTHING"], contract["measured"]()):
        contract["test_encoded_as_promised"](form, known, torch.bfloat16)
    exact = torch.kron(torch.randn(3, 4, generator=generator), torch.randn(8, 8, generator=generator))
    stored = form.encode(exact, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        name: one.shape for name, one in form.tensors((24, 32)).items()
    }
    torch.testing.assert_close(form.decode(stored, (24, 32), torch.float32), exact, rtol=1e-5, atol=1e-5)
    weight = form.build((24, 32), torch.float32, torch.device("cpu"))
    weight.load_state_dict(stored)
    inputs = torch.randn(5, 32, generator=generator)
    torch.testing.assert_close(weight(inputs), inputs @ exact.T, rtol=1e-5, atol=1e-4)


@about(METHOD)
def test_a_method(section: Section) -> None:
    upcycled, tuned, _ = section.run(METHOD)
    assert upcycled["proof"]["preserves"]
    assert tuned["trained_parameters"] > 0
    found = section.call("inspect", "tuned")
    assert found["moe"][0]["up"] == ["kronecker:8"] * 4
    root = section.root
    torch.testing.assert_close(section.logits(root / "tuned"), section.logits(root / "exported"), rtol=1e-4, atol=1e-4)
    assert not torch.equal(section.logits(root / "tuned"), section.logits(root / "adapted"))
