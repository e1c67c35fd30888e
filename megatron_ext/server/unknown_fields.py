"""Fields of bodies that this server does not have.

Clients send many fields of other servers. They are ignored, and named in the log once; with `--strict-fields` they are
refused. Fields that would change the answer are refused in any case, unless their values ask for what happens anyway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextvars import ContextVar

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

IS_STRICT: ContextVar[bool] = ContextVar("strict_fields", default=False)
"""True while a server with `--strict-fields` handles a request."""
MAX_NOTED = 256  # names in the log
_noted: set[str] = set()

# Fields that would change the answer, with the values that do not. Null is the same as a missing field.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # of OpenAI's APIs
    **dict.fromkeys(("audio", "conversation", "moderation", "prompt", "web_search_options"), ()),
    **dict.fromkeys(("documents", "functions"), ([],)),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    # of the other routes of this server
    **dict.fromkeys(("max_output_tokens", "max_tokens", "messages", "response_format", "stop_sequences", "system"), ()),
    "n": (1,),
    "stop": ([],),
    # of vLLM, SGLang, llama.cpp and services
    **dict.fromkeys(("allowed_token_ids", "chat_template", "ebnf", "json_schema", "lora_path"), ()),
    **dict.fromkeys(("grammar", "regex", "stop_regex", "structural_tag"), ()),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("early_stopping", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_routed_experts"), (False,)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("add_special_tokens", "spaces_between_special_tokens"), (True,)),
    "logits_processors": ([],),
    "enable_thinking": (True,),
    "thinking": ({"type": "enabled"}, {"type": "auto"}, {"type": "adaptive"}),
}
_REMEDIES = {
    "enable_thinking": "use thinking",
    "thinking": "use enable_thinking",
}


def check_unknown(value: Mapping[str, object], known: Collection[str], *, answers: bool) -> None:
    """Check the unknown fields of an object, and note ignored ones.

    Args:
        value: Object of a body.
        known: Names of the fields that it may have.
        answers: Whether it is part of a request for an answer, which the fields in `UNSUPPORTED` would change.

    Raises:
        ApiError: One would change the answer, or is refused with `--strict-fields`.
    """
    for name, given in value.items():
        if name in known or given is None:
            continue
        neutral = UNSUPPORTED.get(name) if answers else None
        if neutral is None:
            shown = printable(name, LONGEST_NAME)
            if IS_STRICT.get():
                raise ApiError(400, f"{shown} is not a known field (--strict-fields)", param=shown)
            note_ignored(f"field {shown}")
        elif not any(isinstance(given, bool) == isinstance(one, bool) and given == one for one in neutral):
            anyway = " and ".join(json.dumps(one) for one in neutral)
            remedy = _REMEDIES.get(name, "leave it out")
            message = f"{name}: is not supported; {remedy}" + (f" ({anyway} is what happens anyway)" if neutral else "")
            raise ApiError(400, message, param=name)


def note_ignored(name: str) -> None:
    """Log once for each name that it has no effect; the number of names is bounded."""
    shown = printable(name, LONGEST_NAME)
    if shown not in _noted and len(_noted) < MAX_NOTED:
        _noted.add(shown)
        logger.info("this server does not use %s; it is ignored", shown)
