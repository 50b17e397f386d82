"""Granite-MoE with a shared expert, which lies beside the MoE block (`shared_mlp`) and may be absent."""

from dataclasses import replace

from moetool.architectures import granitemoe

ARCHITECTURE = replace(
    granitemoe.ARCHITECTURE,
    name="Granite-MoE-Shared",
    model_types=("granitemoeshared",),
    reference="https://huggingface.co/ibm-research/moe-7b-1b-active-shared-experts",
    shared_expert_module="shared_mlp",
    shared_expert=granitemoe.ARCHITECTURE.weights,
)
