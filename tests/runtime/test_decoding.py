"""Custom modules decode without graph breaks, and without waiting for what a layer has chosen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import KINDS, save_kind
from sampling import sampled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from moetool.checkpoint.reader import Checkpoint
from moetool.compiled.compiler import problem
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE
from moetool.runtime.loading import model_class

CUSTOM = [
    kind
    for kind in KINDS
    if kind.partition("-")[0] in ("mixture", "adapters", "masks", "neurons") and "on-base" not in kind
]
STEPS = torch.tensor([[5], [9]])
every_custom_kind = pytest.mark.parametrize("kind", CUSTOM)
# One of each module that routes tokens.
COMPILED = ("mixture-with-biases", "neurons-oracle-joined")


class Waits(TorchDispatchMode):
    """Gathers the operations that read numbers, or have as many outputs as numbers say."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in self.OPERATIONS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def loaded(kind: str, path: Path) -> Any:
    save_kind(kind, path)
    with quiet():
        return model_class(Checkpoint.open(path).config).from_pretrained(path)


def steps(model: Any, run: Any, first: int) -> Tensor:
    """Logits `[steps, vocabulary]` by `run` after a prompt, of which there are several; an encoder has no prompts."""
    if not model.can_generate():
        return torch.cat([run(step[None]).logits[0] for step in STEPS])
    cache = DynamicCache(config=model.config)
    model(torch.arange(first, first + 6)[None], **{CACHE: cache})
    return torch.cat([run(step[None], **{CACHE: cache}).logits[0] for step in STEPS])


@pytest.mark.parametrize("kind", sampled(CUSTOM, COMPILED))
@torch.no_grad()
def test_decoding_compiles_into_one_graph(kind: str, tmp_path: Path) -> None:
    """Which serves every prompt, whatever was run before."""
    model = loaded(kind, tmp_path)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for first in (3, 20):
        torch.testing.assert_close(steps(model, compiled, first), steps(model, model, first), rtol=1e-4, atol=1e-5)
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps(model, compiled, 40)


@every_custom_kind
@torch.no_grad()
def test_decoding_waits_for_nothing(kind: str, tmp_path: Path) -> None:
    if problem():
        pytest.skip("without kernels it reads what was chosen, which is at hand on a CPU")
    model = loaded(kind, tmp_path)
    steps(model, model, 3)
    waits = Waits()

    def run(*args: Any, **options: Any) -> Any:
        with waits:
            return model(*args, **options)

    steps(model, run, 3)
    assert waits.seen == []
