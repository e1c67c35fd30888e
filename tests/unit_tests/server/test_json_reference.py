"""PY-13: the reference page of JSON fields has what runs and servers write."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from megatron_ext.commands.main import main
from megatron_ext.scheduling.record import RequestRecord
from tests.unit_tests.support.server import embedded_engine
from tools.pages import json_fields


@functools.cache
def page() -> str:
    """The page."""
    return json_fields.json_fields()


def beyond(model: BaseModel, path: str = "") -> set[str]:
    """Paths of fields that a class of OpenAI's client does not declare."""
    found = {path + name for name in model.model_extra or {}}
    for name in model.model_fields_set - (model.model_extra or {}).keys():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            found |= beyond(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            found |= beyond(value[0], f"{path}{name}[].")
    return found


def section(title: str) -> set[str]:
    """Names of the fields in the table of a section."""
    return set(re.findall(r"^\| `([^`]+)` ", page().split(f" {title}\n\n")[1].split("\n#")[0], re.MULTILINE))


def test_results_of_a_run(tmp_path):
    """Every key, those of objects included; with drafts, log-probs, events and explanations."""
    output = tmp_path / "out.json"
    options = "--output-request-events --return-log-probs --top-n-logprobs 2 --explain-prefix-cache"
    options += " --speculative-method ngram --num-speculative-tokens 2 --speculative-draft-cost 0.1"
    options += " --num-tokens-to-generate 2 --prefix-cache-audit 1"
    places = ["--prefix-cache-dir", str(tmp_path / "cache"), "--output-path", str(output)]
    assert main(["run", "--prompts", "A list is", *options.split(), *places]) == 0
    entry = json.loads(output.read_text("utf-8"))["0"]
    assert entry.keys() | {"routing_indices"} == section("Results of a request")
    explained = entry["prefix_cache_explanation"].keys() | {"before", "after"}
    assert explained == section("Explanation of a prompt")
    counts = json.loads((tmp_path / "out.run.json").read_text("utf-8"))
    assert counts.keys() == section("Results of a run")
    for name in ("prefix_cache", "prefix_cache_lost", "speculation", "prefix_cache_disk"):
        assert counts[name].keys() == section(name), name
    assert counts["geometry"].keys() <= section("geometry")


def test_records():
    assert {field.name for field in dataclasses.fields(RequestRecord)} == section("RequestRecord")


def test_bodies():
    """Every field of every object that a server describes; `type` has its values, and a choice of tools its class."""
    text = page().split("## Fields of bodies")[1].split("\n## ")[0]
    named = Counter(name for name in re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.MULTILINE) if name != "type")
    objects = json_fields.described()["components"]["schemas"]
    fields = [field for name, one in objects.items() if name != "ToolChoice" for field in one.get("properties", {})]
    assert named == Counter(field for field in fields if field != "type")
    assert named.total() > 150
    assert "min_tokens" in section("ChatRequest")


def test_answers(serve):
    """Fields beyond those of OpenAI's classes are on the page, and no others."""
    server = serve(embedded_engine(explain_prefix_cache=True), "model")
    asked = {"model": "model", "max_tokens": 2, "explain_prefix_cache": True}
    asked |= {"return_token_ids": True, "return_weights_version": True}
    plain = server.http.post("/v1/completions", json={**asked, "prompt": "a"}).json()
    messages = [{"role": "user", "content": "a"}]
    chat = server.http.post("/v1/chat/completions", json={**asked, "messages": messages}).json()
    found = beyond(Completion.model_validate(plain)) | beyond(ChatCompletion.model_validate(chat))
    thinking = {"choices[].message.reasoning", "choices[].message.reasoning_content"}
    assert found | thinking == section("Fields of answers beyond OpenAI's")
