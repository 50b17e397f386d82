"""MiniMax-M2: 256 experts, top-8, sigmoid scores with a correction bias."""

from moetool.architectures.base import NUMBERED, Architecture

ARCHITECTURE = Architecture(
    name="MiniMax-M2",
    model_types=("minimax_m2",),
    reference="https://huggingface.co/MiniMaxAI/MiniMax-M2",
    block="block_sparse_moe",
    weights=NUMBERED,
    experts_key="num_local_experts",
    intermediate_key="intermediate_size",
    router_rule="sigmoid, top-k by corrected scores, renormalized to sum 1",
    router_options={"scoring_func": ("sigmoid",), "shared_intermediate_size": (0,)},
    router_others=("block_sparse_moe.e_score_correction_bias",),
)
