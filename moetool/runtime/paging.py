"""Experts of a compressed model that stay in its files, in memory only while they are used and there is room.

transformers maps weight files, and tensors that it need not convert are views of the maps. Their pages are read when
they are touched. Before a layer runs, the pages of the experts that its router chose are asked for together, and those
of the experts that were used longest ago are let go of, so that the process stays within its memory. Nothing is copied
and nothing is written: results are the same to the bit, and the system keeps what it has read as long as it has room.
"""

import ctypes
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from moetool.checkpoint.sizes import ByteSize, format_bytes
from moetool.errors import InvalidInputError, ResourceError, UsageError
from moetool.runtime.memory import total_bytes
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.given_model import check_loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WILL_NEED, _DONT_NEED = 3, 4  # advice to Linux (madvise)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")  # the name of its file last, or none
_SHARE = 0.8  # of the machine's memory, if nothing else is said

OneExpert = tuple[int, int]  # a layer and an expert
Pages = tuple[int, int]  # the address of a page, and bytes from there on


class PagedExperts:
    """The experts of a model that are paged.

    Attributes:
        memory: bytes that the process may have in memory, mapped files among them.
        held_bytes: of the experts that are in memory, or on their way.
        read_bytes: of all that have been asked for, again and again if they were let go of.
    """

    def __init__(self, spans: Mapping[OneExpert, Sequence[Pages]], resting: Sequence[Pages], memory: int) -> None:
        """`resting` are the pages of all other mapped weights. Lets go of all of them, for a start.

        Raises:
            ResourceError: one layer's experts do not fit beside all else.
        """
        self.memory, self.held_bytes, self.read_bytes = memory, 0, 0
        self._spans, self._held, self._lock = spans, OrderedDict[OneExpert, int](), Lock()
        self._sizes = {key: sum(length for _, length in own) for key, own in spans.items()}
        for own in (*spans.values(), resting):
            _advise(own, _DONT_NEED)
        self._others = resident_bytes() + sum(length for _, length in resting)
        layers = dict[int, int]()
        for (layer, _), size in self._sizes.items():
            layers[layer] = layers.get(layer, 0) + size
        if self._others + (most := max(layers.values())) > memory:
            raise ResourceError(
                f"--memory {format_bytes(memory)} is too little for offloaded experts: the process and all other "
                f"weights take {format_bytes(self._others)}, the experts of one layer up to {format_bytes(most)}. Give "
                f"it {format_bytes(self._others + most)} or more."
            )

    def need(self, layer: int, experts: Iterable[int]) -> None:
        """Ask for the experts of a layer that is about to run, and let go of others for which there is no room."""
        wanted = {(layer, expert): None for expert in experts if (layer, expert) in self._spans}
        with self._lock:
            new = [key for key in wanted if key not in self._held]
            for key in wanted:
                if key in self._held:
                    self._held.move_to_end(key)
            coming = sum(self._sizes[key] for key in new)
            others = max(self._others, resident_bytes() - self.held_bytes)
            while self._held and others + self.held_bytes + coming > self.memory:
                oldest = next(iter(self._held))
                if oldest in wanted:  # what the layer needs is in memory, whatever else there is
                    break
                self.held_bytes -= self._held.pop(oldest)
                _advise(self._spans[oldest], _DONT_NEED)
            for key in new:
                self._held[key] = self._sizes[key]
                _advise(self._spans[key], _WILL_NEED)
            self.held_bytes += coming
            self.read_bytes += coming


def page_experts(model: "PreTrainedModel", memory: int | str | None = None) -> PagedExperts:
    """Page the experts of a compressed model that was loaded on the processor, in the dtype that it is stored in.

    For inference: what is written into paged tensors afterwards is lost. A file may be removed or replaced meanwhile,
    but not shortened or written into: the process would end, or read what is there now.

    Args:
        model: as `from_pretrained` gives it.
        memory: bytes that this process may have in memory, as a number or in words (`"8GB"`); by default 80 % of the
            machine's.

    Raises:
        UsageError: this is not Linux, `model` is not loaded, or `memory` is no size.
        InvalidInputError: the model's experts are no parts of mapped files.
        ResourceError: one layer's experts do not fit beside all else.
    """
    check_loaded(model, "page_experts")
    if sys.platform != "linux":
        raise UsageError(f"Experts are paged on Linux, not on {sys.platform}.")
    allowed = _allowed(memory)
    layers = [module for module in model.modules() if isinstance(module, SharedBaseExperts)]
    areas, spans, paged = _mapped_files(), dict[OneExpert, Sequence[Pages]](), set[int]()
    for layer, module in enumerate(layers):
        for expert in range(module.num_experts):
            tensors = [own for own in _tensors(module.moetool[str(expert)]) if _lies_in(own, areas)]
            if found := _pages(tensors):
                spans[layer, expert] = found
                paged |= {tensor.data_ptr() for tensor in tensors}
    if not spans:
        raise InvalidInputError(
            "No expert of this model lies in a mapped weight file, so that none can be offloaded: leave out --offload. "
            "Experts do if `moetool compress` has made them, they are larger than pages of memory, and the model runs "
            "in the dtype that it is stored in; all others are put together in memory."
        )
    others = {own.data_ptr(): own for own in _tensors(model) if own.data_ptr() not in paged and _lies_in(own, areas)}
    pager = PagedExperts(spans, _pages(others.values()), allowed)
    for layer, module in enumerate(layers):
        module.register_forward_pre_hook(_hook(pager, layer, module.num_experts), with_kwargs=True)
    return pager


def _allowed(memory: int | str | None) -> int:
    if memory is None:
        return round(_SHARE * total_bytes())
    try:
        return TypeAdapter(ByteSize).validate_python(memory)
    except ValidationError as error:
        raise UsageError(
            f"memory={memory!r} is not a size: give bytes, or a text such as '8GB' or '500MiB'."
        ) from error


def _hook(pager: PagedExperts, layer: int, experts: int) -> Any:
    def ask(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        chosen = arguments[1] if len(arguments) > 1 else named.get("top_k_index")
        pager.need(layer, range(experts) if chosen is None else set(chosen.flatten().tolist()))

    return ask


def resident_bytes() -> int:
    """Bytes that this process has in memory, its own and of mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _mapped_files() -> list[Pages]:
    """Where weight files are mapped that nothing was written into: their pages can be read again."""
    found, area = [], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (match := _AREA.fullmatch(line)) is not None:
            first, end = int(match[1], 16), int(match[2], 16)
            area = (first, end - first) if ".safetensors" in match[3] else None
        elif area is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
            found.append(area)
    return found


def _lies_in(tensor: Tensor, areas: Sequence[Pages]) -> bool:
    if tensor.device.type != "cpu":
        return False
    start = tensor.data_ptr()
    return any(first <= start and start + tensor.nbytes <= first + length for first, length in areas)


def _pages(tensors: Iterable[Tensor]) -> list[Pages]:
    """Whole pages that tensors lie in, those of neighbors together; what begins or ends on them is not among them."""
    joined: list[list[int]] = []
    for start, end in sorted((own.data_ptr(), own.data_ptr() + own.nbytes) for own in tensors):
        if joined and start - joined[-1][1] < _PAGE:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    whole = [(-(-start // _PAGE) * _PAGE, end // _PAGE * _PAGE) for start, end in joined]
    return [(start, end - start) for start, end in whole if start < end]


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def _advise(spans: Iterable[Pages], advice: int) -> None:
    """Advice that the system refuses costs time only."""
    madvise = _madvise()  # opened once, since every layer asks for every token
    for address, length in spans:
        madvise(address, length, advice)
