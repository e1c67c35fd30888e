"""Description, default and example of each field of the bodies and parameters, for the OpenAPI description."""

from __future__ import annotations

from dataclasses import dataclass

_NEUTRAL = "Not supported; accepted with a value that changes nothing"
_METADATA = "Accepted without effect"


@dataclass(frozen=True)
class FieldText:
    """Text of a field.

    Attributes:
        description: Phrase without a full stop.
        example: Value as in JSON.
        default: Value where the field is left out or null.
    """

    description: str
    example: object
    default: object = None


_MESSAGES = [{"role": "user", "content": "What does json.loads do?"}]
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}

FIELDS: dict[str, FieldText] = {
    # OpenAI's
    "model": FieldText("Name of the served model, or its root", "model"),
    "prompt": FieldText("A text, token ids, or a list of either", "def add(a, b):"),
    "messages": FieldText("The conversation, oldest message first", _MESSAGES),
    "n": FieldText("Choices of each prompt; choice i has the seed `seed` + i", 2, 1),
    "stop": FieldText("Words that end an answer; they are removed from it", ["\n\n"]),
    "stream": FieldText("Send the answer in parts, as server-sent events", True, False),
    "stream_options": FieldText("Options of a stream", {"include_usage": True}),
    "include_usage": FieldText("End the stream with the usage", True, False),
    "continuous_usage_stats": FieldText("Give each part the usage so far", True, False),
    "max_tokens": FieldText("Most tokens to generate; by default 16 for completions, as many as fit for chats", 64),
    "max_completion_tokens": FieldText("The same as `max_tokens`, by its newer name", 64),
    "temperature": FieldText("0 takes the most likely token; higher values are more random", 0.7, 1),
    "top_p": FieldText("Draw from the most likely tokens that have this probability together", 0.9, 1),
    "frequency_penalty": FieldText("Subtracted from a token's logit for each time that it was generated", 0.5, 0),
    "presence_penalty": FieldText("Subtracted from the logits of tokens that were generated", 0.5, 0),
    "logit_bias": FieldText("Numbers to add to logits, by token id", {"50": -100}),
    "response_format": FieldText("Format of the answer: any text, JSON, or a JSON schema", {"type": "json_object"}),
    "seed": FieldText("Seed of sampling; equal seeds give equal answers", 7),
    "logprobs": FieldText("Log-probs: how many of the best tokens (completions), or whether (chats)", 1),
    "top_logprobs": FieldText("How many of the best tokens are listed at each position; needs `logprobs`", 2, 0),
    "echo": FieldText("Begin the text with the prompt", True, False),
    "best_of": FieldText("Accepted if it equals `n`", 1),
    "tools": FieldText("Functions that the model may call", [_TOOL]),
    "tool_choice": FieldText("`none`, `auto`, `required`, or the function that must be called", "auto", "auto"),
    "parallel_tool_calls": FieldText("Whether an answer may have several calls", False, True),
    "reasoning_effort": FieldText("Effort of thinking, for templates that know it; `none` turns thinking off", "low"),
    # Extensions
    "min_tokens": FieldText("Tokens to generate before an end is possible", 8, 0),
    "top_k": FieldText("Draw from so many of the most likely tokens; 0 and -1 are off", 40, 0),
    "min_p": FieldText("Least probability of a token, relative to the most likely one", 0.05, 0),
    "repetition_penalty": FieldText("Divides positive logits of tokens seen, and multiplies negative ones", 1.1, 1),
    "stop_token_ids": FieldText("Token ids that end an answer, also with `ignore_eos`", [2], []),
    "bad_words": FieldText("Words that are not generated", ["foo"], []),
    "ignore_eos": FieldText("Continue after the end-of-document token", True, False),
    "skip_special_tokens": FieldText("Leave special tokens out of texts", False, True),
    "return_token_ids": FieldText("Return token ids of prompt and answer, too", True, False),
    "return_weights_version": FieldText("Return the versions of the weights that made the tokens", True, False),
    "structured_outputs": FieldText(
        "Format of the answer in vLLM's form; one of its fields", {"choice": ["yes", "no"]}
    ),
    "json": FieldText("JSON schema that the answer follows", _SCHEMA),
    "regex": FieldText("Regular expression that the answer matches", "[0-9]+"),
    "json_object": FieldText("The answer is a JSON object", True, False),
    "choice": FieldText("The answer is one of these texts", ["yes", "no"]),
    "cache_salt": FieldText("Requests share cached prefixes with those of the same salt only", "team-a"),
    "enable_prefix_caching": FieldText("Use the prefix cache", False, True),
    "explain_prefix_cache": FieldText("Explain why no more was skipped; with `--explain-prefix-cache`", True, False),
    "num_speculative_tokens": FieldText("Most drafts of a step; 0 is off, the default is the server's", 2),
    "cache_checkpoint": FieldText("Token positions after which other requests may go on differently", [512], []),
    "separate_reasoning": FieldText("Return thinking apart from the content", False, True),
    "thinking_budget_tokens": FieldText("Most tokens of thinking; by default as many as the answer may have", 256),
    "chat_template_kwargs": FieldText("Variables of the chat template", {"enable_thinking": False}, {}),
    "add_generation_prompt": FieldText("End the prompt with the beginning of an answer", False, True),
    "continue_final_message": FieldText("Continue the last message instead of answering it", True, False),
    "tokens": FieldText("Token ids", [72, 101]),
    "return_token_strs": FieldText("Return the text of each token, too", True, False),
    "add_special_tokens": FieldText("Add the tokens that begin a prompt; `false` only to count tokens", True, True),
    "cache_hints": FieldText(_METADATA, {"session": "a", "turn": 3}),
    "prompt_cache_key": FieldText(_METADATA, "session-7"),
    "verbosity": FieldText("Length of answers, for templates that know it", "low"),
    "prediction": FieldText(_METADATA, None),
    # Messages and tools
    "cache_control": FieldText("Other prompts may have everything up to here in common", {"type": "ephemeral"}),
    "ttl": FieldText(_METADATA, "5m"),
    "role": FieldText("Author of the message: `system`, `user`, `assistant`, `tool`, ...", "user"),
    "content": FieldText("Text of the message, or its parts", "What does json.loads do?"),
    "name": FieldText("Name of the function, or of the author", "weather"),
    "tool_calls": FieldText("Calls of an assistant's message", [_CALL]),
    "tool_call_id": FieldText("Call that a tool's message answers", "call_1"),
    "reasoning_content": FieldText("Thinking of an assistant's message, for templates that keep it", "First the city."),
    "reasoning": FieldText("The same as `reasoning_content`", "First the city."),
    "type": FieldText("Kind of the object; one value is supported", "function"),
    "text": FieldText("Text of the part", "Hello"),
    "function": FieldText("Name, description and parameters of the function", _TOOL["function"]),
    "description": FieldText("What the function does, for the model", "Weather of a city today"),
    "parameters": FieldText("JSON schema of the arguments", _SCHEMA),
    "strict": FieldText("Whether arguments follow the schema where the model may also answer with text", True, False),
    "mode": FieldText("`none`, `auto` or `required`", "required", "auto"),
    "names": FieldText("Functions that may be called; null for all", ["weather"]),
    # The Responses API
    "input": FieldText("A text, or items: messages, calls, their results, thinking", "What does json.loads do?"),
    "instructions": FieldText("The system's message", "Answer in one sentence."),
    "previous_response_id": FieldText("Stored response to continue; with `--responses-store-mb`", "resp_1234"),
    "response_id": FieldText("Id of a stored response", "resp_1234"),
    "max_output_tokens": FieldText("Most tokens to generate; by default as many as fit", 64),
    "max_tool_calls": FieldText("Accepted without effect: it limits tools that run on a server", 4),
    "include": FieldText("Parts to add; log-probs are", ["message.output_text.logprobs"], []),
    "truncation": FieldText("Nothing is left out of a prompt, with either value", "disabled", "disabled"),
    "effort": FieldText("Effort of thinking, for templates that know it", "low"),
    "format": FieldText("Format of the answer", {"type": "json_object"}),
    "call_id": FieldText("Id of a call, which its result repeats", "call_1"),
    "arguments": FieldText("Arguments of a call, as JSON", '{"city": "Oslo"}'),
    "output": FieldText("Result of a call", "12 degrees"),
    "id": FieldText("Id of a stored item, or of a call", "call_1"),
    **dict.fromkeys(("summary", "generate_summary", "prompt_cache_retention"), FieldText(_METADATA, "auto")),
    # The Messages API
    "system": FieldText("The system's message, as a text or in blocks", "Answer in one sentence."),
    "stop_sequences": FieldText("Words that end an answer; the one found is named", ["END"]),
    "thinking": FieldText("Whether to think, and with how many tokens at most", {"type": "disabled"}),
    "budget_tokens": FieldText("Most tokens of thinking", 256),
    "output_config": FieldText("Effort and format of the answer", {"effort": "low"}),
    "schema": FieldText("JSON schema that the answer follows", _SCHEMA),
    "input_schema": FieldText("JSON schema of the arguments", _SCHEMA),
    "disable_parallel_tool_use": FieldText("Allow one call at most", True, False),
    "tool_use_id": FieldText("Call that the block answers", "toolu_1"),
    "is_error": FieldText("Whether the tool failed", True, False),
    "thread": FieldText("Refused: conversations are not kept between requests", None),
    # Administrators'
    "request_id": FieldText("The `id` of the answer to abort; or `abort_all`", "cmpl-1234"),
    "abort_all": FieldText("Abort all requests", True, False),
    "model_path": FieldText("Directory of the new weights, below `--weights-root`", "step-2000"),
    "in_flight": FieldText("What becomes of requests in flight", "finish", "recompute"),
    "weights_version": FieldText("Number of the new weights; by default one more than the last", 17),
    "level": FieldText("0 or keep; offload: to host memory; 1 or drop. Weights stay", "offload", "drop"),
    "max_seconds": FieldText("Seconds after which generation resumes by itself", 60, 600),
    # Parameters of paths and queries
    "since": FieldText("Only samples after this moment: seconds since 1970 by the server's clock", 1760000000.0, 0),
    # Accepted without effect
    **dict.fromkeys(("metadata",), FieldText(_METADATA, {"run": "7"})),
    **dict.fromkeys(("user", "service_tier", "safety_identifier"), FieldText(_METADATA, "any text")),
    **dict.fromkeys(("store",), FieldText(_METADATA, False)),
    # Accepted with neutral values
    **dict.fromkeys(
        (
            *("include_obfuscation", "early_stopping", "include_stop_str_in_output", "use_beam_search"),
            *("no_stop_trim", "return_hidden_states", "stream_reasoning"),
        ),
        FieldText(_NEUTRAL, False),
    ),
    **dict.fromkeys(("spaces_between_special_tokens",), FieldText(_NEUTRAL, True)),
    **dict.fromkeys(("logits_processors", "documents", "functions"), FieldText(_NEUTRAL, [])),
    **dict.fromkeys(
        ("prompt_logprobs", "truncate_prompt_tokens", "audio", "web_search_options"),
        FieldText(_NEUTRAL, None),
    ),
    **dict.fromkeys(("background", "conversation", "context_management", "moderation"), FieldText(_NEUTRAL, None)),
    "length_penalty": FieldText(_NEUTRAL, 1),
    "priority": FieldText(_NEUTRAL, 0),
    "suffix": FieldText(_NEUTRAL, ""),
    "function_call": FieldText(_NEUTRAL, "auto"),
    "modalities": FieldText(_NEUTRAL, ["text"]),
}
OF_SCHEMA: dict[tuple[str, str], FieldText] = {
    ("ChatRequest", "logprobs"): FieldText("Return log-probs of the answer's tokens", True, False),
    ("CompletionRequest", "logprobs"): FieldText("Return log-probs, and so many of the best tokens", 1),
    ("ChatRequest", "echo"): FieldText(_NEUTRAL, False),
    ("TokenizeRequest", "prompt"): FieldText("Text to tokenize; or `messages`", "Hello"),
    ("ToolUseBlock", "input"): FieldText("Arguments of the call", {"city": "Oslo"}),
    ("ThinkingBlock", "thinking"): FieldText("Thinking of an earlier answer", "First the city."),
    ("ReasoningItem", "summary"): FieldText(_METADATA, []),
    ("TextPart", "type"): FieldText("Kind of the part; only texts are supported", "text"),
}
"""Texts of fields that mean something else in one schema."""
