"""Names of the files that make up a checkpoint."""

import re

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "moetool.json"
COSTS = "moetool/costs.json"
CARD = "README.md"
ADAPTER = "adapter_config.json"  # of peft

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
WEIGHTS = (*PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite")
UNFINISHED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.tmp)?")
