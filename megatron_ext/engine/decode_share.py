"""Decode share: which steps decoding requests have to themselves, so that they keep a share of their own rate (SC-4).

    step        prefills and decodes            decodes only                  prefills and decodes
    seconds     |----------- t -----------|-- own --|-- own --|-- own --|----------- t -----------|
    owed        0                         share * t - own ...           0

A step gives each decoding request a token, which takes `own` seconds where nothing prefills. In t seconds requests with
a share of their own rate get `share * t / own` tokens. What a step that also prefills leaves owing, steps without
prefills make up for. Only rank 0 measures; schedulers are told in which steps prefills are held.
"""

from __future__ import annotations

import statistics
from collections import deque

from megatron_ext.engine.result import EngineStep

_RECENT = 5  # steps of which `own` is the median


class DecodeShare:
    """Account of the time that decoding requests are owed.

    Args:
        share: Share of their own rate that they keep, below 1.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._own: deque[float] = deque(maxlen=_RECENT)  # seconds of the last steps with decodes only
        self._owed = 0.0  # seconds of steps with decodes only

    def note(self, step: EngineStep) -> bool:
        """Note a step; return whether prefills are to be held in the next one.

        Nothing is owed where no request decodes. Steps with decodes only save up for one token at most, and one of
        them follows the first step that also prefills, if their duration is not known.
        """
        chunks = [chunk for part in step.parts for chunk in part.planned if chunk.source is None]
        decodes = sum(chunk.start >= chunk.request.prompt_length for chunk in chunks)
        if not decodes:
            self._owed = 0.0
            return False
        if decodes == len(chunks):
            self._own.append(step.seconds)
        if not self._own:
            return True
        own = statistics.median(self._own)
        self._owed = max(-own, self._owed + self._share * step.seconds - own)
        return self._owed > 0
