"""gpt-oss, refused."""

from moetool.architectures.base import Unsupported

UNSUPPORTED = Unsupported(
    name="gpt-oss",
    model_types=("gpt_oss",),
    reason="its experts are published in MXFP4 (4.25 bits per number), which low-rank deltas in 16 bits cannot "
    "beat, and have biases and interleaved gate and up rows",
)
