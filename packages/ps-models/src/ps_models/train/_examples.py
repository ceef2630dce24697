"""Read examples: a prompt with its completion, or a conversation. Their answers are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ps_core._errors import InvalidInput

ALLOWED = 'a JSON text, or an object with a text under "text", with "prompt" and "completion", or with "messages"'
_NAMES = {"from": "role", "value": "content"}
"""Other names of what a message has, which TRL takes, too."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt with its completion; with ``messages``, a conversation instead."""

    place: str
    """The file and the line, in words, for messages."""
    prompt: str = ""
    completion: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """As the chat templates of transformers take them: a mapping with ``role`` and ``content`` each. (Any: JSON.)"""
    asked: int = 0
    """How many messages are the prompt, and all that follow the completion; 0: the assistant's are what is trained."""
    template: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the chat template gets besides: ``tools``, and the line's own ``chat_template_kwargs``."""


Document: TypeAlias = bytes | Example
"""A text, all of which is trained, or an example."""


def key_of(document: Document) -> bytes:
    """Return bytes that are equal for equal documents in any file."""
    if isinstance(document, bytes):
        return document
    told: list[Any] = [document.prompt, document.completion, document.messages]
    if document.asked or document.template:
        told += [document.asked, document.template]
    return json.dumps(told, sort_keys=True).encode()


def document_of(found: Any, place: str, shown: str) -> Document:
    """Return the document in a JSON value or a table's row; raise `InvalidInput` if there is none.

    ``place`` and ``shown``: the file and the line, and the line's beginning, for the message. (Any: JSON.)
    """
    if isinstance(found, str):
        found = {"text": found}
    if not isinstance(found, Mapping):
        raise _refusal(place, shown)
    # A table has every column in every row.
    given = {name: value for name, value in found.items() if value is not None}
    if "conversations" in given:
        given.setdefault("messages", given["conversations"])
    if "messages" in given:
        rows = _messages(given["messages"], place)
        if not any(row["role"] == "assistant" for row in rows):
            raise InvalidInput(
                f'{place}: "messages" has nothing of the role "assistant", whose answers are what is trained; allowed '
                "is a list with at least one"
            )
        return Example(place=place, messages=rows, template=_template(given, place))
    if "prompt" in given or "completion" in given:
        prompt, completion = given.get("prompt"), given.get("completion")
        if isinstance(prompt, list | tuple) and isinstance(completion, list | tuple) and prompt and completion:
            rows = _messages([*prompt, *completion], place)
            return Example(place=place, messages=rows, asked=len(prompt), template=_template(given, place))
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise InvalidInput(
                f'{place} has a "prompt" or a "completion" that is no text, or lacks one of them; allowed are two '
                "texts, or two lists of messages"
            )
        return Example(place=place, prompt=prompt, completion=completion)
    text = given.get("text")
    if not isinstance(text, str):
        raise _refusal(place, shown)
    return text.encode("utf-8", "surrogatepass")


def _refusal(place: str, shown: str) -> InvalidInput:
    return InvalidInput(f"{place} is {shown}; allowed is {ALLOWED}")


def _messages(found: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a conversation. (Any: JSON.)"""
    rows = [_named(row) for row in found] if isinstance(found, list | tuple) else []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not isinstance(row.get("role"), str) or "content" not in row:
            raise InvalidInput(
                f'{place}: message {number} is no object with "role" and "content"; allowed is for example '
                '{"role": "user", "content": "Hello"}'
            )
    return tuple(rows)


def _named(row: Any) -> Any:
    """Return a message under the names that templates know; what a table has no value for is left out. (Any: JSON.)"""
    if not isinstance(row, Mapping):
        return row
    return {_NAMES.get(name, name): value for name, value in row.items() if value is not None or name == "content"}


def _template(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return what a line gives to the chat template besides its messages. (Any: JSON.)"""
    tools, more = given.get("tools"), given.get("chat_template_kwargs", {})
    if isinstance(tools, str):  # a table has no other place for objects of different kinds
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = "no JSON"
    if not isinstance(tools, list | None) or not isinstance(more, Mapping):
        raise InvalidInput(
            f'{place}: allowed are a list under "tools" (or its JSON as a text), and an object under '
            '"chat_template_kwargs"'
        )
    return {**({"tools": tools} if tools else {}), **more}
