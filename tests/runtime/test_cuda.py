"""Models of every kind on a card: what they compute, and how they decode there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import KINDS, save_kind
from torch import Tensor
from torch._dynamo.utils import counters

from moetool.checkpoint.reader import Checkpoint
from moetool.kernels.products import problem
from moetool.quiet import quiet
from moetool.representations import parse_representation
from moetool.runtime.loading import model_class
from moetool.runtime.modules.experts import SharedBaseExperts

# torch says there how it could be faster.
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

TOKENS = torch.arange(3, 35).view(2, 16)
GENERATE: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
ON_KERNELS = ("low-rank", "shared-factors", "quantised", "sparse", "formats")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A model of a kind, loaded as `from_pretrained` is told."""
    directory = tmp_path_factory.mktemp("kinds")

    def load(kind: str, **options: Any) -> Any:
        path: Path = directory / kind
        if not path.exists():
            save_kind(kind, path)
        with quiet():
            return model_class(Checkpoint.open(path).config).from_pretrained(path, **options)

    return load


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS.to(model.device)).logits.float().cpu()


def layer(load: Callable[..., Any], kind: str) -> SharedBaseExperts:
    """The first layer's experts on the card, in bf16."""
    model = load(kind, device_map="cuda", dtype=torch.bfloat16)
    return next(module for module in model.modules() if isinstance(module, SharedBaseExperts))


def batch(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 32, generator=generator).bfloat16()
    weights, chosen = torch.randn(tokens, 4, generator=generator).softmax(-1).topk(2)
    return hidden.cuda(), chosen.cuda(), weights.bfloat16().cuda()


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted.float()).norm() < 0.01 * wanted.float().norm())


def test_there_are_kernels() -> None:
    assert problem(torch.device("cuda")) == ""


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_computes_what_it_does_on_a_cpu(kind: str, load: Callable[..., Any]) -> None:
    expected = logits(load(kind))
    found = logits(load(kind, device_map="cuda"))
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("kind", ON_KERNELS)
@torch.inference_mode()
def test_few_and_many_tokens_meet_kernels(kind: str, load: Callable[..., Any]) -> None:
    experts = layer(load, kind)
    assert experts._kernels.of(experts) is not None
    for tokens in (1, 5, 200):
        given = batch(tokens, tokens)
        assert near(experts.infer(*given), experts.eager(*given))


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ON_KERNELS)
@torch.inference_mode()
def test_decoding_never_waits_for_the_card(kind: str, load: Callable[..., Any], request: Any) -> None:
    experts = layer(load, kind)
    given = batch(2, 0)
    expected = experts.eager(*given)
    experts.infer(*given)
    request.getfixturevalue("no_waiting")
    found = experts.infer(*given)
    torch.cuda.set_sync_debug_mode("default")
    assert near(found, expected)


@pytest.mark.parametrize("kind", ON_KERNELS)
@torch.inference_mode()
def test_a_graph_of_one_choice_serves_others(kind: str, load: Callable[..., Any]) -> None:
    experts = layer(load, kind)
    held = batch(2, 0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            experts.infer(*held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts.infer(*held)
    for seed in (1, 2):
        given = batch(2, seed)
        for place, value in zip(held, given, strict=True):
            place.copy_(value)
        graph.replay()
        assert near(output, experts.eager(*given))


@pytest.mark.parametrize("kind", ON_KERNELS)
def test_compiled_decoding_with_a_static_cache_says_the_same(kind: str, load: Callable[..., Any]) -> None:
    prompt = TOKENS[:1].cuda()
    expected = load(kind, device_map="cuda").generate(prompt, **GENERATE)
    assert load(kind, device_map="cuda").generate(prompt, cache_implementation="static", **GENERATE).equal(expected)
    model = load(kind, device_map="cuda")
    model.forward = torch.compile(model.forward, mode="reduce-overhead")
    assert model.generate(prompt, cache_implementation="static", disable_compile=True, **GENERATE).equal(expected)


@torch.no_grad()
def test_compiled_experts_are_recorded_in_graphs(load: Callable[..., Any]) -> None:
    """Not left out of them, e.g. for an input on the CPU."""
    experts = layer(load, "quantised")
    compiled = torch.compile(experts, mode="reduce-overhead")
    counters["inductor"].clear()
    for seed in range(4):
        given = batch(2, seed)
        assert near(compiled(*given), experts.eager(*given))
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("spec", ["nf4", "int8"])
def test_formats_of_bitsandbytes_are_read_by_it(spec: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    matrix, form = torch.randn(48, 192, generator=torch.Generator().manual_seed(0)), parse_representation(spec)
    weight = form.build((48, 192), torch.bfloat16, torch.device("cpu"))
    weight.load_state_dict(form.encode(matrix, torch.bfloat16))
    dense = weight.dense()
    assert weight.cuda().dense().cpu().allclose(dense, rtol=1e-6)
    if spec == "nf4":
        codes, state = functional.quantize_4bit(matrix.cuda(), quant_type="nf4", blocksize=64)
        assert (codes.view(-1).cpu() == weight.cpu().codes).float().mean() > 0.999
        assert near(functional.dequantize_4bit(codes, state).cpu(), dense)
