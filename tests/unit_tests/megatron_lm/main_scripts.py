"""What inference scripts of Megatron's main use: `main_scripts.yaml`, and how it is read from a checkout.

    python -m tests.unit_tests.megatron_lm.main_scripts CHECKOUT COMMIT

writes the file anew. Fields of dataclasses have their defaults; enums and factories are values.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
INFERENCE = Path("megatron/core/inference")
CLASSES = {
    "SamplingParams": INFERENCE / "sampling_params.py",
    "InferenceConfig": INFERENCE / "config.py",
    "ServeConfig": INFERENCE / "apis/serve_config.py",
}
SCRIPTS = tuple(
    Path("examples/inference") / name
    for name in (
        "advanced/gpt_dynamic_inference.py",
        "launch_inference_server.py",
        "offline_inference.py",
        "utils.py",
    )
)
# Variables of the scripts, and the items of a step's `result`; `llm_request` is a request of `MegatronLLM`.
VARIABLES = ("context", "decode_only", "engine", "finished_request", "kv_block_allocator", "llm")
ITEMS = ("active_request_ids", "cuda_graph_request_count", "finished_request_records", "step_time")


def read() -> dict[str, Any]:
    """Return the contents of the file."""
    return yaml.safe_load(FILE.read_text("utf-8"))


def used_by(checkout: Path) -> dict[str, Any]:
    """Return what the file should say of a checkout, without its commit."""
    found: dict[str, Any] = {name: fields_of(checkout / path, name) for name, path in CLASSES.items()}
    texts = [(checkout / path).read_text("utf-8") for path in SCRIPTS]
    scripts = "\n".join(texts)
    for name in VARIABLES:
        found[name] = sorted(set(re.findall(rf"(?<!\bllm\.)\b{name}\.(\w+)", scripts)))
    found["llm_engine"] = sorted(set(re.findall(r"\bllm\.engine\.(\w+)", scripts)))
    reads = re.findall(r"(?:\breq(?:\.|, ')|\bresults\[.+?\]\.|\brequest\.(?=prompt_))(\w+)", texts[-1])
    found["llm_request"] = sorted(set(reads))
    found["step"] = sorted(set(re.findall(r'\bresult\["(\w+)"\]', scripts)) & set(ITEMS))
    return found


def fields_of(path: Path, name: str) -> dict[str, Any]:
    """Return the fields of a dataclass with their defaults, by its source."""
    module = ast.parse(path.read_text("utf-8"))
    classes = {one.name: one for one in module.body if isinstance(one, ast.ClassDef)}
    return {
        ast.unparse(one.target): _default(one.value, classes)
        for one in classes[name].body
        if isinstance(one, ast.AnnAssign) and "InitVar" not in ast.unparse(one.annotation)
    }


def _default(value: ast.expr | None, classes: dict[str, ast.ClassDef]) -> Any:
    if isinstance(value, ast.Attribute):  # member of an enum
        members = [one for one in classes[ast.unparse(value.value)].body if isinstance(one, ast.Assign)]
        return ast.literal_eval({ast.unparse(one.targets[0]): one.value for one in members}[value.attr])
    if isinstance(value, ast.Call):
        assert ast.unparse(value) == "field(default_factory=list)", ast.unparse(value)
        return []
    assert value is not None, "each field has a default"
    return ast.literal_eval(value)


if __name__ == "__main__":
    about = {"version": "0.20.0", "commit": sys.argv[2]}
    text = yaml.safe_dump({**about, **used_by(Path(sys.argv[1]))}, sort_keys=False, width=110, default_flow_style=None)
    FILE.write_text(f"# Names that Megatron's main has, and its scripts use: {Path(__file__).name}\n{text}", "utf-8")
