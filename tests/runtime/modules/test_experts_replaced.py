"""Kernels read tensors by address: whatever becomes of a tensor, they compute with what it is now."""

import copy
import io
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from sampling import sampled
from stored_experts import STORED, batch, distance, experts_of, is_on_kernels, model_of, others_of
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moetool.compiled.compiler import problem
from moetool.representations.base import Weight
from moetool.representations.low_rank_sparse import LowRankSparseWeight
from moetool.representations.sparse import ScatteredWeight
from moetool.runtime.modules.experts import SharedBaseExperts

pytestmark = pytest.mark.skipif(bool(problem()), reason=problem())
every_kind = pytest.mark.parametrize("kind", STORED)
Change = Callable[[SharedBaseExperts, SharedBaseExperts], SharedBaseExperts | None]


def floats(experts: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*experts.parameters(), *experts.buffers()) if tensor.is_floating_point()]


def _write(experts: SharedBaseExperts, _: SharedBaseExperts) -> None:
    for parameter in floats(experts):
        parameter.mul_(1.5)


def _set_data(experts: SharedBaseExperts, _: SharedBaseExperts) -> None:
    for parameter in floats(experts):
        parameter.data = parameter.data * 1.5


def _set_parameter(experts: SharedBaseExperts, _: SharedBaseExperts) -> None:
    for module in experts.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point():
                    setattr(module, name, nn.Parameter(tensor * 1.5) if tensors is module._parameters else tensor * 1.5)


def _load(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    experts.load_state_dict(other.state_dict())


def _assign(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    experts.load_state_dict(other.state_dict(), assign=True)


def _load_one_by_one(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    """As trainers do that load adapters."""
    for name, module in experts.named_modules():
        if isinstance(module, Weight):
            module.load_state_dict(other.get_submodule(name).state_dict())
    experts.down_proj.copy_(other.down_proj)


def _replace_modules(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    for name, module in list(experts.named_modules()):
        if isinstance(module, Weight):
            parent, _, own = name.rpartition(".")
            experts.get_submodule(parent)._modules[own] = other.get_submodule(name)
    experts.down_proj.copy_(other.down_proj)


def _narrow_twice(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    """Memory that the first gives back, the second may be given."""
    experts.load_state_dict(other.state_dict())
    experts.half().bfloat16().float()


def _share(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    experts.share_memory()
    _load(experts, other)


def _copy(experts: SharedBaseExperts, other: SharedBaseExperts) -> SharedBaseExperts:
    copied = copy.deepcopy(experts)
    _load(copied, other)
    return copied


def _copy_and_change_the_original(experts: SharedBaseExperts, other: SharedBaseExperts) -> SharedBaseExperts:
    copied = copy.deepcopy(other)
    is_on_kernels(other)
    again = copy.deepcopy(other)
    _write(other, other)
    del copied
    return again


def _pickle(experts: SharedBaseExperts, other: SharedBaseExperts) -> SharedBaseExperts:
    is_on_kernels(other)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    again: SharedBaseExperts = torch.load(file, weights_only=False)
    return again


def _train(experts: SharedBaseExperts, _: SharedBaseExperts) -> None:
    optimizer = torch.optim.SGD([parameter for parameter in floats(experts) if parameter.requires_grad], lr=2.0)
    with torch.enable_grad():
        experts(*batch(experts, 6)).square().mean().backward()
        optimizer.step()
        optimizer.step()


def _train_after_inference_mode(experts: SharedBaseExperts, other: SharedBaseExperts) -> None:
    with torch.inference_mode():
        experts(*batch(experts, 1))
        experts(*batch(experts, 40))
    _train(experts, other)


class _Twice(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


def _parametrize(experts: SharedBaseExperts, _: SharedBaseExperts) -> None:
    """As peft does with adapters of parameters."""
    for module in list(experts.modules()):
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        for name in [name for name in names if getattr(module, name).is_floating_point()]:
            if not isinstance(module, nn.ParameterDict | ScatteredWeight | LowRankSparseWeight):
                parametrize.register_parametrization(module, name, _Twice())


CHANGES: dict[str, Change] = {
    name.removeprefix("_").replace("_", " "): change
    for name, change in list(globals().items())
    if callable(change) and getattr(change, "__annotations__", {}).get("experts") is SharedBaseExperts
    if name.startswith("_")
}
OFTEN = ("load", "train")
MANY_SIDED = ("quantised", "sparse", "mixture-on-base-with-biases")


@pytest.mark.parametrize(
    ("kind", "change"),
    sampled(
        [(kind, change) for kind in STORED for change in CHANGES if kind in MANY_SIDED or change in OFTEN],
        [*product(["quantised"], CHANGES), *product(MANY_SIDED, OFTEN), *product(STORED, ["load"])],
    ),
)
def test_what_is_replaced_is_noticed(kind: str, change: str) -> None:
    for experts, other in zip(experts_of(kind), others_of(kind), strict=True):
        with torch.no_grad():
            before = [experts(*batch(experts, tokens)) for tokens in (1, 40)]
            assert is_on_kernels(experts)
            changed = CHANGES[change](experts, other) or experts
            if change != "replace modules":  # where factors may be shared with modules that are not here
                assert is_on_kernels(changed) is (change != "parametrize")
            for tokens, old in zip((1, 40), before, strict=True):
                arguments = batch(experts, tokens)
                found, expected = changed(*arguments), changed.eager(*arguments)
                is_trained = "train" not in change or kind != "formats"  # where nothing can be
                assert distance(old, expected) > 1e-4 or not is_trained
                assert distance(found, expected) < 1e-5


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_numbers_are_read_as_such(kind: str, dtype: torch.dtype) -> None:
    """At least as near to what fp32 makes of the same numbers as the plain form is, but for noise."""
    for experts in experts_of(kind):
        with torch.no_grad():
            experts(*batch(experts, 1))
            experts.to(dtype)
            wide = copy.deepcopy(experts).float()
            for tokens in (1, 3, 40):
                arguments = batch(experts, tokens, dtype)
                exact = wide.eager(arguments[0].float(), arguments[1], arguments[2].float())
                found = experts(*arguments)
                assert found.dtype == dtype
                assert is_on_kernels(experts)
                plain = distance(experts.eager(*arguments), exact)
                assert distance(found, exact) < max(1.05 * plain, torch.finfo(dtype).eps)


def test_parametrizations_that_are_taken_away_leave_kernels() -> None:
    (experts, *_) = experts_of("low-rank")
    parametrize.register_parametrization(experts, "down_proj", _Twice())
    assert not is_on_kernels(experts)
    parametrize.remove_parametrizations(experts, "down_proj", leave_parametrized=False)
    assert is_on_kernels(experts)


def test_moving_leaves_no_copy_behind() -> None:
    """Kernels hold on to what they read."""
    (experts, *_) = experts_of("quantised")
    with torch.no_grad():
        experts(*batch(experts, 1))
    memory = torch.UntypedStorage._weak_ref if hasattr(torch.UntypedStorage, "_weak_ref") else None
    reference = experts.down_proj.data.untyped_storage()._weak_ref() if memory else None
    experts.to("meta")
    if reference is not None:
        assert torch.UntypedStorage._expired(reference)
        torch.UntypedStorage._free_weak_ref(reference)


@every_kind
def test_two_threads_may_run_one_model(kind: str) -> None:
    model = model_of(kind)
    tokens = torch.arange(3, 43).view(1, 40)

    def run(length: int) -> Tensor:
        with torch.no_grad():
            return model(input_ids=tokens[:, :length]).logits

    lengths = [1, 40, 2, 7] * 3
    expected = {length: run(length) for length in set(lengths)}
    with ThreadPoolExecutor(2) as pool:
        for length, found in zip(lengths, pool.map(run, lengths), strict=True):
            assert found.equal(expected[length])


def _in_child(experts: SharedBaseExperts, send: Any) -> None:
    with torch.no_grad():
        send.send(experts(*batch(experts, 1)).tolist())


def test_a_forked_process_runs_on_kernels() -> None:
    (experts, *_) = experts_of("quantised")
    with torch.no_grad():
        expected = experts(*batch(experts, 1))
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(experts, send))
    child.start()
    assert receive.poll(30)
    assert torch.tensor(receive.recv()).equal(expected)
    child.join()
