"""AutoRound's own GGUF file of a dense model; run in an environment that has auto-round and gguf, and no moetool.

    python autoround_gguf.py MODEL WINDOWS.safetensors OUTPUT --scheme Q2_K_S [--iterations 200]

WINDOWS holds `windows`, int64 [windows, length]; the file lies below OUTPUT. `gguf_codes.py --files` measures it. As of
0.16.1 its export knows tokenizers by their names only, and no experts of the name that transformers gives Mixtral's.
"""

import argparse

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("windows")
    parser.add_argument("output")
    parser.add_argument("--scheme", required=True, help="such as Q2_K_S or Q4_K_M")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    windows = load_file(options.windows)["windows"]
    rounding = AutoRound(
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(options.model),
        scheme=f"GGUF:{options.scheme}",
        iters=options.iterations,
        dataset=list(windows.split(1)),
        nsamples=len(windows),
        seqlen=windows.shape[1],
        device_map="cpu",
        enable_torch_compile=False,
        seed=options.seed,
    )
    rounding.quantize_and_save(output_dir=options.output, format=f"gguf:{options.scheme.lower()}")


if __name__ == "__main__":
    main()
