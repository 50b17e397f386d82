"""What `--help` begins and ends with: the main options of each command, and an example.

A form of a command, such as `export --format gguf`, may have its own; its key is then "export gguf". Examples go on
with each other's results.
"""

from collections.abc import Mapping
from typing import TypeVar

FormValueT = TypeVar("FormValueT")

_TEXT = "--calibration text.txt"

EXAMPLES = {
    "upcycle": "upcycle mistralai/Mistral-7B-v0.1 mixture --experts 8 --top-k 2 --dry-run",
    "upcycle add-expert": f"upcycle mixture larger --method add-expert --source math-model {_TEXT}",
    "moefy": f"moefy mistralai/Mistral-7B-v0.1 sparser --keep 0.75 {_TEXT}",
    "tune": "tune mixture tuned --data instructions.jsonl --eval-data held-out.jsonl",
    "compress": f"compress mistralai/Mixtral-8x7B-v0.1 smaller --ratio 75% {_TEXT} --dry-run",
    "repair": f"repair smaller repaired --to mistralai/Mixtral-8x7B-v0.1 {_TEXT} --dry-run",
    "fisher-merge": f"fisher-merge mixture base {_TEXT}",
    "decompose": "decompose mixture parts --base base",
    "svd-compress": f"svd-compress parts smaller --ratio 0.4 {_TEXT}",
    "prune-base": "prune-base smaller pruned --ratio 0.2",
    "quantize-delta": f"quantize-delta parts coded --bits 2 {_TEXT}",
    "sparsify-delta": "sparsify-delta parts sparse --drop 0.9",
    "export": "export smaller for-any-engine",
    "export compressed-tensors": "export mistralai/Mixtral-8x7B-v0.1 for-vllm --format compressed-tensors --bits 4 "
    f"{_TEXT}",
    "export mlx": f"export mistralai/Mixtral-8x7B-v0.1 for-mlx --format mlx --size 24GB {_TEXT}",
    "export gguf": f"export mistralai/Mixtral-8x7B-v0.1 for-llama-cpp --format gguf --size 20GB {_TEXT}",
    "export dense": "export mixture one-expert --format dense --expert 0",
    "compress d2moe": f"compress mistralai/Mixtral-8x7B-v0.1 smaller --method d2moe --ratio 40% {_TEXT} --dry-run",
    "compress drop-experts": "compress mixture without --method drop-experts --drop 3,5 --dry-run",
    "eval": "eval smaller --data held-out.txt --against mistralai/Mixtral-8x7B-v0.1",
    "compare": f"compare mixture --methods d2moe,hybrid --ratios 0.4,0.75 {_TEXT} --data held-out.txt --plot size.svg",
    "generate": 'generate smaller "The first thing to do is" --max-new-tokens 20',
    "chat": 'chat smaller --system "Answer briefly." --temperature 0.7',
    "serve": "serve smaller --port 8000",
    "routing": "routing mixture --data text.txt,held-out.txt --plot routing.png",
    "bench": "bench smaller --against mistralai/Mixtral-8x7B-v0.1",
    "inspect": "inspect smaller --analysis --plot analysis.svg",
    "report": "report smaller smaller.html --data held-out.txt",
    "verify": "verify smaller --against mistralai/Mixtral-8x7B-v0.1 --text held-out.txt --max-kl 0.05",
    "push": "push smaller me/mixtral-75 --dry-run",
    "recommend": "recommend mistralai/Mixtral-8x7B-v0.1 --memory 16GB",
    "doctor": "doctor --json",
    "demo": "demo folder",
    "list": "list presets",
}

# Of commands with many options those that come first; groups that many commands share are then left to --help-all.
MAIN = {
    "upcycle": ("--method", "--experts", "--top-k", "--calibration", "--dry-run"),
    "upcycle add-expert": ("--method", "--source", "--calibration", "--top-k", "--dry-run"),
    "moefy": ("--keep", "--experts", "--calibration", "--dry-run"),
    "tune": ("--data", "--eval-data", "--epochs", "--learning-rate", "--dry-run"),
    "compress": ("--method", "--ratio", "--size", "--calibration", "--effort", "--dry-run", "--resume"),
    "compress drop-experts": ("--method", "--drop", "--top-k", "--dry-run"),
    "repair": ("--to", "--calibration", "--steps", "--learning-rate", "--dry-run", "--resume"),
    "fisher-merge": ("--merge", "--calibration", "--dry-run"),
    "decompose": ("--base", "--dry-run"),
    "svd-compress": ("--ratio", "--calibration", "--dry-run"),
    "prune-base": ("--ratio", "--dry-run"),
    "quantize-delta": ("--bits", "--calibration", "--dry-run"),
    "sparsify-delta": ("--drop", "--select", "--dry-run"),
    "eval": ("--data", "--against", "--windows", "--tasks", "--output"),
    "compare": ("--methods", "--ratios", "--calibration", "--data", "--models", "--output", "--plot"),
    "report": ("--data", "--against", "--analysis", "--results"),
    "verify": ("--against", "--text", "--max-kl"),
    "bench": ("--against", "--batch", "--lengths", "--new-tokens", "--plot"),
    "generate": ("--max-new-tokens", "--temperature", "--seed"),
    "routing": ("--data", "--windows", "--plot"),
    "chat": ("--system", "--max-tokens", "--temperature", "--seed"),
    "serve": ("--host", "--port"),
    "export": ("--format", "--type", "--bits", "--expert", "--dry-run"),
    "export mlx": ("--format", "--size", "--bits", "--other-bits", "--calibration", "--dry-run"),
    "export gguf": ("--format", "--size", "--calibration", "--target-bpw", "--type", "--dry-run"),
}


def of_form(said: Mapping[str, FormValueT], command: str, form: str) -> FormValueT | None:
    """What is said of a form of a command, or else of the command; `None` if nothing is."""
    return said.get(f"{command} {form}", said.get(command))
