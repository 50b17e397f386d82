"""docs/adding*.md: the files of every section are put where they say, and its commands run on tiny models.

Files are put into directories beside the package's own, which the package then looks into as well.
"""

import ast
import contextlib
import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ADDING, ROOT, Block, blocks, commands, smaller
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moetool.architectures import find_architecture
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.compiled import compiler
from moetool.format.kinds import kinds
from moetool.kernels import products
from moetool.kernels.forms import decoder
from moetool.quiet import quiet
from moetool.representations import parse_representation, representations
from moetool.stages import stages
from moetool.upcycle.targets import targets


@dataclass(frozen=True)
class Example:
    """What a section adds, and what it shows of it.

    Attributes:
        title: of the section.
        files: that it adds.
        shown: the words of its commands.
        before: files of the sections before it on its page.
    """

    title: str
    files: tuple[Block, ...]
    shown: tuple[tuple[str, ...], ...]
    before: tuple[Block, ...]

    @property
    def directories(self) -> set[str]:
        return {str(Path(block.file).parent) for block in self.files}


def examples(page: str) -> Iterator[Example]:
    """The sections of a page that have files."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines, start=1) if re.match("##? [A-Z]", line)]
    before: tuple[Block, ...] = ()
    for start, end in pairwise([*starts, len(lines) + 1]):
        inside = [block for block in blocks(page) if start < block.line < end]
        if files := tuple(block for block in inside if block.file):
            shown = [words for block in inside if block.language == "console" for words in commands(block)]
            yield Example(lines[start - 1].lstrip("# "), files, tuple(map(tuple, shown)), before)
            before += files


EXAMPLES = [example for page in ADDING for example in examples(page)]
TARGET, REPRESENTATION, METHOD, KERNELS, KIND, STAGE = EXAMPLES
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
    "QWEN3_WITH_WINDOWS": ("qwen3", {**WINDOWS, "use_sliding_window": True}),
    "meta-llama/Llama-3.2-3B": ("llama", {}),
    "RUN_A": ("mixtral", {"num_local_experts": 4}),
    "RUN_B": ("mixtral", {"num_local_experts": 4}),
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
            home, name = block.file.rpartition("/")[0].replace("/", "."), path.stem
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
    for found in (targets, representations, kinds, stages, decoder):
        found.cache_clear()
    compiler.added_forms.cache_clear()
    compiler.problem.cache_clear()
    compiler._LOADED.clear()


class Section:
    """Runs the commands of an example, with its files and those before them in their places."""

    def __init__(self, run_cli: Callable[..., Any], save_model: Callable[..., Path], root: Path) -> None:
        self._run_cli, self._save_model, self.root = run_cli, save_model, root

    def model(self, name: str) -> Path:
        """The tiny model that stands for one of the page."""
        path = self.root / "models" / name.replace("/", "-")
        if not path.exists():
            model_type, more = MODELS[name]
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(list(MODELS).index(name))
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **more}))
            self._save_model(model, path)
        return path

    def run(self, example: Example) -> list[Any]:
        """What its commands print with `--json`."""
        return [self.call(*words[1:]) for words in example.shown]

    def call(self, *shown: str) -> Any:
        result = self.ends(*shown, "--json")
        assert result.code == 0, f"{' '.join(shown)}\n{result.stderr}"
        return result.json

    def ends(self, *shown: str) -> Any:
        """How a command ends."""
        words = [str(self.model(word)) if word in MODELS else word for word in smaller(list(shown))]
        with contextlib.chdir(self.root):
            return self._run_cli(*words)

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


@pytest.fixture
def section(run_cli: Any, save_model: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Section]:
    """With the files that the test is about, and those before them."""
    example: Example = request.param
    if example is TARGET:
        pytest.importorskip("transformers.models.mellum")
    (tmp_path / "my-text.txt").write_text(request.getfixturevalue("tiny_text").read_text(encoding="utf-8")[:300])
    (tmp_path / "instructions.jsonl").symlink_to(request.getfixturevalue("instructions"))
    with added(tmp_path / "files", [*example.before, *example.files]):
        yield Section(run_cli, save_model, tmp_path)


def about(example: Example) -> Any:
    return pytest.mark.parametrize("section", [example], indirect=True, ids=[example.title])


def test_all_that_is_added_is_new_files() -> None:
    """The table: of every example its new files, their directories, and no file of the package among them."""
    row = re.compile(r"\| \[(.*)\]\((.*)\) \| (\d) \| (.*) \| (\d) \|")
    table = [row.fullmatch(line) for line in (ROOT / ADDING[0]).read_text(encoding="utf-8").splitlines()]
    stated = [found.groups() for found in table if found]
    assert len(stated) == len(EXAMPLES)
    for (title, target, new, directories, changed), example in zip(stated, EXAMPLES, strict=True):
        known = [block.file for block in example.files if (ROOT / block.file).exists()]
        assert (int(new), int(changed)) == (len({block.file for block in example.files}), len(known)), title
        assert {f"moetool/{name}" for name in re.findall("`(.*?)`", directories)} == example.directories, title
        assert title == example.title or target.endswith(".md"), title
        assert example.shown, title


def test_what_is_added_keeps_to_the_floors() -> None:
    house = runpy.run_path(str(ROOT / "tests" / "test_house.py"))
    room, floor = house["room"], house["floor"]
    for block in (block for example in EXAMPLES for block in example.files if block.language == "python"):
        here = room(block.file.replace("/", "."))
        nodes = (node for node in ast.walk(ast.parse("\n".join(block.lines))) if isinstance(node, ast.ImportFrom))
        there = {room(node.module) for node in nodes if node.module and node.module.startswith("moetool.")}
        assert there or here == "kernels", block.file
        assert {other for other in there if other != here and floor(other) >= floor(here)} == set(), block.file


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    def known() -> list[set[str]]:
        return [
            set(targets()),
            set(representations()),
            set(kinds()),
            set(stages()),
        ]

    before = known()
    added_here = [block for example in (REPRESENTATION, METHOD, KIND, STAGE) for block in example.files]
    with added(tmp_path, added_here):
        more = [inside - outside for inside, outside in zip(known(), before, strict=True)]
        made = {"kronecker", "mov", "average-experts"}
        assert more == [set(), {"kronecker"}, {"vector_experts"}, made]
    assert known() == before


@about(TARGET)
def test_a_target(section: Section) -> None:
    [told] = section.run(TARGET)
    assert told["target"] == "mellum"
    assert told["proof"]["preserves"]
    made, dense = (section.logits(path) for path in (section.root / "coder", section.model("QWEN3_WITH_WINDOWS")))
    torch.testing.assert_close(made, dense, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(streamed_logits(section.root / "coder", section.root), made, rtol=1e-4, atol=1e-4)


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


@about(KERNELS)
def test_a_representation_with_kernels(section: Section) -> None:
    """On a CPU as compiled, and, where there is Triton, as its interpreter has it: what dense matrices give."""
    [told] = section.run(KERNELS)
    assert {"representation": "fp8", "stands for": "the matrix itself"} in told["representations"]
    form: Any = parse_representation("fp8")
    contract = runpy.run_path(str(ROOT / "tests" / "representations" / "test_contract.py"))
    assert "fp8" in contract["SPECS"]
    contract["test_encoded_as_promised"](form, contract["NOTHING"], torch.bfloat16)
    assert not compiler.problem()
    kernels = runpy.run_path(str(Path(__file__).with_name("added_kernels.py")))
    for shape in ((24, 64), (9, 40)):  # in vectors, and number by number
        kernels["check"](products, shape)
    if find_spec("triton") is not None:
        command = [sys.executable, str(Path(__file__).with_name("added_kernels.py")), str(section.root / "files")]
        finished = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr


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


@about(KIND)
def test_a_custom_kind(section: Section) -> None:
    upcycled, tuned, found, verified = section.run(KIND)
    layers, experts, hidden = SIZES["num_hidden_layers"], 4, SIZES["hidden_size"]
    assert upcycled["proof"]["relative_logit_error"] < 1e-5
    assert upcycled["parameters"]["added"] == tuned["trained_parameters"] == layers * 2 * experts * hidden
    assert found["architecture"] == "Llama, vectors as experts (MoV)"
    assert (found["moe_layers"], found["experts"], found["intermediate_size"]) == (layers, experts, 128)
    assert verified["stages"] == ["tune", "mov"]
    refused = section.ends(
        "compress", "tuned", "x", "--method", "d2moe", "--ratio", "0.4", "--calibration", "my-text.txt"
    )
    assert refused.code == 3
    assert "experts are vectors" in refused.stderr

    # As trained, and with vectors so large that an error in any of them is seen.
    file = section.root / "tuned" / "model.safetensors"
    trained = load_file(file)
    drawn = {name: torch.randn(one.shape) for name, one in trained.items() if name.endswith(".vectors")}
    assert len(drawn) == layers
    for weights in (trained, {**trained, **drawn}):
        save_file(weights, file, {"format": "pt"})
        expected = scaled_logits(section.model("meta-llama/Llama-3.2-3B"), weights)
        torch.testing.assert_close(section.logits(section.root / "tuned"), expected, rtol=1e-4, atol=1e-4)


def scaled_logits(path: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of a Llama whose feed-forward networks' outputs are scaled as MoV does it."""
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for index, layer in enumerate(model.model.layers):
            gate, vectors = (weights[f"model.layers.{index}.mlp.{name}"].float() for name in ("gate.weight", "vectors"))

            def scale(_: Any, inputs: Any, made: Any, gate: Any = gate, vectors: Any = vectors) -> torch.Tensor:
                shares = (inputs[0] @ gate.T).softmax(-1)
                return made * (1 + torch.einsum("...e,eh->...h", shares, vectors))

            layer.mlp.register_forward_hook(scale)
        return model(input_ids=TOKENS, use_cache=False).logits


@about(STAGE)
def test_a_stage(section: Section) -> None:
    planned, made, again, verified = section.run(STAGE)
    assert planned["averaged"] == made["averaged"] == 2
    assert planned["output_bytes"] == made["bytes_after"]
    assert again["status"] == "finished"
    assert verified["stages"] == ["average-experts"]
    one, other, mean = (
        Checkpoint.open(path) for path in (section.model("RUN_A"), section.model("RUN_B"), section.root / "mean")
    )
    for name in mean.tensors:
        parts = [one.read(name), *([other.read(name)] if ".experts." in name else [])]
        torch.testing.assert_close(mean.read(name), torch.stack(parts).mean(0), msg=name)


@about(STAGE)
def test_a_stage_is_found_by_its_file(section: Section) -> None:
    shown = section.ends("--help").stdout
    assert re.search(r"average-experts +Average the experts of checkpoints", shown)
    assert "average-experts" in {row["method"] for row in section.call("list")["methods"]}
    assert "Did you mean average-experts?" in section.ends("average-expert", "a", "b").stderr
    assert section.ends("average-experts", "RUN_A", "x").code == 2


@about(STAGE)
def test_a_stage_goes_on_where_it_was_stopped(section: Section, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["average-experts", "RUN_A", "mean", "--other", "RUN_B", "--shard-size", "20KB", "--no-proof"]
    read: list[int] = []

    def stopped(self: ExpertReader, layer: int, *arguments: Any) -> torch.Tensor:
        read.append(layer)
        if len(read) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return dense(self, layer, *arguments)

    dense = ExpertReader.dense
    monkeypatch.setattr(ExpertReader, "dense", stopped)
    assert section.ends(*words).code == 75
    assert set(read) == {0}
    read[:] = [-1]
    assert section.ends(*words, "--resume").code == 0
    assert set(read) == {-1, 1}
