"""A published model through the command line, where it is at hand: `MOETOOL_SMOLLM2` says where
`scripts/get_smollm2.py` wrote it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

RunCli = Callable[..., Any]
Perplexity = Callable[[Path], float]
VARIABLE = "MOETOOL_SMOLLM2"
PROSE = Path(__file__).parents[2] / "LICENSE"
QUESTION, ANSWER = ("What is the capital of France?", "--max-new-tokens", 16), "Paris"
SAMPLES = ("--samples", 2, "--sequence-length", 64)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no model of scripts/get_smollm2.py"),
]


@pytest.fixture(scope="module")
def published() -> Path:
    return Path(os.environ[VARIABLE])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copyfile(PROSE, tmp_path_factory.mktemp("text") / "prose.txt"))


@pytest.fixture(scope="module")
def perplexity(run_cli: RunCli, text: Path) -> Perplexity:
    """On so little text that it is quick."""

    def of(model: Path) -> float:
        result = run_cli("eval", model, "--data", text, "--sequence-length", 256, "--windows", 2, "--json")
        assert result.code == 0, result.stderr
        return result.json["perplexity"]

    return of


@pytest.fixture(scope="module")
def upcycled(published: Path, run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("upcycled") / "model"
    assert run_cli("upcycle", published, output, "--experts", 4).code == 0
    return output


def says(run_cli: RunCli, model: Path) -> str:
    return run_cli("generate", model, *QUESTION, "--json").json["text"]


def test_it_speaks(published: Path, run_cli: RunCli, perplexity: Perplexity) -> None:
    assert ANSWER in says(run_cli, published)
    assert 1 < perplexity(published) < 30


def test_its_tokenizer_takes_digits_apart(published: Path) -> None:
    """And spaces before them together, as the published one does."""
    tokenizer = AutoTokenizer.from_pretrained(published)
    assert tokenizer.tokenize("in  1984") == ["in", "ĠĠ", "1", "9", "8", "4"]


def test_upcycled_it_is_the_same_model(
    published: Path, upcycled: Path, run_cli: RunCli, perplexity: Perplexity
) -> None:
    assert perplexity(upcycled) == pytest.approx(perplexity(published), rel=1e-5)
    assert says(run_cli, upcycled) == says(run_cli, published)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (upcycled / name).read_bytes() == (published / name).read_bytes()


def test_upcycled_transformers_runs_it(upcycled: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(upcycled)
    model = AutoModelForCausalLM.from_pretrained(upcycled)
    messages = [{"role": "user", "content": QUESTION[0]}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert ANSWER in tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("options", [("--method", "hybrid", "--ratio", 0.6), ("--method", "d2moe", "--ratio", 0.4)])
def test_compressed_it_still_knows(
    upcycled: Path, text: Path, run_cli: RunCli, perplexity: Perplexity, tmp_path: Path, options: tuple[object, ...]
) -> None:
    output = tmp_path / "model"
    made = run_cli(
        "compress",
        upcycled,
        "--method",
        "d2moe",
        output,
        *options,
        "--calibration",
        text,
        "--mix",
        0,
        *SAMPLES,
        "--json",
    )
    assert made.code == 0, made.stderr
    assert made.json["bytes_after"] <= (1 - float(str(options[-1]))) * made.json["bytes_before"] * 1.001
    assert perplexity(output) < 1.2 * perplexity(upcycled)
    assert ANSWER in says(run_cli, output)
