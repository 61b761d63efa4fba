"""Prompts as rows bring them, read as messages: JSON in text, nulls that Parquet adds, and what no model here can see."""

import json
import re
from typing import Any

MEDIA = ("image", "images", "video", "videos", "audio", "audios")

_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{[^{}]{0,200}?['"]?role['"]?\s*:""")
_PLACEHOLDER = re.compile(r"<(?:image|video|audio)>|<\|(?:image|video|audio)(?:_pad)?\|>")


class PromptError(ValueError):
    """A prompt that cannot be rendered as it is meant; the message says why."""


def as_messages(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as messages without nulls: text is a user's turn, unless it is messages written as JSON."""
    if isinstance(prompt, str):
        prompt = _from_text(prompt)
    messages: list[dict[str, Any]] = without_nulls(prompt)
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {i} is not an object with text in 'role' and 'content'")
        content = message.get("content")
        if isinstance(content, list):
            kinds = sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content})
            raise PromptError(f"message {i} has content in parts ({', '.join(kinds)}); only text is read")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise PromptError(f"message {i} is not an object with text in 'role' and 'content'")
        if content and (placeholder := _PLACEHOLDER.search(content)):
            raise PromptError(f"message {i} has {placeholder.group()}; pictures, videos and sound are not supported")
    if not any((message.get("content") or "").strip() for message in messages):
        raise PromptError("it is empty")
    return messages


def _from_text(text: str) -> list[dict[str, Any]]:
    if _LIST_OF_OBJECTS.match(text):
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found):
            return found
        if found is None and _LOOKS_LIKE_MESSAGES.match(text):
            raise PromptError("it looks like messages but is no JSON; write a list of messages, or JSON")
    return [{"role": "user", "content": text}]


def as_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools of a row (a list, or one written as JSON) without nulls; None if there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise PromptError(f"'tools' is text that is no JSON ({error})") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError("'tools' is not a list of objects")
    return without_nulls(tools)


def without_nulls(value: Any) -> Any:
    """The value without the keys that are null: Parquet gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def media_in(row: dict[str, Any]) -> str | None:
    """The first column of a row that holds pictures, videos or sound."""
    return next((name for name in MEDIA if row.get(name) not in (None, [], "")), None)
