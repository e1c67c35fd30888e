"""RP-6: KubeRay's operator accepts the manifest of the examples.

The environment variable `KUBERAY_CRD` names its `ray.io_rayservices.yaml`; without it this module is not collected (see
conftest.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import jsonschema
import yaml

from tests.unit_tests.support.source import ROOT

MANIFEST = yaml.safe_load((ROOT / "examples/ray_serve/rayservice.yaml").read_text("utf-8"))
DEFINITION = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text("utf-8"))


def test_the_operator_accepts_the_manifest():
    """Every field is one of the operator's schema, of the right type."""
    group, _, version = MANIFEST["apiVersion"].partition("/")
    assert (DEFINITION["spec"]["group"], DEFINITION["spec"]["names"]["kind"]) == (group, MANIFEST["kind"])
    (schema,) = [one["schema"] for one in DEFINITION["spec"]["versions"] if one["name"] == version]
    validator = jsonschema.Draft202012Validator(strict(schema["openAPIV3Schema"]))
    assert [error.message for error in validator.iter_errors(MANIFEST)] == []
    wrong = MANIFEST | {"spec": MANIFEST["spec"] | {"serveConfig": "x"}}
    assert not validator.is_valid(wrong), "unknown fields are found"


def strict(schema: object) -> object:
    """Return a schema of Kubernetes that refuses unknown fields, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(one) for name, one in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        found["additionalProperties"] = False
    return found
