"""HQQ and bitsandbytes' NF4 on the experts of a model; run by peers.py in an environment that has both.

    python by_matrix.py MATRICES.safetensors OUTPUT.safetensors --peer hqq --bits 2 --group-size 64

MATRICES holds the experts' matrices, any floating [out, in]; OUTPUT gets each, dequantized, in fp32 under its name.
Neither takes a text.
"""

import argparse

import torch
from safetensors.torch import load_file, save_file


def hqq(matrix: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(
        matrix, nbits=bits, group_size=group, axis=1, device="cpu", compute_dtype=torch.float32
    )
    return Quantizer.dequantize(codes, meta)


def nf4(matrix: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    import bitsandbytes.functional as functional

    if bits != 4:
        raise SystemExit("NF4 has 4 bits")
    codes, state = functional.quantize_4bit(matrix, quant_type="nf4", blocksize=group)
    return functional.dequantize_4bit(codes, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("matrices")
    parser.add_argument("output")
    parser.add_argument("--peer", choices=("hqq", "nf4"), required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    options = parser.parse_args()
    run = {"hqq": hqq, "nf4": nf4}[options.peer]
    matrices = load_file(options.matrices)
    found = {name: run(matrix.float(), options.bits, options.group_size) for name, matrix in matrices.items()}
    save_file({name: matrix.float().contiguous() for name, matrix in found.items()}, options.output)


if __name__ == "__main__":
    main()
