"""What a run tells: from known seconds, and of real models."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from kinds import save_kind

from moetool.checkpoint.sizes import format_bytes
from moetool.errors import ResourceError, UsageError
from moetool.measure.bench import benchmark
from moetool.measure.bench.benchmark import bench
from moetool.measure.bench.options import BenchOptions
from moetool.measure.bench.picture import plot_bench
from moetool.measure.bench.runner import HereRunner
from moetool.runtime.timing import Seconds

OPTIONS = BenchOptions(batch=(1, 3), lengths=(8,), new_tokens=4, rounds=2)


class Given(HereRunner):
    """Takes r + 1 seconds for a prompt in round r and twice as long after it, the compressed model four times that."""

    order: ClassVar[list[str]] = []

    def __init__(self, path: str, options: BenchOptions, threads: int) -> None:
        super().__init__(path, options)
        self._path, self._round = path, -1

    def time(self, batch: int, length: int) -> Seconds:
        Given.order.append(self._path)
        self._round += 1
        slow = 4 if self._path.endswith("compressed") else 1
        number = self._round % 4  # of a case, the first to warm up
        return Seconds(slow * (number + 1), slow * 2 * (number + 1))

    def close(self) -> None: ...


@pytest.fixture
def compressed(tmp_path: Path) -> str:
    return str(save_kind("low-rank", tmp_path / "compressed"))


def test_medians_and_ratios(monkeypatch: pytest.MonkeyPatch, compressed: str, tiny_mixtral: Path) -> None:
    monkeypatch.setattr(benchmark, "ThereRunner", Given)
    monkeypatch.setattr(benchmark, "copy_bandwidth", lambda device: 1e6)
    monkeypatch.setattr(Given, "order", [])
    options = OPTIONS.model_copy(update={"against": str(tiny_mixtral), "rounds": 3})
    result = bench(compressed, options)
    one, other = compressed, str(tiny_mixtral)
    assert Given.order == [one, other, other, one, one, other, other, one] * 2, "in turns, and each goes first"
    assert result.against is not None
    assert result.ratios is not None
    case = result.against.cases[1]
    # Rounds of 2, 3 and 4 seconds.
    assert (case.prefill_seconds, case.decode_seconds) == (3, 6)
    assert case.prefill_tokens_per_second == 3 * 8 / 3
    assert case.decode_tokens_per_second == 3 * 4 / 6
    assert case.tokens_per_second == pytest.approx(3 * 4 / 9)
    assert case.bandwidth_share is None, "which experts three tokens share is not known"
    assert result.copy_bytes_per_second == 1e6
    alone, cached = result.against.cases[0], 3 * 2 * 2 * 8 * 4  # bytes of a token in the cache of 3 layers
    read = 4 * (alone.bytes_per_token or 0) + (0 + 1 + 2 + 3) * cached
    assert alone.bandwidth_share == pytest.approx(read / 6 / 1e6)
    ratios = result.ratios.cases[1]
    assert ratios.prefill_tokens_per_second == ratios.decode_tokens_per_second == ratios.tokens_per_second == 0.25
    assert ratios.flops == result.model.cases[1].flops / case.flops < 1
    assert result.ratios.file_bytes == result.model.memory.file_bytes / result.against.memory.file_bytes
    assert result.ratios.parameters < 1


def test_flops_are_those_of_all_tokens(tiny_mixtral: Path) -> None:
    """Of 3 prompts of 8 tokens and 4 new ones each: by hand, as in test_costs.py."""
    [_, case] = bench(str(tiny_mixtral), OPTIONS).model.cases
    each, head, seen = 3 * (3 * 32 * 32 + 4 * 32 + 6 * 32 * 48), 288 * 32, 3 * 4 * (8 + 8)
    assert case.flops_per_token == 2 * (each + head + 9 * seen)
    assert case.flops == 3 * 2 * (12 * each + 5 * head + seen * sum(range(1, 13)))


@pytest.mark.parametrize("kind", ["low-rank", "quantised", "mixture", "adapters", "masks-pruned", "neurons-mlp"])
def test_every_number_is_one(kind: str, tmp_path: Path) -> None:
    result = bench(str(save_kind(kind, tmp_path / kind)), OPTIONS)
    [first, second] = result.model.cases
    assert second.bandwidth_share is None
    told = [value for case in (first, second) for value in vars(case).values() if value is not None]
    assert len(told) == 21
    assert all(math.isfinite(value) and value > 0 for value in told)
    assert (first.batch, second.batch) == (1, 3)
    # Several prompts have masks of their own, so that no new token's can be folded; of each linear layer of
    # this gpt_neox 12 channels are open, and its 3 layers have 32 · 3 + 32 + 64 + 32 outputs each.
    unfolded = 3 * OPTIONS.new_tokens * 2 * 12 * 3 * (32 * 3 + 32 + 64 + 32) if kind == "masks-pruned" else 0
    assert first.flops * 3 + unfolded == second.flops
    assert first.bytes_per_token == second.bytes_per_token
    assert result.model.memory.weight_bytes > 100_000
    assert result.to_json().keys() == {"device", "threads", "copy_bytes_per_second", "rounds", "new_tokens", "model"}
    assert json.loads(json.dumps(result.to_json())) == result.to_json()


def test_keep_changes_what_a_moefied_model_computes(tmp_path: Path) -> None:
    path = str(save_kind("neurons-mlp", tmp_path / "moefied"))
    half, all_ = (bench(path, OPTIONS.model_copy(update={"keep": keep})).model.cases[0].flops for keep in (0.5, 1.0))
    assert half < all_


def test_synthesized_experts_are_counted_as_they_are(tmp_path: Path, tiny_mixtral: Path) -> None:
    path = str(save_kind("quantised", tmp_path / "quantised"))
    dense = bench(path, OPTIONS.model_copy(update={"synthesize": "load"})).model
    flying = bench(path, OPTIONS.model_copy(update={"synthesize": "on-the-fly"})).model
    native = bench(str(tiny_mixtral), OPTIONS).model
    assert (dense.synthesized, flying.synthesized) == (True, False)
    assert dense.cases[0].flops == native.cases[0].flops < flying.cases[0].flops
    assert dense.memory.weight_bytes == native.memory.weight_bytes > flying.memory.weight_bytes


def test_an_encoder_does_not_generate(tmp_path: Path) -> None:
    path = str(save_kind("neurons-encoder", tmp_path / "encoder"))
    with pytest.raises(UsageError, match=r"is an encoder \(bert\): it generates nothing. --new-tokens 0"):
        bench(path, OPTIONS)
    [case, _] = bench(path, OPTIONS.model_copy(update={"new_tokens": 0})).model.cases
    assert case.prefill_seconds > 0
    assert case.decode_seconds is case.flops_per_token is case.bytes_per_token is None


def test_memory_is_asked_for_before_loading(monkeypatch: pytest.MonkeyPatch, tiny_mixtral: Path) -> None:
    free: Any = type("Free", (), {"available": 300_000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    needed = 4 * (3 * (3 * 32 * 32 + 4 * 32 + 4 * 3 * 32 * 48 + 2 * 32) + 2 * 288 * 32 + 32)
    with pytest.raises(
        ResourceError, match=f"Weights take {format_bytes(needed)} for .*, and 300.0 kB of memory are free"
    ):
        bench(str(tiny_mixtral), OPTIONS)
    with pytest.raises(ResourceError, match="Without --against one is loaded at a time"):
        bench(str(tiny_mixtral), OPTIONS.model_copy(update={"against": str(tiny_mixtral)}))
    free.available = 10 * 300_000
    result = bench(str(tiny_mixtral), OPTIONS)
    assert result.model.cases
    assert result.copy_bytes_per_second is None, "no room for what is copied"


def test_picture(tmp_path: Path, tiny_mixtral: Path) -> None:
    result = bench(str(tiny_mixtral), OPTIONS)
    plot_bench(result, tmp_path / "bench.svg")
    picture = (tmp_path / "bench.svg").read_text()
    assert picture.count("<svg") == 1
    plot_bench(bench(str(tiny_mixtral), OPTIONS.model_copy(update={"new_tokens": 0})), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000
