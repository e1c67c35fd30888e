"""Which tokens may come next in answers that must have a form: a mask for each row of a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.config.response_format import ResponseFormat
from megatron_ext.mcore.staging import SamplingRow
from megatron_ext.text.grammars import Grammars, Matcher


@dataclass(eq=False)
class _Guide:
    """A matcher, and the tokens that it has taken."""

    form: ResponseFormat
    matcher: Matcher
    taken: array[int]


class Guides:
    """Matchers of the requests in flight, kept from one step to the next.

    A matcher follows what a step's message says has been generated, and nothing else. Where there is none, or it took
    other tokens (its request was preempted, or waits no longer), it is made anew from them.

    Args:
        grammars: Of the model.
    """

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._guides: dict[int, _Guide] = {}

    def keep(self, rows: Iterable[SamplingRow]) -> None:
        """Forget those of requests that are in none of a step's rows: they have ended, or wait."""
        if self._guides:
            names = {row.request_id for row in rows}
            self._guides = {name: guide for name, guide in self._guides.items() if name in names}

    def masks(self, rows: Sequence[SamplingRow], failures: dict[int, str]) -> tuple[list[int], Tensor, list[int]]:
        """Which of the rows must have a form, and their masks.

        A row behind drafts is followed by a copy, which nothing is left of: the drafts may not come. If they cannot,
        or nothing can follow them, there is no mask, and no token of that row counts.

        Args:
            rows: Of a step.
            failures: Gets requests whose form cannot be followed any more, and why.

        Returns:
            k indices; [k, ceil(V / 32)] int32, see `ops.sampling.shaping.keep_allowed`; indices of rows behind drafts
            that have none.
        """
        found, masks, hopeless = [], [], []
        for index, row in enumerate(rows):
            shaping = row.sampling.shaping
            if shaping is None or shaping.form is None:
                continue
            try:
                generated = shaping.tokens[shaping.prompt_length :]
                if row.drafts:
                    matcher = self._copy_behind(row, generated)
                else:
                    matcher = self._guide(row.request_id, shaping.form, generated).matcher
                mask = matcher.allowed(shaping.ends)
            except ValueError as error:
                if row.drafts:
                    hopeless.append(index)
                else:
                    failures[row.request_id] = f"its answer cannot be given its form: {error}"
                continue
            found.append(index)
            masks.append(np.frombuffer(mask, dtype=np.int32))
        stacked = torch.from_numpy(np.stack(masks)) if masks else torch.empty(0, 0, dtype=torch.int32)
        return found, stacked, hopeless

    def _copy_behind(self, row: SamplingRow, generated: array[int]) -> Matcher:
        """Of the request's matcher, which stands where it did, behind the row's drafts.

        Raises:
            ValueError: They have not the form.
        """
        matcher = self._guides[row.request_id].matcher.copy()
        matcher.take(generated[len(generated) - row.drafts :])
        return matcher

    def _guide(self, name: int, form: ResponseFormat, generated: array[int]) -> _Guide:
        """The matcher of a request, behind all that it has generated.

        Raises:
            ValueError: That has not the form.
        """
        guide = self._guides.get(name)
        if guide is None or guide.form != form or generated[: len(guide.taken)] != guide.taken:
            guide = self._guides[name] = _Guide(form, self.grammars.matcher(form), generated[:0])
        guide.matcher.take(generated[len(guide.taken) :])
        guide.taken = generated
        return guide
