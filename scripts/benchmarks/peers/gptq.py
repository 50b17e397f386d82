"""GPTQ, GPTAQ or FOEM by GPTQModel on the experts of a model; run by peers.py in an environment that has GPTQModel.

    python gptq.py MODEL WINDOWS.safetensors OUTPUT --bits 2 --group-size 128 [--peer gptaq]

WINDOWS holds `windows`, int64 [windows, length]; OUTPUT becomes a checkpoint in GPTQ's format, attention as it was.
"""

import argparse
import os

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it refuses machines of one or two cores otherwise

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("windows")
    parser.add_argument("output")
    parser.add_argument("--peer", choices=("gptq", "gptaq", "foem"), default="gptq")
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    options = parser.parse_args()
    more = {} if options.peer == "gptq" else {options.peer: {}}  # at that method's defaults
    settings = QuantizeConfig(
        bits=options.bits, group_size=options.group_size, sym=True, dynamic={"-:.*self_attn.*": {}}, **more
    )
    model = GPTQModel.load(options.model, settings, device="cpu")
    windows = load_file(options.windows)["windows"].split(1)
    model.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in windows], batch_size=1)
    model.save(options.output)


if __name__ == "__main__":
    main()
