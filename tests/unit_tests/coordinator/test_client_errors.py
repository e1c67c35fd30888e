"""Ids, HEAD and unknown routes where a coordinator answers for itself."""

from __future__ import annotations

import pytest

from tests.unit_tests.server.test_errors import check_error
from tests.unit_tests.support.fleet import error, fleet

MINE = {"x-request-id": "mine-1"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_id_goes_to_the_replica_and_back(stream):
    """RP-6: a request has one id everywhere: the client's own, or the coordinator's; the prompt's tokenization, too."""
    async with fleet() as (front, fakes):
        for headers in (MINE, {}):
            answer = await front.complete(stream=stream, headers=headers)
            (found,) = answer.headers.get_list("x-request-id")
            assert found == headers.get("x-request-id", found)
            seen = [one for fake in fakes for one in (*fake.requests, *fake.others) if one.path != "/replica"]
            assert {one.path for one in seen} == {"/tokenize", "/v1/completions"}
            assert {one.headers["x-request-id"] for one in seen} == {found}
            for fake in fakes:
                fake.requests.clear()
                fake.others.clear()


async def test_errors_and_all_replicas_answers_have_it():
    async with fleet(1) as (front, fakes):
        fakes[0].behave = error(400)
        for answer in (
            await front.complete(headers=MINE),
            await front.http.get("/nowhere", headers=MINE),
            await front.http.get("/v1/models", headers=MINE),
            await front.http.get("/prefix_cache", headers=MINE),
        ):
            assert answer.headers.get_list("x-request-id") == ["mine-1"]
        assert {one.headers.get("x-request-id") for one in fakes[0].others if one.path != "/replica"} == {"mine-1"}


async def test_unknown_routes_and_methods():
    async with fleet(1) as (front, _):
        unknown = check_error(await front.http.get("/v2"), 404)
        answer = await front.http.get("/v1/completions")
        other = check_error(answer, 405)
        assert answer.headers["allow"] == "POST"
        for found, path in ((unknown, "/v2"), (other, "/v1/completions")):
            assert all(part in found["message"] for part in (path, "/v1/chat/completions", "/replicas"))


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
async def test_head(path):
    async with fleet(1) as (front, _):
        head, got = await front.http.head(path), await front.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
