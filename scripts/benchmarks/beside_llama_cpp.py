"""Speed of a random Mixtral of .37 B parameters: transformers, moetool's own format, and llama.cpp.

    python scripts/benchmarks/beside_llama_cpp.py --work DIR [--model DIR] [--threads 2] [--rounds 5] [--output FILE.md]

Wants `llama-cpp-python`, which compiles llama.cpp from its source package, and moetool[gguf]. The weights are random:
what a format loses is not the question here (`doors.py` has that); `--model` names another one, in bf16. A prompt of
512 tokens, then 64 that follow one by one. All models are in memory together and take turns; the best of all rounds
counts, since whatever else the machine does only takes time.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data import topics

import torch
from _common import made_by, publish
from export_gguf import Llama, quantized
from transformers import AutoModelForCausalLM, MixtralConfig

import moetool  # noqa: F401  (makes transformers load its checkpoints)
from moetool.checkpoint.reader import Checkpoint
from moetool.format.gguf.words import MODEL
from moetool.job.execute import run_stage
from moetool.quiet import quiet
from moetool.runtime.cache_name import CACHE, cache_of
from moetool.stages import stages

sys.path.append(str(Path(__file__).parents[1]))
from train_small import tokenizer_for

PROMPT, NEW, VOCABULARY = 512, 64, 4096
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 1024, 3584, 8, 2, 4
TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS", "Q2_K")  # of llama.cpp
OWN: Mapping[str, tuple[str, dict[str, object]]] = {
    "`quantize`, 4 bits": ("quantize", {"bits": 4}),
    "`quantize`, 4 bits, `--include attention,embeddings`": (
        "quantize",
        {"bits": 4, "include": ("attention", "embeddings")},
    ),
    "`ders-quantize`, 2 bits on a base in 4": ("ders-quantize", {"bits": 2, "base_bits": "4"}),
    "`quantize`, 2 bits": ("quantize", {"bits": 2}),
}
Round = Callable[[], tuple[float, float]]  # seconds of the prompt, and of the tokens that follow


def make_random(path: Path) -> Path:
    if not (path / "config.json").exists():
        config = MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
            num_attention_heads=HIDDEN // 64, num_key_value_heads=HIDDEN // 256, num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K, max_position_embeddings=4096,
        )  # fmt: skip
        torch.manual_seed(0)
        tokenizer_for(Path(topics.__file__).read_text(), encoder=False).save_pretrained(path)
        with quiet():
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def made(model: Path, target: Path, stage: str, given: Mapping[str, object]) -> Path:
    """The model after a stage."""
    if not target.exists():
        kind = stages()[stage]
        run_stage(kind, model, target, kind.options_type(**given))
    return target


def in_transformers(path: Path, ids: list[int]) -> Round:
    model, tokens = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval(), torch.tensor([ids])

    @torch.inference_mode()
    def run() -> tuple[float, float]:
        start = time.perf_counter()
        cache = cache_of(model(tokens[:, :PROMPT], use_cache=True, logits_to_keep=1))
        between = time.perf_counter()
        for place in range(PROMPT, PROMPT + NEW):
            model(tokens[:, place : place + 1], **{CACHE: cache}, use_cache=True)
        return between - start, time.perf_counter() - between

    return run


def in_llama_cpp(file: Path, ids: list[int], threads: int) -> Round:
    model = Llama(str(file), n_ctx=PROMPT + NEW, n_batch=PROMPT, n_ubatch=PROMPT, verbose=False, n_threads=threads,
                  n_threads_batch=threads)  # fmt: skip

    def run() -> tuple[float, float]:
        model.reset()
        start = time.perf_counter()
        model.eval(ids[:PROMPT])
        between = time.perf_counter()
        for token in ids[PROMPT:]:
            model.eval([token])
        return between - start, time.perf_counter() - between

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where models are written, and kept")
    parser.add_argument("--model", type=Path, help="instead of the random one")
    parser.add_argument("--types", nargs="+", default=TYPES, help="of llama.cpp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    ids = torch.randint(VOCABULARY, (PROMPT + NEW,), generator=torch.Generator().manual_seed(0)).tolist()
    original = options.model or make_random(options.work / "original")
    plain = made(original, options.work / "bf16", "gguf", {"type": "bf16"}) / MODEL
    runs: dict[str, tuple[int, Round]] = {
        "transformers, bf16": (Checkpoint.open(original).weight_bytes, in_transformers(original, ids))
    }
    for number, (name, (method, given)) in enumerate(OWN.items()):
        path = made(original, options.work / f"own-{number}", method, {**given, "calibration": "none"})
        runs[f"moetool, {name}"] = Checkpoint.open(path).weight_bytes, in_transformers(path, ids)
    for number in options.types:
        file = options.work / f"{number}.gguf"
        if not file.exists():
            file.write_bytes(plain.read_bytes())
            if number != "BF16":
                quantized(file, number)
        runs[f"llama.cpp, {number}"] = file.stat().st_size, in_llama_cpp(file, ids, options.threads)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(options.rounds + 1):  # the first warms up, and counts as any other: the best counts
        for name, (_, run) in runs.items():
            prompt, following = run()
            before = best.get(name, (prompt, following))
            best[name] = min(prompt, before[0]), min(following, before[1])
    lines = [
        f"{made_by('python scripts/benchmarks/beside_llama_cpp.py --work DIR')} {options.threads} threads; "
        f"prompt of {PROMPT} tokens, then {NEW} one by one, best of {options.rounds + 1} rounds in turns.",
        "",
        "| | MB | prompt, tokens/s | then, tokens/s | ms per token |",
        "|---|---|---|---|---|",
    ]
    for name, (size, _) in runs.items():
        prompt, following = best[name]
        cells = [name, f"{size / 1e6:.0f}", f"{PROMPT / prompt:.0f}", f"{NEW / following:.0f}"]
        lines.append(f"| {' | '.join(cells)} | {1e3 * following / NEW:.2f} |")
    publish(lines, options.output)


if __name__ == "__main__":
    main()
