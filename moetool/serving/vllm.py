"""Plug-in of vLLM: the entry point `moetool` of the group `vllm.general_plugins`.

vLLM calls it in every process before it reads a model's config. Nothing here is imported before, and nothing of vLLM is
unless vLLM itself calls.
"""


def register() -> None:
    """Make vLLM know checkpoints whose `quant_method` is `moetool`, and their loader. Safe to call twice."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from moetool.format.marker import METHOD

    if METHOD not in QUANTIZATION_METHODS:
        from moetool.serving.vllm_layers import MoetoolServing
        from moetool.serving.vllm_loader import MoetoolLoader

        register_model_loader(METHOD)(MoetoolLoader)
        register_quantization_config(METHOD)(MoetoolServing)
