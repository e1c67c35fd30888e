"""Facts that the scripts of all clients report of the same conversations."""

from __future__ import annotations

TEXT = "Oslo is clear at noon."  # the answer after the calls
WEATHER, TIME = ["get_weather", {"city": "Oslo"}], ["get_time", {"zone": "UTC"}]
FACTS = {
    "parallel": [[WEATHER, TIME]],  # the calls of each answer that has any
    "one_by_one": [[WEATHER], [TIME]],  # the same with parallel calls switched off
    "forced": [[TIME]],  # the same with the second function named
    "answer": {"city": "Oslo", "sky": "clear"},  # parsed by the client from an answer that follows a schema
    "stream": [[WEATHER, TIME]],  # the loop again, streamed
    "stream_text": TEXT,
    "stream_in_pieces": True,  # the text came in at least two
}
