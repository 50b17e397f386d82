"""Results of `moetool bench` (docs/json.md). Ratios are to the original, whose own are 1."""

from dataclasses import dataclass

from moetool.job.result import Inlined, Printed


@dataclass(frozen=True, kw_only=True)
class Case(Printed):
    """Speed and cost of one case: a batch of prompts of one length.

    Attributes:
        batch: prompts at a time.
        length: tokens of each.
        prefill_seconds: until all prompts are in the cache, the median.
        prefill_tokens_per_second: of the prompts.
        decode_seconds: for the new tokens of all prompts, the median.
        decode_tokens_per_second: new tokens, of the time they take.
        tokens_per_second: new tokens, of all the time, prompts included: the paper's throughput.
        flops: of all of it.
        flops_per_token: of the first new token.
        bytes_per_token: that it reads at batch 1, at least.
        bandwidth_share: bytes per second that decoding reads at least, over the copy bandwidth. At batch 1 only: which
            experts several tokens share is not known.
    """

    batch: int
    length: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float | None = None
    decode_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    flops: int
    flops_per_token: int | None = None
    bytes_per_token: int | None = None
    bandwidth_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Memory(Inlined):
    """Sizes of a model, in bytes, and of the process that runs it: how much it has grown since before it was loaded.

    Attributes:
        file_bytes: weight files, or the GGUF file.
        weight_bytes: parameters and buffers, once each.
        anonymous_bytes: what the process has allocated once it is loaded.
        unique_bytes: that and what it alone has mapped of files, weights among them, once it has run.
        load_peak_bytes: the most it had allocated while it loaded.
        peak_bytes: the most it had allocated, loading or running.
        device_bytes, device_peak_bytes: allocated on a card once it is loaded, and at most; 0 without one.
    """

    file_bytes: int
    weight_bytes: int
    anonymous_bytes: int
    unique_bytes: int
    load_peak_bytes: int
    peak_bytes: int
    device_bytes: int
    device_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Benched(Printed):
    """Memory and speed of one model.

    Attributes:
        model: as it was given.
        parameters: numbers in its files.
        dtype: in which it computes.
        synthesized: whether its experts were made dense when it was loaded.
        load_seconds: from its files, which the system may have in memory already, to a model.
        cases: by batch and length.
    """

    model: str
    parameters: int
    dtype: str
    synthesized: bool
    load_seconds: float
    memory: Memory
    cases: list[Case]


@dataclass(frozen=True, kw_only=True)
class CaseRatios(Printed):
    """A model's numbers over the original's for one `Case`; those of speeds are medians over single rounds."""

    batch: int
    length: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    flops: float
    flops_per_token: float | None = None
    bytes_per_token: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ratios(Printed):
    """Measurements of a model divided by those of the original; `None` where either is missing."""

    parameters: float
    load_seconds: float
    file_bytes: float
    weight_bytes: float
    anonymous_bytes: float | None = None
    unique_bytes: float | None = None
    load_peak_bytes: float | None = None
    peak_bytes: float | None = None
    device_bytes: float | None = None
    device_peak_bytes: float | None = None
    cases: list[CaseRatios]


@dataclass(frozen=True, kw_only=True)
class BenchResult(Printed):
    """Result of `moetool bench`.

    Attributes:
        device: with its name.
        threads: of the processor.
        copy_bytes_per_second: the device's copy bandwidth, bytes read and written together; `None` if the model is
            spread over several, or there was no memory to measure it.
        rounds: times that were taken of everything.
        new_tokens: after every prompt.
        model: what was measured.
        against: the original, if there was one, and
        ratios: of the model to it.
    """

    device: str
    threads: int
    copy_bytes_per_second: float | None = None
    rounds: int
    new_tokens: int
    model: Benched
    against: Benched | None = None
    ratios: Ratios | None = None
