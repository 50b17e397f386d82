"""Compressed experts under `torch.compile`, `torch.export`, `torch.jit` and the static caches of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from stored_experts import batch, distance, experts_in, experts_of, is_on_kernels, model_of
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache

import moetool
from moetool.compiled.compiler import problem
from moetool.errors import UsageError
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE

TOKENS = torch.arange(3, 83).view(2, 40)
GENERATE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = [
    pytest.mark.skipif(bool(problem()), reason=problem()),
    # torch and transformers about themselves
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __deepcopy__(self, _: Any) -> "Graphs":
        return self

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.made.append(graph)
        return graph.forward


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def test_a_model_is_one_graph(graphs: Graphs) -> None:
    """One for a token and one for any number of them; the experts' numbers are the graph's inputs."""
    model = model_of("shared-expert-on-base")
    del model.model.layers[1:]
    compiled: Any = torch.compile(model, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for length in (1, 40, 30, 39, 1, 28, 17):
            tokens = TOKENS[:1, :length]
            found = compiled(input_ids=tokens, use_cache=False).logits
            assert distance(found, model(input_ids=tokens, use_cache=False).logits) < 1e-6
    assert len(graphs.made) <= 3  # one token, the first prompt, any other
    assert all(str(graph.code).count("moetool.experts") == 2 for graph in graphs.made)  # the routed and the shared


@pytest.mark.parametrize("form", [("--bits", 4, "--group-size", 8), ("--bits", 2, "--group-size", 8, "--trellis")])
def test_a_deepseek_v3_decodes_as_in_plain_torch(
    graphs: Graphs, run_cli: Any, save_model: Any, tmp_path: Path, form: tuple[object, ...]
) -> None:
    """Grouped routing, latent attention and a shared expert add no error to that of fp32 in the kernels' sums."""
    source = save_model(families.build("deepseek_v3"), tmp_path / "source")
    method = ("--method", "quantize", "--rounding", "nearest", *form)
    assert run_cli("compress", source, tmp_path / "small", *method).code == 0
    with quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    assert experts_in(model)
    assert all(map(is_on_kernels, experts_in(model)))

    @torch.no_grad()
    def steps(run: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(TOKENS[:1, :6], **{CACHE: cache})
        return torch.cat([run(TOKENS[1:, place : place + 1], **{CACHE: cache}).logits for place in range(12)])

    on_kernels, compiled = steps(model), steps(torch.compile(model, fullgraph=True, backend=graphs))
    for experts in experts_in(model):
        experts.forward = experts.eager  # type: ignore[method-assign]
    expected = steps(model)
    assert 0 < distance(on_kernels, expected) < 2e-6
    assert 0 < distance(compiled, expected) < 2e-6


def test_layers_that_are_compiled_one_by_one_share_graphs(graphs: Graphs) -> None:
    layers = experts_of("low-rank")
    with torch.no_grad():
        for experts in layers:
            experts.compile(fullgraph=True, backend=graphs)
        for tokens in (1, 5, 40, 1):
            for experts in layers:
                arguments = batch(experts, tokens)
                assert distance(experts(*arguments), experts.eager(*arguments)) < 1e-5
    assert len(graphs.made) == 2  # one token, any other number


def test_a_compiled_model_follows_its_tensors(graphs: Graphs) -> None:
    """What a graph was made with is not what it runs with."""
    (experts, *_) = experts_of("quantised")
    compiled: Any = torch.compile(experts, fullgraph=True, backend=graphs)
    with torch.no_grad():
        before = compiled(*batch(experts, 1))
        for parameter in experts.parameters():
            parameter.data = 2 * parameter.data
        found, expected = compiled(*batch(experts, 1)), experts.eager(*batch(experts, 1))
    assert distance(before, expected) > 0.1
    assert distance(found, expected) < 1e-5


def test_training_under_compile_has_the_same_gradients(graphs: Graphs) -> None:
    def gradients(experts: Any, run: Any) -> list[Tensor]:
        run(*batch(experts, 12)).square().sum().backward()
        return [parameter.grad for parameter in experts.parameters() if parameter.grad is not None]

    (plain, *_), (experts, *_) = experts_of("low-rank"), experts_of("low-rank")
    expected = gradients(plain, plain)
    found = gradients(experts, torch.compile(experts, backend=graphs))
    assert len(found) == len(expected) > 10
    assert all(distance(own, other) < 1e-4 for own, other in zip(found, expected, strict=True))
    with torch.no_grad():
        assert distance(torch.compile(experts, backend=graphs)(*batch(experts, 1)), experts(*batch(experts, 1))) < 1e-6


def test_static_caches_and_the_compilation_that_comes_with_them(graphs: Graphs) -> None:
    model = model_of("quantised")
    expected = model.generate(TOKENS, **GENERATE)
    assert model.generate(TOKENS, cache_implementation="static", **GENERATE).equal(expected)
    compiling = CompileConfig(fullgraph=True, backend=graphs, mode=None)
    compiling._compile_all_devices = True  # transformers compiles by itself on a card
    found = model.generate(TOKENS, cache_implementation="static", compile_config=compiling, **GENERATE)
    assert found.equal(expected)
    assert graphs.made


def test_export_says_what_to_do() -> None:
    (experts, *_) = experts_of("low-rank")
    with torch.no_grad(), pytest.raises(UsageError, match=r"cannot be exported.*synthesize"):
        torch.export.export(experts, batch(experts, 3))


def test_what_it_says_can_be_done(graphs: Graphs) -> None:
    model = model_of("low-rank")
    moetool.synthesize(model)
    model.set_experts_implementation("batched_mm")
    experts = model.model.layers[0].mlp.experts
    arguments = (torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2))
    with torch.no_grad():
        exported = torch.export.export(experts, arguments).module()
        assert distance(exported(*arguments), experts(*arguments)) < 1e-6


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning")
def test_traces_fail() -> None:
    """Kernels leave none; what a trace returned would be memory that nobody has written."""
    (experts, *_) = experts_of("low-rank")
    with torch.no_grad(), pytest.raises(RuntimeError, match="not supported in the JIT"):
        torch.jit.trace(experts, batch(experts, 3), check_trace=False)(*batch(experts, 3))
