"""How many calibration windows go through a layer at a time."""

TOKENS_PER_BATCH = 1024


def batch_size(windows: int, length: int) -> int:
    """Windows of `length` tokens per batch: enough to keep the cores busy, few enough to be small beside a layer."""
    return max(1, min(windows, TOKENS_PER_BATCH // length))
