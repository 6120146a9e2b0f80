"""Requests, read from their JSON bodies. The names are OpenAI's; those that OpenAI's API does not have are vLLM's.
`context`, and `drop` of a message, are ours."""

import dataclasses
import json
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvjax.chat_template import template_variables
from kvjax.errors import UserError, nearest, one_of, shown
from kvjax.models.chat import is_token_ids
from kvjax.sampling_params import SamplingParams

SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "stop_token_ids": (), "ignore_eos": False,
}  # fmt: skip
"""Those that are passed on, with their defaults."""
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
"""Those of OpenAI's that change nothing here."""
ONLY = {
    "modalities": ["text"],
    "best_of": 1,
    "suffix": "",
    "min_tokens": 0,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
}
"""Those that are taken with one value alone."""
STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
CHAT = {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
COMPLETION = {"prompt", "echo"}
STOPS, LONGEST_STOP = 16, 256
"""Texts that end an answer, and characters of each: all are looked for between blocks."""
DEFINITIONS = "$defs", "definitions"
"""Keys of a JSON schema's parts that others name."""
NAMED = "properties", "patternProperties", "dependentSchemas"
"""Keys whose values are schemas by name."""
DATA = "const", "enum", "default", "examples"
"""Keys whose values are no schemas."""
DROP = "drop"
"""The field of a message whose content is to leave the cache."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def _prefixed(schema: Any, prefix: str) -> Any:
    """Return a JSON schema with a prefix before the names of its definitions, of which it is the one that is called so
    itself."""
    if isinstance(schema, list):
        return [_prefixed(one, prefix) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in DEFINITIONS and isinstance(value, dict):
            value = {f"{prefix}{name}": _prefixed(one, prefix) for name, one in value.items()}
        elif key in NAMED and isinstance(value, dict):
            # its keys are names of the caller's, whatever they are called
            value = {name: _prefixed(one, prefix) for name, one in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            inner = re.sub(r"^#/(\$defs|definitions)/", rf"#/\g<1>/{prefix}", value)
            # what stood at the root is a definition of its own
            value = f"#/$defs/{prefix}{value[1:]}" if inner == value else inner
        elif key in DATA:
            pass
        else:
            value = _prefixed(value, prefix)
        found[key] = value
    return found


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools that an answer may call."""

    definitions: list[dict[str, Any]]
    """The tools' definitions, in the form that the chat template takes."""
    choice: Literal["auto", "required"] = "auto"
    named: str | None = None
    """The one tool that must be called, if one was named."""
    several: bool = True
    """True if an answer may make several calls."""

    @property
    def names(self) -> list[str]:
        return [one["function"]["name"] for one in self.definitions]

    @property
    def call(self) -> dict[str, Any]:
        """The JSON schema of a call."""
        calls, shared = [], {}
        for index, one in enumerate(self.definitions):
            if self.named not in (None, one["function"]["name"]):
                continue
            prefix = f"tool{index}."
            arguments = _prefixed(one["function"].get("parameters") or {"type": "object"}, prefix)
            # they are found from the schema's root
            for key in DEFINITIONS:
                shared.setdefault(key, {}).update(arguments.pop(key, {}))
            shared["$defs"][prefix] = arguments
            call = {
                "name": {"const": one["function"]["name"]},
                "arguments": {"$ref": f"#/$defs/{prefix}"},
            }
            calls.append(
                {"type": "object", "properties": call, "required": [*call], "additionalProperties": False}
            )
        return {"anyOf": calls} | shared


@dataclasses.dataclass(frozen=True)
class Asked:
    """A chat or completion that was asked for."""

    sampling: Callable[[int], SamplingParams]
    """Makes the sampling parameters of a prompt, given the most tokens that an answer may have. Without a seed each
    prompt has its own."""
    most: int | None
    """The most tokens of an answer; None: as many as fit."""
    n: int
    stream: bool
    include_usage: bool
    usage_in_pieces: bool
    """True if all pieces of a stream say how many tokens there are so far."""
    context: str | None
    prompts: list[Any] = dataclasses.field(default_factory=list)
    """Texts and lists of token ids, if it is a completion."""
    echo: bool = False
    scores: bool = False
    """True if the prompts' own tokens are scored, too."""
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Messages, if it is a chat."""
    dropped: list[int] = dataclasses.field(default_factory=list)
    """The indices of the messages whose content leaves the cache."""
    tools: Tools | None = None
    schema: Any = None
    """The JSON schema of the answer, if it has one."""
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further variables of the chat template."""


def read_chat(body: Any) -> Asked:
    """Return what the body of a chat completion asks for.

    Raises:
        UserError: anything that is wrong about it.
    """
    body = _object(body, SHARED | CHAT | SAMPLING.keys() | UNUSED)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages must be a list of messages, got {shown(messages)}")
    most = body.get("max_completion_tokens", body.get("max_tokens"))
    wanted = body.get("logprobs") or False
    one_of("request", "logprobs", wanted, (True, False))
    if not wanted and body.get("top_logprobs"):
        raise UserError("top_logprobs needs logprobs=true")
    template = template_variables("request", body.get("chat_template_kwargs"))
    if effort := body.get("reasoning_effort"):
        template = {"reasoning_effort": effort, **template}
    tools, schema = _tools(body), _schema(body.get("response_format"))
    if tools is not None and tools.choice == "required":
        if schema is not None:
            raise UserError("response_format and a tool_choice that requires a call exclude each other")
        try:
            schema = tools.call
        except RecursionError:
            raise UserError("the parameters of the tools are nested too deeply") from None
    read = [read_message(one) for one in messages]
    dropped = [index for index, one in enumerate(read) if one.pop(DROP, False)]
    if len(read) - 1 in dropped:
        raise UserError("a message: drop is for one that a later message follows, and this is the last")
    return Asked(
        **_shared(body, most, (body.get("top_logprobs") or 0) if wanted else None),
        messages=read, dropped=dropped, tools=tools, schema=schema, template=template,
    )  # fmt: skip


def read_completion(body: Any) -> Asked:
    """Return what the body of a completion asks for.

    Raises:
        UserError: anything that is wrong about it.
    """
    body = _object(body, SHARED | COMPLETION | SAMPLING.keys() | UNUSED)
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or is_token_ids(prompt) else prompt
    if (
        not isinstance(prompts, list)
        or not all(isinstance(x, str) or is_token_ids(x) for x in prompts)
        or not prompts
    ):
        raise UserError(f"prompt must be a text, token ids or a list of these, got {shown(prompt)}")
    one_of("request", "echo", echo := body.get("echo") or False, (True, False))
    most = body.get("max_tokens")
    asked = Asked(
        **_shared(body, 16 if most is None else most, body.get("logprobs"), least=0 if echo else 1),
        prompts=prompts, echo=echo, scores=echo and body.get("logprobs") is not None,
    )  # fmt: skip
    if echo and (asked.stream or asked.context is not None):
        raise UserError("echo is not for streams and not for prompts that continue a context")
    return asked


def _object(body: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise UserError(f"the body must be a JSON object, got {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None and ONLY.get(name) != value}
    for name in body:
        if name in ONLY:
            raise UserError(f"{name} is only taken as {shown(ONLY[name])}, got {shown(body[name])}")
        if name not in known:
            near = "".join(f": did you mean {x}?" for x in nearest(name, known)[:1])
            raise UserError(f"Unrecognized request argument supplied: {name}{near}")
    return body


def _shared(body: dict[str, Any], most: Any, logprobs: Any, least: int = 1) -> dict[str, Any]:
    """Return the fields of `Asked` that chats and completions share."""
    for name in ("stream", "ignore_eos"):
        one_of("request", name, body.get(name, False), (True, False))
    options, context = body.get("stream_options", {}), body.get("context")
    if not isinstance(options, dict) or options.keys() - STREAM_OPTIONS:
        raise UserError(f"stream_options must be {{'include_usage': true}}, got {shown(options)}")
    if context is not None and not isinstance(context, str):
        raise UserError(f"context must be the name of a context, got {shown(context)}")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < least):
        raise UserError(
            f"the most tokens of an answer must be a whole number of at least {least}, got {shown(most)}"
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
        or len(stop) > STOPS
        or any(len(str(x)) > LONGEST_STOP for x in stop)
    ):
        raise UserError(f"stop must be at most {STOPS} texts of at most {LONGEST_STOP} characters")
    named = {name: body.get(name, default) for name, default in SAMPLING.items()} | {
        "stop": stop,
        "logit_bias": {int(token): value for token, value in bias.items()},
        "logprobs": logprobs,
    }
    if type(named["top_k"]) is int and named["top_k"] == -1:
        # vLLM's word for all
        named["top_k"] = 0
    # equal answers are sampled one by one
    named["n"] = n if named["temperature"] else 1
    SamplingParams(**named)

    def sampling(most: int) -> SamplingParams:
        own = secrets.randbits(31) if seed is None else seed & 0x7FFFFFFF
        return SamplingParams(max_new_tokens=most, seed=own, **named)

    return {
        "sampling": sampling,
        "most": most,
        "n": n,
        "stream": body.get("stream", False),
        "include_usage": bool(options.get("include_usage")),
        "usage_in_pieces": bool(options.get("continuous_usage_stats")),
        "context": context,
    }


def read_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates take it. Raises UserError for what is none."""
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
    found = message | {"role": "system" if role == "developer" else role, "content": content}
    if calls is not None:
        found["tool_calls"] = [_called(call) for call in calls] if isinstance(calls, list) else _called(calls)
    return found


def _called(call: Any) -> dict[str, Any]:
    """Return a call of an earlier turn with its arguments as an object, as templates show them."""
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
    """Return the tools that may be called; None: none."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if tools is None or tools == []:
        if choice not in ("auto", "none"):
            raise UserError("tool_choice needs tools")
        return None
    if not isinstance(tools, list):
        raise UserError(f"tools must be a list of tools, got {shown(tools)}")
    for one in tools:
        function = one.get("function") if isinstance(one, dict) and one.get("type") == "function" else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not _is_schema(function.get("parameters"))
        ):
            raise UserError(
                f"a tool must be {{'type': 'function', 'function': {{'name': …}}}}, got {shown(one)}"
            )
    several = body.get("parallel_tool_calls", True)
    one_of("request", "parallel_tool_calls", several, (True, False))
    if choice == "none":
        return None
    if choice in ("auto", "required"):
        return Tools(tools, choice, several=several)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if all(one["function"]["name"] != name for one in tools):
        raise UserError(f"tool_choice must be none, auto, required or one of the tools, got {shown(choice)}")
    return Tools(tools, "required", name, several)


def _is_schema(parameters: Any) -> bool:
    """Return True for an object whose definitions are objects, or for none."""
    if not isinstance(parameters, dict):
        return parameters is None
    return all(isinstance(parameters.get(key, {}), dict) for key in DEFINITIONS)


def _schema(wanted: Any) -> Any:
    """Return the JSON schema of a response format; None: there is none."""
    kind = wanted.get("type") if isinstance(wanted, dict) else wanted
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = wanted.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema", {}), dict):
        raise UserError(
            f"response_format must be text, json_object or a json_schema with a schema, got {shown(wanted)}"
        )
    return schema.get("schema", {"type": "object"})
