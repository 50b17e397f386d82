"""A pruned base: by default nothing depends on the batch; with semi-dynamic pruning results do, and that is said."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, load, relative_error
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetool.runtime.cache_name import CACHE, cache_of
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT

PRUNED = ("--ratio", 0.35, "--prune-base", 0.5)
SEMI_DYNAMIC = (*PRUNED, "--pruning", "semi-dynamic")
EXACT = 1e-12  # fp64; what is left is the order of sums


@pytest.fixture
def static(compress: Any, tiny_mixtral: Path) -> Any:
    return compress(tiny_mixtral, *PRUNED)


@pytest.fixture
def semi_dynamic(compress: Any, tiny_mixtral: Path) -> Any:
    return compress(tiny_mixtral, *SEMI_DYNAMIC)


@pytest.fixture(scope="module")
def prompts(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[1000:1096].view(3, 32)


@torch.no_grad()
def errors(path: Path, prompts: Tensor) -> dict[str, float]:
    """How much the logits of 16 tokens change with what should not matter to them."""
    model = load(path, dtype=torch.float64)
    prefix = prompts[:1, :16]
    alone = model(prefix).logits
    padded = torch.nn.functional.pad(prefix, (0, 16))
    mask = (torch.arange(32) < 16).long()[None]
    step, steps = model(prefix[:, :8], use_cache=True), []
    steps.append(step.logits)
    for token in prefix[0, 8:]:
        step = model(token.view(1, 1), **{CACHE: cache_of(step)})
        steps.append(step.logits)
    others = {
        "later tokens": model(prompts[:1]).logits[:, :16],
        "other rows": model(prompts[:, :16]).logits[:1],
        "padding": model(padded, attention_mask=mask).logits[:, :16],
        "a cache": torch.cat(steps, 1),
    }
    return {name: relative_error(other, alone) for name, other in others.items()}


def test_by_default_nothing_else_in_the_batch_matters(static: Any, prompts: Tensor) -> None:
    layers = config_of(static.path)["quantization_config"]["layers"].values()
    assert [layer["base_channels"] for layer in layers] == [24] * 3, "all of it left the file"
    assert max(errors(static.path, prompts).values()) < EXACT


def test_with_semi_dynamic_pruning_all_of_it_matters(semi_dynamic: Any, prompts: Tensor) -> None:
    assert min(errors(semi_dynamic.path, prompts).values()) > 1e-3


def said(text: str) -> bool:
    return BATCH_DEPENDENT in " ".join(text.split())


def test_prune_base_is_static_too(run_cli: Any, compress: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    source = compress(tiny_mixtral, "--ratio", 0.3).path
    for name, options, static, dynamic in (("a", (), 4, 0), ("b", ("--pruning", "semi-dynamic"), 2, 2)):
        made = run_cli("prune-base", source, tmp_path / name, "--json", *options)  # a tenth of 48
        assert made.code == 0, made.stderr
        assert (made.json["static_channels"], made.json["dynamic_channels"]) == (static, dynamic)
        assert made.json["depends_on_batch"] is (dynamic > 0)
        assert said(made.stderr) == (dynamic > 0)
        assert run_cli("inspect", tmp_path / name, "--json").json["depends_on_batch"] is (dynamic > 0)


def test_less_than_a_channel_is_no_pruning(run_cli: Any, decomposed: Path, tmp_path: Path) -> None:
    refused = run_cli("prune-base", decomposed, tmp_path / "out", "--ratio", 0.02)
    assert refused.code == 2
    assert "0.02 of 48 channels is not one" in refused.stderr


def test_who_makes_such_a_model_is_told(static: Any, semi_dynamic: Any) -> None:
    assert said(semi_dynamic.log)
    assert semi_dynamic.told["depends_on_batch"] is True
    assert not said(static.log)
    assert static.told["depends_on_batch"] is False


def test_inspect_says_it(run_cli: Any, static: Any, semi_dynamic: Any) -> None:
    assert run_cli("inspect", semi_dynamic.path, "--json").json["depends_on_batch"] is True
    assert run_cli("inspect", static.path, "--json").json["depends_on_batch"] is False
    assert said(run_cli("inspect", semi_dynamic.path).stdout)
    assert not said(run_cli("inspect", static.path).stdout)


def test_eval_says_it(run_cli: Any, static: Any, semi_dynamic: Any, tiny_text: Path) -> None:
    def evaluate(made: Any, batch: int, *options: object) -> Any:
        sizes = ("--sequence-length", 32, "--windows", 6, "--batch-tokens", batch)
        return run_cli("eval", made.path, "--data", tiny_text, *sizes, *options)

    one, many = (evaluate(static, batch, "--json").json for batch in (32, 96))
    assert (one["batch_rows"], many["batch_rows"]) == (1, 3)
    assert not one["depends_on_batch"]
    assert many["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert not said(evaluate(static, 96).stdout)
    one, many = (evaluate(semi_dynamic, batch, "--json").json for batch in (32, 96))
    assert one["depends_on_batch"]
    assert many["nll"] != pytest.approx(one["nll"], rel=1e-4)
    text = evaluate(semi_dynamic, 96).stdout
    assert said(text)
    assert "3 windows" in text
    dense = evaluate(semi_dynamic, 32, "--synthesize", "load", "--json").json
    assert not dense["depends_on_batch"], "dynamic pruning has no dense form"


def test_tune_says_it(run_cli: Any, static: Any, semi_dynamic: Any, tiny_text: Path, tmp_path: Path) -> None:
    for made, says in ((static, False), (semi_dynamic, True)):
        arguments = ("--data", tiny_text, "--sequence-length", 16, "--steps", 1, "--batch-size", 2)
        result = run_cli("tune", made.path, tmp_path / str(says), *arguments)
        assert result.code == 0, result.stderr
        assert said(result.stderr) is says


def test_routing_says_it(run_cli: Any, static: Any, semi_dynamic: Any, tiny_text: Path) -> None:
    for made, depends in ((static, False), (semi_dynamic, True)):
        options = ("--data", tiny_text, "--sequence-length", 32, "--windows", 2)
        assert run_cli("routing", made.path, *options, "--json").json["depends_on_batch"] is depends
        assert said(run_cli("routing", made.path, *options).stdout) is depends


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What transformers' own logger says in the meantime."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Keep(logging.WARNING)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_loading_warns_once(static: Any, semi_dynamic: Any, warned: list[str]) -> None:
    AutoModelForCausalLM.from_pretrained(static.path)
    assert BATCH_DEPENDENT not in warned
    AutoModelForCausalLM.from_pretrained(semi_dynamic.path)
    assert [text for text in warned if text == BATCH_DEPENDENT] == [BATCH_DEPENDENT]


@pytest.mark.parametrize("preset", ["d2moe-20-performance", "d2moe-20-throughput"])
def test_the_papers_settings_ask_for_it(
    run_cli: Any, tiny_mixtral: Path, calibration: Any, tmp_path: Path, preset: str
) -> None:
    made = run_cli("compress", tiny_mixtral, tmp_path / "made", "--preset", preset, *calibration, "--json")
    assert made.code == 0, made.stderr
    total = int(48 * {"d2moe-20-performance": 0.1, "d2moe-20-throughput": 0.6}[preset])
    for layer in config_of(tmp_path / "made")["quantization_config"]["layers"].values():
        assert (layer["base_channels"], layer["dynamic_channels"]) == (48 - total // 2, total - total // 2)
