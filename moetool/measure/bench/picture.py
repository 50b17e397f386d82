"""Chart of `moetool bench`: speed and memory of a model, beside the original's."""

from pathlib import Path

from moetool.measure.bench.result import BenchResult
from moetool.measure.plots import panels


def plot_bench(result: BenchResult, path: Path) -> None:
    """Speeds of prefill and decode by batch and length, and memory, of the model and of what it was timed against."""
    models = [result.model, *([] if result.against is None else [result.against])]
    speeds = {"Prefill": [[case.prefill_tokens_per_second for case in own.cases] for own in models]}
    if result.new_tokens:
        speeds["Decode"] = [[case.decode_tokens_per_second or 0.0 for case in own.cases] for own in models]
    with panels(path, (5 * (len(speeds) + 1), 4.5), columns=len(speeds) + 1) as (axes,):
        labels = [f"{case.batch} × {case.length}" for case in result.model.cases]
        charts = [(f"{name}, tokens per second", labels, "batch × prompt", values) for name, values in speeds.items()]
        sizes = ["files", "weights", "most allocated", "and mapped"]
        memory = [
            [size / 1e9 for size in (held.file_bytes, held.weight_bytes, held.peak_bytes, held.unique_bytes)]
            for held in (own.memory for own in models)
        ]
        for axis, (title, ticks, below, values) in zip(axes, [*charts, ("Memory, GB", sizes, "", memory)], strict=True):
            width = 0.8 / len(models)
            for number, (own, heights) in enumerate(zip(models, values, strict=True)):
                places = [tick + number * width for tick in range(len(ticks))]
                axis.bar(places, heights, width, label=Path(own.model).name)
            middle = width * (len(models) - 1) / 2
            axis.set_xticks([tick + middle for tick in range(len(ticks))], ticks)
            axis.set(title=title, xlabel=below)
        axes[0].legend()
