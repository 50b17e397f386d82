"""AutoRound on the experts of a model; run by peers.py in an environment that has auto-round and no moetool.

    python autoround.py MODEL WINDOWS.safetensors OUTPUT.safetensors --bits 2 --group-size 128
        [--iterations 200 | --best]

WINDOWS holds `windows`, int64 [windows, length]; OUTPUT gets the dequantized matrix of every expert as
`{layer}.{expert}.gate`, `up` and `down`, fp32 [out, in]. --best takes what AutoRound's own tables call its best for few
bits: 1,000 iterations, a learning rate of 2e-3 and its extended algorithm.
"""

import argparse
import re

import torch
from auto_round import AutoRound
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(gate|up|down|gate_up)_proj$")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("windows")
    parser.add_argument("output")
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    windows = load_file(options.windows)["windows"]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    others = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    best = {"lr": 2e-3, "enable_alg_ext": True} if options.best else {}
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(options.model),
        bits=options.bits,
        group_size=options.group_size,
        sym=True,
        iters=1000 if options.best else options.iterations,
        dataset=list(windows.split(1)),
        nsamples=len(windows),
        seqlen=windows.shape[1],
        layer_config={name: {"bits": 16} for name in others},
        device_map="cpu",
        enable_torch_compile=False,
        seed=options.seed,
        **best,
    )
    quantized, layers = rounding.quantize()
    found = {}
    for name, module in quantized.named_modules():
        if not (place := _EXPERT.search(name)):
            continue
        chosen = layers[name]
        if (chosen["bits"], chosen["group_size"], chosen["sym"]) != (options.bits, options.group_size, True):
            raise SystemExit(f"{name} was quantized otherwise: {chosen}")
        layer, expert, role = place.groups()
        weight = module.weight.detach().float()
        parts = zip(("gate", "up"), weight.chunk(2), strict=True) if role == "gate_up" else [(role, weight)]
        found |= {f"{layer}.{expert}.{part}": matrix.clone().contiguous() for part, matrix in parts}
    save_file(found, options.output)


if __name__ == "__main__":
    main()
