"""What models that are published in few bits take to compress, by plans from their configs alone.

    python scripts/benchmarks/stored_sizes.py [--models gpt-oss-120b …] [--output FILE.md]

Nothing is downloaded or compressed: each config is planned as `compress --method quantize --dry-run` plans it, once
more with `--no-keep-stored`. The configs are written down here. Sizes are the defaults of transformers' classes, which
are those of the published models. What differs from these, and `quantization_config`, is from memory. Kimi-K2 has the
layers of DeepSeek-V3. Layers that predict further tokens, which transformers does not have, and towers of other
modalities are left out.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from _common import made_by, publish

from moetool.checkpoint.sizes import format_bytes
from moetool.job.planning import plan_stage
from moetool.stages import stages

JOBS = ((4, True), (3, True), (4, False))  # bits, and whether what is not compressed keeps those of the source
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
CONFIGS: dict[str, Mapping[str, object]] = {
    "deepseek-v3.2": {"model_type": "deepseek_v32", "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
    "kimi-k2-thinking": {
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "quantization_config": KIMI,
    },
    "gpt-oss-120b": {"model_type": "gpt_oss", "quantization_config": MXFP4},
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text"},
    "glm-5": {"model_type": "glm_moe_dsa"},
    "glm-5-fp8": {"model_type": "glm_moe_dsa", "quantization_config": FP8},
}


def row(name: str) -> str:
    """What a plan says of a model for each of the jobs, and the time that it took to say so."""
    kind, plans, began = stages()["quantize"], [], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps({**CONFIGS[name], "dtype": "bfloat16"}))
        for bits, keeps in JOBS:
            options = kind.options_type(bits=bits, keep_stored=keeps, calibration=None)
            plans.append(plan_stage(kind, directory, options))
    seconds = (time.monotonic() - began) / len(JOBS)
    stored = plans[0].input_bytes
    decoded = plans[0].details.get("decoded_bytes", stored)
    method = CONFIGS[name].get("quantization_config", {"quant_method": "bf16"})["quant_method"]  # type: ignore[index]
    results = [f"{format_bytes(plan.output_bytes)} ({1 - plan.output_bytes / stored:+.0%})" for plan in plans]
    sizes = [format_bytes(stored), format_bytes(int(str(decoded))), *results, format_bytes(plans[0].memory_bytes)]
    return f"| {name} | {method} | {' | '.join(sizes)} | {seconds:.1f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [
        made_by("python scripts/benchmarks/stored_sizes.py"),
        "In brackets what is saved of the stored bytes. Memory is that of the first 4-bit job.",
        "",
        "| model | stored as | stored | in bf16 | 4 bits | 3 bits | 4 bits, rest bf16 | peak memory | a plan takes |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(row, options.models),
    ]
    publish(lines, options.output)


if __name__ == "__main__":
    main()
