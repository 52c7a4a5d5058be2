"""Chat messages to a prompt, by the model's Jinja template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginectl.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import jinja2

    from enginectl.builtin.template_sandbox import TemplateEnvironment

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content part types that are text, and the field that holds it."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# Marks where the final message ends. The trailing space tells whether the template trims messages.
END_MARK = "\ue0feEND-OF-FINAL-MESSAGE\ue0ff "
PROBE = "xprobex"


def given_template(chat_template: str) -> str:
    """The text of `--chat-template`, a file or the text itself. Raises ConfigError if it is missing or has a mistake."""
    text = chat_template
    if not text.strip():
        raise ConfigError("--chat-template is empty; give a Jinja file, or the template's text")
    if "{" not in text and "\n" not in text:
        try:
            text = Path(chat_template).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(
                f"--chat-template {chat_template}: cannot be read: {reason}; give a Jinja file, or the template's text"
            ) from error
    try:
        ChatTemplates({"default": text}, {}).check("default")
    except RequestError as error:
        raise ConfigError(f"--chat-template: {error}") from error
    return text


@dataclass(frozen=True, slots=True)
class Compiled:
    """A template ready to run. takes_text, takes_parts: forms of a message's content it renders."""

    environment: TemplateEnvironment
    template: jinja2.Template
    takes_text: bool
    takes_parts: bool

    def render(self, variables: dict[str, Any]) -> str:
        """Raises RequestError with the template's own words."""
        try:
            return self.environment.rendered(self.template, variables)
        except Exception as error:  # a template is foreign code: whatever it raises is the request's fault
            raise _template_error("the chat template refused these messages", error) from error


class ChatTemplates:
    """A model's templates by name, compiled on first use. Safe to use from several threads."""

    def __init__(self, named: dict[str, str], special_tokens: dict[str, str]) -> None:
        self.named = named
        self._special_tokens = special_tokens
        self._compile: Callable[[str, bool], Compiled] = lru_cache(maxsize=32)(self._compile_source)

    def check(self, name: str) -> None:
        """Compile a named template now. Raises RequestError if it has a mistake."""
        self._compile(self.named[name], False)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        chat_template: str | None,
        kwargs: dict[str, Any],
    ) -> str:
        """The prompt for these messages.

        add_generation_prompt: end with the opening of the assistant's turn. continue_final_message: leave the final
        message open instead. chat_template: a name of the model's templates, or a template's text, which then runs
        under a budget. kwargs: more variables for the template.
        Contents given as lists of text parts become one text (joined by newlines) where the template wants texts, and
        the other way round; tool-call arguments given as JSON text become objects.
        Raises RequestError (400) with the reason: no template, wrong messages, or the template's own refusal.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        if reserved := RESERVED & kwargs.keys():
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(reserved))}", param="chat_template_kwargs"
            )
        compiled = self._chosen(chat_template, tools)
        chat = [_prepared(message, compiled, i) for i, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(chat)
        variables = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        text = compiled.render({**self._special_tokens, **kwargs, **variables, "messages": chat})
        return _cut_at_mark(text) if continue_final_message else text

    def _chosen(self, chat_template: str | None, tools: object) -> Compiled:
        if chat_template is not None:
            if chat_template in self.named:
                return self._compile(self.named[chat_template], False)
            return self._compile(chat_template, chat_template not in self.named.values())
        if tools and "tool_use" in self.named:
            return self._compile(self.named["tool_use"], False)
        if "default" in self.named:
            return self._compile(self.named["default"], False)
        known = f" (it has these by name: {', '.join(sorted(self.named))})" if self.named else ""
        raise RequestError(
            f"the model has no default chat template{known}; start the server with --chat-template FILE, "
            "or send the prompt to /v1/completions",
            param="messages",
            code="no_chat_template",
        )

    @cached_property
    def _environment(self) -> TemplateEnvironment:
        from enginectl.builtin.template_sandbox import TemplateEnvironment

        return TemplateEnvironment()

    @cached_property
    def _guarded_environment(self) -> TemplateEnvironment:
        from enginectl.builtin.template_sandbox import GuardedEnvironment

        return GuardedEnvironment()

    def _compile_source(self, source: str, guarded: bool) -> Compiled:
        environment = self._guarded_environment if guarded else self._environment
        try:
            template = environment.compiled(source)
            takes_text, takes_parts = self._forms(environment, template)
        except Exception as error:  # syntax errors, what deep nesting does to a compiler, an exhausted budget
            raise _template_error("the chat template cannot be used", error, param="chat_template") from error
        return Compiled(environment, template, takes_text, takes_parts)

    def _forms(self, environment: TemplateEnvironment, template: jinja2.Template) -> tuple[bool, bool]:
        """Which forms of content come through, found by rendering one message in each."""
        takes_text = PROBE in self._probe(environment, template, PROBE)
        with_parts = self._probe(environment, template, [{"type": "text", "text": PROBE}])
        takes_parts = PROBE in with_parts and f"'{PROBE}'" not in with_parts and f'"{PROBE}"' not in with_parts
        return takes_text or not takes_parts, takes_parts

    def _probe(self, environment: TemplateEnvironment, template: jinja2.Template, content: object) -> str:
        chat = [{"role": "user", "content": content}]
        variables = {"tools": None, "documents": None, "add_generation_prompt": False, "messages": chat}
        try:
            return environment.rendered(template, {**self._special_tokens, **variables})
        except Exception as error:  # it cannot render this form, or this conversation at all
            if environment.is_over_budget(error):
                raise
            return ""


def _template_error(what: str, error: Exception, param: str = "messages") -> RequestError:
    reason = str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return RequestError(f"{what}: {reason}" + (f" (line {line})" if line else ""), param=param, code="chat_template")


def _prepared(message: object, compiled: Compiled, index: int) -> dict[str, Any]:
    """A copy of one message in the forms templates expect. Fields that are null are left out, as if not sent."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] must be an object with a role", param=f"messages[{index}]")
    out = {key: value for key, value in message.items() if value is not None}
    if "content" in out:
        out["content"] = _content(out["content"], compiled, f"messages[{index}].content")
    if "tool_calls" in out:
        out["tool_calls"] = [_tool_call(call, f"messages[{index}].tool_calls") for call in out["tool_calls"]]
    reasoning = next((out[key] for key in REASONING_FIELDS if key in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    return out


def _content(content: object, compiled: Compiled, param: str) -> Any:
    if isinstance(content, str):
        return content if compiled.takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{param} must be a text or a list of parts, found {type(content).__name__}", param=param)
    texts = [_part_text(part, param) for part in content]
    if compiled.takes_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: object, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in TEXT_PARTS:
        raise RequestError(
            f"{param} has a part of type {kind!r}; this model reads text only ({', '.join(TEXT_PARTS)})", param=param
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{param} has a {kind} part without text", param=param)
    return text


def _tool_call(call: Any, param: str) -> Any:
    """Templates want arguments as an object; the API carries them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{param}: each call needs a function object", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{param}: arguments are not JSON: {error}", param=param) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Append the mark to the final message's text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + END_MARK
    elif content:
        content[-1]["text"] += END_MARK
    else:
        raise RequestError("continue_final_message needs a final message with content", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    """Everything before the mark; if the template trims messages, so is the one left open."""
    end = text.rfind(END_MARK.rstrip())
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template drops or changes the final message",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(END_MARK, end) else text[:end].rstrip()
