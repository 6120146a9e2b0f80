"""Reading of requests from their JSON bodies.

Fields have OpenAI's names, or vLLM's where OpenAI has no such field. `context`, and `drop` in a message, are ours.
"""

import dataclasses
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from kvjax.chat_template import template_variables
from kvjax.errors import UserError, nearest, one_of, shown
from kvjax.models.adapter import base_path
from kvjax.models.chat import is_token_ids
from kvjax.models.json_file import JsonObject
from kvjax.sampling_params import SamplingParams

SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "stop_token_ids": (), "ignore_eos": False,
}  # fmt: skip
"""Sampling fields that are passed on, with their defaults."""
RECOMMENDED = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"
"""Sampling fields whose defaults a model's `generation_config.json` may give, as in vLLM."""
SHARED = {
    "model",
    "stream",
    "stream_options",
    "n",
    "seed",
    "stop",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "context",
}
"""Further fields of chats and completions."""
UNUSED = {
    "user",
    "verbosity",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
"""OpenAI's fields that are accepted and ignored."""
FIXED = {
    "modalities": ["text"],
    "best_of": 1,
    "suffix": "",
    "min_tokens": 0,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
}
"""Fields that are accepted only with this value."""
STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
CHAT = {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
"""Fields of chats only."""
COMPLETION = {"prompt", "echo"}
"""Fields of completions only."""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""The most texts that end an answer, and the most characters of each: all are searched for after each block."""
DEFINITIONS = "$defs", "definitions"
"""Keys of a JSON schema whose values hold definitions that `$ref` can name."""
SCHEMA_MAPS = "properties", "patternProperties", "dependentSchemas"
"""Keys whose values map names to schemas."""
DATA = "const", "enum", "default", "examples"
"""Keys whose values are data, not schemas."""
DROP = "drop"
"""The field that marks a message whose content leaves the cache."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def _prefixed(schema: Any, prefix: str) -> Any:
    """Return a JSON schema with a prefix before the names of its definitions.

    References to the schema's root become references to a definition that is named like the prefix itself.
    """
    if isinstance(schema, list):
        return [_prefixed(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {}
    for key, value in schema.items():
        if key in DEFINITIONS and isinstance(value, dict):
            value = {f"{prefix}{name}": _prefixed(item, prefix) for name, item in value.items()}
        elif key in SCHEMA_MAPS and isinstance(value, dict):
            # These keys are names that the caller chose, even if they look like keywords.
            value = {name: _prefixed(item, prefix) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            target = re.sub(r"^#/(\$defs|definitions)/", rf"#/\g<1>/{prefix}", value)
            # The root, or anything outside the definitions, is reached through the definition of the root.
            value = f"#/$defs/{prefix}{value[1:]}" if target == value else target
        elif key in DATA:
            pass
        else:
            value = _prefixed(value, prefix)
        renamed[key] = value
    return renamed


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools that an answer may call."""

    definitions: list[dict[str, Any]]
    """The tools' definitions, in the form that the chat template takes."""
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    """Name of the tool that must be called, if the request names one."""
    parallel: bool = True
    """True if an answer may make several calls."""

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.definitions]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a call."""
        calls, shared = [], {}
        for index, tool in enumerate(self.definitions):
            if self.named not in (None, tool["function"]["name"]):
                continue
            prefix = f"tool{index}."
            arguments = _prefixed(tool["function"].get("parameters") or {"type": "object"}, prefix)
            # References start at the schema's root, so the definitions move there.
            for key in DEFINITIONS:
                shared.setdefault(key, {}).update(arguments.pop(key, {}))
            shared["$defs"][prefix] = arguments
            call = {
                "name": {"const": tool["function"]["name"]},
                "arguments": {"$ref": f"#/$defs/{prefix}"},
            }
            calls.append(
                {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
            )
        return {"anyOf": calls} | shared


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request for a chat or a completion."""

    sampling: Callable[[int], SamplingParams]
    """Makes the sampling parameters of a prompt from the most tokens of its answers. If the request has no seed, each
    prompt gets a random one."""
    max_tokens: int | None
    """The most tokens of an answer; None: as many as fit."""
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """True if every piece of a stream has the usage so far."""
    context: str | None
    prompts: list[Any] = dataclasses.field(default_factory=list)
    """Texts or lists of token ids; empty for a chat."""
    echo: bool = False
    score_prompt: bool = False
    """True if the log-probabilities of the prompts' tokens are returned, too."""
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Messages of the chat; empty for a completion."""
    dropped: list[int] = dataclasses.field(default_factory=list)
    """Indices of the messages whose content leaves the cache."""
    tools: Tools | None = None
    schema: Any = None
    """JSON schema of the answer; None: free text."""
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further variables of the chat template."""


def recommended_sampling(model: Path) -> dict[str, Any]:
    """Return the sampling fields that the authors of a model recommend in the `generation_config.json` of its folder;
    none for a GGUF file. Raises UserError if a value is invalid."""
    file = base_path(model) / "generation_config.json"
    if not os.path.lexists(file):
        return {}
    keys = JsonObject.read(file)
    sampling = {name: keys.data[name] for name in RECOMMENDED if keys.data.get(name) is not None}
    try:
        SamplingParams(**sampling)
    except UserError as error:
        raise keys.error(str(error)) from None
    return sampling


def read_chat(body: Any, sampling: Mapping[str, Any]) -> CompletionRequest:
    """Parse the body of a chat.

    sampling: defaults of sampling fields that replace those of `SAMPLING`.

    Raises:
        UserError: the body is not a valid request.
    """
    body = {**sampling, **_checked_fields(body, SHARED | CHAT | SAMPLING.keys() | UNUSED)}
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages must be a list of messages, got {shown(messages)}")
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
    logprobs = body.get("logprobs") or False
    one_of("request", "logprobs", logprobs, (True, False))
    if not logprobs and body.get("top_logprobs"):
        raise UserError("top_logprobs needs logprobs=true")
    template_options = template_variables("request", body.get("chat_template_kwargs"))
    if effort := body.get("reasoning_effort"):
        template_options = {"reasoning_effort": effort, **template_options}
    tools, schema = _tools(body), _schema(body.get("response_format"))
    if tools is not None and tools.choice == "required":
        if schema is not None:
            raise UserError("response_format cannot be combined with a tool_choice that requires a call")
        try:
            schema = tools.schema
        except RecursionError:
            raise UserError("the parameters of the tools are nested too deeply") from None
    messages = [read_message(message) for message in messages]
    dropped = [index for index, message in enumerate(messages) if message.pop(DROP, False)]
    if len(messages) - 1 in dropped:
        raise UserError("a message: the last message cannot be dropped")
    return CompletionRequest(
        **_shared_fields(body, max_tokens, (body.get("top_logprobs") or 0) if logprobs else None),
        messages=messages, dropped=dropped, tools=tools, schema=schema,
        template_options=template_options,
    )  # fmt: skip


def read_completion(body: Any, sampling: Mapping[str, Any]) -> CompletionRequest:
    """Parse the body of a completion.

    sampling: as in `read_chat`.

    Raises:
        UserError: the body is not a valid request.
    """
    body = {**sampling, **_checked_fields(body, SHARED | COMPLETION | SAMPLING.keys() | UNUSED)}
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or is_token_ids(prompt) else prompt
    if (
        not isinstance(prompts, list)
        or not all(isinstance(x, str) or is_token_ids(x) for x in prompts)
        or not prompts
    ):
        raise UserError(f"prompt must be a text, token ids or a list of these, got {shown(prompt)}")
    one_of("request", "echo", echo := body.get("echo") or False, (True, False))
    max_tokens = body.get("max_tokens")
    request = CompletionRequest(
        **_shared_fields(body, 16 if max_tokens is None else max_tokens, body.get("logprobs"), least=0 if echo else 1),
        prompts=prompts, echo=echo, score_prompt=echo and body.get("logprobs") is not None,
    )  # fmt: skip
    if echo and (request.stream or request.context is not None):
        raise UserError("echo cannot be combined with stream or context")
    return request


def _checked_fields(body: Any, fields: set[str]) -> dict[str, Any]:
    """Return the fields of a body that are not null and not fixed. Raises UserError for unknown fields."""
    if not isinstance(body, dict):
        raise UserError(f"the body must be a JSON object, got {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None and FIXED.get(name) != value}
    for name in body:
        if name in FIXED:
            raise UserError(f"{name} must be {shown(FIXED[name])}, got {shown(body[name])}")
        if name not in fields:
            near = "".join(f": did you mean {x}?" for x in nearest(name, fields)[:1])
            raise UserError(f"Unrecognized request argument supplied: {name}{near}")
    return body


def _shared_fields(body: dict[str, Any], max_tokens: Any, logprobs: Any, least: int = 1) -> dict[str, Any]:
    """Return the fields of `CompletionRequest` that chats and completions share. `least`: the least `max_tokens`."""
    for name in ("stream", "ignore_eos"):
        one_of("request", name, body.get(name, False), (True, False))
    stream_options, context = body.get("stream_options", {}), body.get("context")
    if not isinstance(stream_options, dict) or stream_options.keys() - STREAM_OPTIONS:
        raise UserError(f"stream_options must be {{'include_usage': true}}, got {shown(stream_options)}")
    if context is not None and not isinstance(context, str):
        raise UserError(f"context must be the name of a context, got {shown(context)}")
    if max_tokens is not None and (
        not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < least
    ):
        raise UserError(
            f"the most tokens of an answer must be a whole number of at least {least}, got {shown(max_tokens)}"
        )
    n, seed, bias = body.get("n", 1), body.get("seed"), body.get("logit_bias", {})
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 128:
        raise UserError(f"n must be a whole number from 1 to 128, got {shown(n)}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise UserError(f"seed must be a whole number, got {shown(seed)}")
    if not isinstance(bias, dict) or not all(token.isdecimal() and len(token) < 10 for token in bias):
        raise UserError(f"logit_bias must be an object of token ids and numbers, got {shown(bias)}")
    stop = body.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if (
        not isinstance(stop, list | tuple)
        or len(stop) > MAX_STOPS
        or any(len(str(x)) > MAX_STOP_LENGTH for x in stop)
    ):
        raise UserError(f"stop must be at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters")
    options = {name: body.get(name, default) for name, default in SAMPLING.items()} | {
        "stop": stop,
        "logit_bias": {int(token): value for token, value in bias.items()},
        "logprobs": logprobs,
    }
    if type(options["top_k"]) is int and options["top_k"] == -1:
        # vLLM writes -1 for all tokens.
        options["top_k"] = 0
    # Greedy answers are equal, so the caller submits the prompt n times with n=1.
    options["n"] = n if options["temperature"] else 1
    SamplingParams(**options)

    def sampling(max_tokens: int) -> SamplingParams:
        chosen = secrets.randbits(31) if seed is None else seed & 0x7FFFFFFF
        return SamplingParams(max_new_tokens=max_tokens, seed=chosen, **options)

    return {
        "sampling": sampling,
        "max_tokens": max_tokens,
        "n": n,
        "stream": body.get("stream", False),
        "include_usage": bool(stream_options.get("include_usage")),
        "continuous_usage": bool(stream_options.get("continuous_usage_stats")),
        "context": context,
    }


def read_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates take it. Raises UserError if it is not a message."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UserError(
            f"a message must be an object with a role, one of {', '.join(ROLES)}, got {shown(message)}"
        )
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        texts = [
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(content):
            raise UserError(f"a message's content must be text, got parts of another kind: {shown(content)}")
        content = "".join(texts)
    one_of("a message", DROP, message.get(DROP, False), (True, False))
    calls = message.get("tool_calls")
    if content is None and role == "assistant":
        content = message.get("refusal") or ""
    if not isinstance(content, str):
        raise UserError(f"a message's content must be text or a list of text parts, got {shown(content)}")
    message = message | {"role": "system" if role == "developer" else role, "content": content}
    if calls is not None:
        if not isinstance(calls, list):
            raise UserError(f"tool_calls must be a list of calls of functions, got {shown(calls)}")
        message["tool_calls"] = [_read_tool_call(call) for call in calls]
    return message


def _read_tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call of an earlier turn with its arguments as an object, as chat templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"tool_calls must be a list of calls of functions, got {shown(call)}")
    arguments = function.get("arguments", "{}")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments
    return call | {"function": function | {"arguments": parsed}}


def _tools(body: dict[str, Any]) -> Tools | None:
    """Return the tools that the answer may call; None: none."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if tools is None or tools == []:
        if choice not in ("auto", "none"):
            raise UserError("tool_choice needs tools")
        return None
    if not isinstance(tools, list):
        raise UserError(f"tools must be a list of tools, got {shown(tools)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not _is_schema(function.get("parameters"))
        ):
            raise UserError(
                f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, got {shown(tool)}"
            )
    parallel = body.get("parallel_tool_calls", True)
    one_of("request", "parallel_tool_calls", parallel, (True, False))
    if choice == "none":
        return None
    if choice in ("auto", "required"):
        return Tools(tools, choice, parallel=parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if all(tool["function"]["name"] != name for tool in tools):
        raise UserError(f"tool_choice must be none, auto, required or one of the tools, got {shown(choice)}")
    return Tools(tools, "required", name, parallel)


def _is_schema(parameters: Any) -> bool:
    """Return True if the parameters are None or an object whose definitions are objects."""
    if not isinstance(parameters, dict):
        return parameters is None
    return all(isinstance(parameters.get(key, {}), dict) for key in DEFINITIONS)


def _schema(response_format: Any) -> Any:
    """Return the JSON schema of a response format; None: there is none."""
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema", {}), dict):
        raise UserError(
            f"response_format must be text, json_object or a json_schema with a schema, got {shown(response_format)}"
        )
    return schema.get("schema", {"type": "object"})
