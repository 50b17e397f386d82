"""Experts that stay in their files: the same to the bit, within the memory that they are given."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from kinds import _with, layout
from torch import Tensor
from transformers import AutoModelForCausalLM

import moetool
from moetool.architectures import MoEShape
from moetool.checkpoint.sizes import format_bytes
from moetool.errors import InvalidInputError, ResourceError, UsageError
from moetool.format.entry import format_entry
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.paging import _DONT_NEED, PagedExperts, _advise, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="experts are paged on Linux")
SHAPE, EXPERT = MoEShape(experts=4, top_k=2, hidden=128, intermediate=2048), 3 * 128 * 2048  # bytes of codes
RunCli = Callable[..., Any]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tiny_mixtral: Path) -> Path:
    """A Mixtral of 3 layers whose experts, in 8 bits, are larger than pages, with a tokenizer."""
    path = tmp_path_factory.mktemp("paged") / "large"
    shutil.copytree(tiny_mixtral, path, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    own = layout(SHAPE, "quantised-weight:8:128", base="low-rank:0")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build("mixtral", hidden_size=128, intermediate_size=2048)
        _with(model, format_entry(dict.fromkeys(range(3), own))).save_pretrained(path)
    return path


def loaded(path: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of a prompt and of tokens one by one."""
    ids = torch.arange(3, 27)[None]
    found = model(input_ids=ids[:, :12], use_cache=True)
    each, cache = [found.logits[0]], cache_of(found)
    for position in range(12, 24):
        each.append(model(input_ids=ids[:, position : position + 1], **{CACHE: cache}, use_cache=True).logits[0])
    return torch.cat(each)


def test_logits_are_the_same_to_the_bit_in_any_memory(large: Path) -> None:
    expected, model = logits(loaded(large)), loaded(large)
    pager = moetool.page_experts(model, 1 << 50)
    assert isinstance(pager, PagedExperts)
    assert pager.held_bytes == 0
    assert logits(model).equal(expected)
    all_ = pager.held_bytes
    assert 0.98 * 12 * EXPERT < all_ < 1.1 * 12 * EXPERT, "12 experts, but for the pages at their edges"
    assert pager.read_bytes == all_, "each was asked for once"
    pager.memory = pager._others + all_ // 2
    assert logits(model).equal(expected)
    assert pager.held_bytes <= all_ // 2
    assert pager.read_bytes > all_, "some were let go of, and asked for again"


def test_what_is_let_go_of_is_not_in_memory(large: Path) -> None:
    model = loaded(large)
    pager = moetool.page_experts(model, 1 << 50)
    logits(model)
    before = resident_bytes()
    pager.memory = 0
    pager.need(0, [0])
    assert before - resident_bytes() > 0.9 * 11 * EXPERT
    assert pager.held_bytes < 1.1 * EXPERT, "what a layer needs is there, whatever the memory"


def test_memory_that_is_taken_away_is_read_again(large: Path) -> None:
    """The system may drop any page of a map at any time."""
    expected, model = logits(loaded(large)), loaded(large)
    pager = moetool.page_experts(model, 1 << 50)

    def take_away(*_: object) -> None:
        for own in pager._spans.values():
            _advise(own, _DONT_NEED)

    hook = model.model.layers[1].register_forward_pre_hook(take_away)
    assert logits(model).equal(expected)
    hook.remove()
    assert logits(model).equal(expected)


def test_memory_that_shrinks_while_tokens_run(large: Path) -> None:
    expected, model = logits(loaded(large)), loaded(large)
    pager = moetool.page_experts(model, 1 << 50)
    before = pager.memory
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: setattr(pager, "memory", 0))
    assert logits(model).equal(expected)
    hook.remove()
    assert pager.memory < before
    assert pager.held_bytes < 3 * EXPERT, "no more than the layer that ran last needed"


def test_the_experts_that_were_used_longest_ago_go_first(large: Path) -> None:
    pager = moetool.page_experts(loaded(large), 1 << 50)
    for expert in (0, 1, 2, 0):
        pager.need(1, [expert])
    pager.memory = max(pager._others, resident_bytes() - pager.held_bytes) + round(3.5 * EXPERT)
    pager._others = pager.memory - round(3.5 * EXPERT)
    pager.need(2, [3])
    assert list(pager._held) == [(1, 2), (1, 0), (2, 3)]


def test_files_that_are_removed_stay_mapped(large: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(large, tmp_path / "copy")
    expected, model = logits(loaded(large)), loaded(copy)
    pager = moetool.page_experts(model, 1 << 50)
    shutil.rmtree(copy)
    pager.memory = 0
    assert logits(model).equal(expected)


def test_one_layer_has_to_fit(large: Path) -> None:
    model = loaded(large)
    with pytest.raises(
        ResourceError, match=r"--memory 1\.0 MB is too little .* the experts of one layer up to 3\."
    ) as told:
        moetool.page_experts(model, 10**6)
    assert "or more." in str(told.value)


def test_memory_is_a_size_as_commands_take_it(large: Path) -> None:
    assert moetool.page_experts(loaded(large), "100GB").memory == 100 * 10**9
    for wrong in ("much", 0, 0.5):
        with pytest.raises(UsageError, match=r"is not a size: give bytes, or a text such as '8GB'"):
            moetool.page_experts(loaded(large), wrong)


def test_weights_that_were_changed_are_not_let_go_of(large: Path) -> None:
    """What was written into a mapped file is in memory alone. Other memory lies beside it, and other models' files."""
    model, others = loaded(large), [loaded(large) for _ in range(3)]
    scales = model.model.layers[0].mlp.experts.delta(0, "up").scales
    with torch.no_grad():
        scales.mul_(2)
    expected = logits(model)
    with pytest.raises(InvalidInputError, match="lies in a mapped weight file"):
        moetool.page_experts(model, 1 << 50)
    assert logits(model).equal(expected)
    assert all(moetool.page_experts(other, 1 << 50) for other in others)


def test_experts_that_are_put_together_cannot_be_paged(tiny_mixtral: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"leave out --offload\. Experts do if `moetool compress` has made them"
    ):
        moetool.page_experts(loaded(tiny_mixtral))


def test_generate_eval_and_bench(run_cli: RunCli, large: Path, tmp_path: Path) -> None:
    paged, text = ("--offload", "experts", "--memory", "100GB"), tmp_path / "text.txt"
    text.write_text("the model is a model and the text is a text " * 40)
    words = ("generate", large, "the model", "--max-new-tokens", 6, "--json")
    assert run_cli(*words, *paged).json["text"] == run_cli(*words).json["text"]
    words = ("eval", large, "--data", text, "--sequence-length", 16, "--synthesize", "on-the-fly", "--json")
    assert run_cli(*words, *paged).json["nll"] == run_cli(*words).json["nll"]
    timed = run_cli("bench", large, "--batch", 1, "--lengths", 8, "--new-tokens", 2, "--rounds", 1, "--json", *paged)
    assert timed.code == 0, timed.stderr
    assert timed.json["model"]["synthesized"] is False


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--memory", "1GB"), 2, "say --offload experts, too"),
        (("--offload", "experts", "--synthesize", "load"), 2, "cannot be offloaded"),
        (("--offload", "experts", "--device", "map"), 2, "is for the processor, not for --device map"),
        (("--offload", "experts", "--memory", "20MB"), 4, f"--memory {format_bytes(20_000_000)} is too little"),
    ],
)
def test_what_is_refused(run_cli: RunCli, large: Path, options: tuple[str, ...], code: int, said: str) -> None:
    result = run_cli("generate", large, "the model", *options)
    assert result.code == code
    assert said in result.stderr
    assert not result.stdout
