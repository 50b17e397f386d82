"""The plug-in in vLLM itself, where it is installed: `make test-vllm`. On a processor, in fp32, beside transformers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load
from families import build
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="wants vLLM, in an environment of its own")

TOKENS, NEW = 40, 8
METHODS: dict[str, tuple[object, ...]] = {
    "original": (),
    "d2moe": ("--method", "d2moe", "--ratio", 0.3, "--prune-base", 0.2),
    "hybrid": ("--method", "hybrid", "--ratio", 0.5, "--group-size", 16, "--base-bits", "nf4"),
    "quantize": ("--method", "quantize", "--bits", 3, "--group-size", 16, "--rotate"),
    "ders": ("--method", "ders-quantize", "--bits", 5, "--shared-expert"),
    "included": ("--method", "quantize", "--bits", 6, "--group-size", 16, "--include", "attention,embeddings:5"),
}
SIZES = {"vocab_size": 320, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 96, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen2_moe": {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "mlp_only_layers": []},
    "glm4_moe": {"moe_intermediate_size": 96, "num_nextn_predict_layers": 0},
    "gpt_oss": {"intermediate_size": 96, "num_local_experts": 6, "sliding_window": 16},
    "granitemoe": {"intermediate_size": 96},
}
# Family, method, and processes that share the experts.
CASES: list[tuple[str, str, int]] = [
    *((family, method, 1) for family in ("mixtral", "qwen3_moe") for method in METHODS if method != "ders"),
    *(("glm4_moe", "ders", 1), ("qwen2_moe", "ders", 1), ("qwen2_moe", "ders", 2)),
    *(("gpt_oss", "d2moe", 1), ("gpt_oss", "hybrid", 1), ("gpt_oss", "quantize", 1), ("gpt_oss", "quantize", 2)),
    *(("granitemoe", "hybrid", 1), ("mixtral", "hybrid", 2)),
]
# Prints the log-probabilities of all tokens after the first, and the likeliest that follow.
SERVED = """
import json, sys
from vllm import LLM, SamplingParams
path, ids, new, processes = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[5])
few = {"enforce_eager": True, "max_model_len": len(ids) + new, "max_num_seqs": 1, "load_format": sys.argv[4]}
several = {"tensor_parallel_size": processes, "enable_expert_parallel": processes > 1}
model = LLM(model=path, dtype="float32", **few, **several)
asked = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, prompt_logprobs=0)
[answer] = model.generate({"prompt_token_ids": ids}, asked, use_tqdm=False)
known = [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], ids[1:])]
print(json.dumps([known, list(answer.outputs[0].token_ids)]))
"""


@pytest.fixture(scope="module")
def compressed(
    run_cli: Any, tiny_tokenizer: PreTrainedTokenizerFast, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """`compressed(family, method)`: a small random model, as `compress` makes it smaller."""
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 8, "--sequence-length", 32)

    def make(family: str, method: str) -> Path:
        source = tmp_path_factory.mktemp(family) / "in"
        build(family, **SIZES, **FAMILIES[family]).save_pretrained(source)
        tiny_tokenizer.save_pretrained(source)
        if method == "original":
            return source
        result = run_cli("compress", source, source.parent / "out", *METHODS[method], *text)
        assert result.code == 0, result.stderr
        return source.parent / "out"

    return make


@pytest.mark.parametrize(("family", "method", "processes"), CASES)
def test_predictions_are_those_of_transformers(
    compressed: Callable[[str, str], Path], family: str, method: str, processes: int
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:processes]
    if len(cores) < processes:
        pytest.skip("vLLM gives every process a core of its own")
    path = compressed(family, method)
    is_vllms = family in ("mixtral", "qwen3_moe") and method != "included" and processes == 1
    ids = torch.randint(320, (TOKENS,), generator=torch.Generator().manual_seed(0))
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    if processes > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    words = [str(path), json.dumps(ids.tolist()), str(NEW), "auto" if is_vllms else "moetool", str(processes)]
    told = subprocess.run(
        [sys.executable, "-c", SERVED, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert told.returncode == 0, told.stderr[-3000:]
    [answer] = [line for line in told.stdout.splitlines() if line.startswith("[[")]  # processes write lines, too
    found, said = json.loads(answer)
    model = load(path).float()
    model.generation_config.eos_token_id = None  # which transformers would otherwise forbid, and vLLM ignore
    with torch.no_grad():
        known = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        given = {"inputs": ids[None], "attention_mask": torch.ones_like(ids[None])}
        new = model.generate(**given, max_new_tokens=NEW, do_sample=False)[0, TOKENS:]
    torch.testing.assert_close(torch.tensor(found), known.float(), rtol=0, atol=1e-4)
    assert said == new.tolist()
