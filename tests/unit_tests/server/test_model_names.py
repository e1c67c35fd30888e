"""RP-11: names of the model in requests: the served one, and the directory that `/v1/models` names."""

from __future__ import annotations

from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.server import tiny_engine


def test_the_root_is_a_name_of_the_model(serve):
    """Load generators send the directory that they read the tokenizer from; any other name is a 404."""
    server = serve(tiny_engine(), "served", served_model_name=("served", "another"))
    server.serving.root = "/data/checkpoint"
    served, another = server.http.get("/v1/models").json()["data"]
    for name, listed in (("served", served), (served["root"], served), ("another", another)):
        body = {"model": name, "prompt": [1, 2], "max_tokens": 1}
        answer = server.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, listed["id"])
        assert server.http.get(f"/v1/models/{name}").json() == listed
    for name, status in (("/data", 404), ("/data/checkpoint/", 404), ("", 400)):
        error = check_error(server.http.post("/v1/completions", json={"model": name, "prompt": [1, 2]}), status)
        assert error["param"] == "model"
