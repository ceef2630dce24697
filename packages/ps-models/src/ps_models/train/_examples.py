"""Read examples: a prompt with its completion, or a conversation. Their answers are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ps_core._errors import InvalidInput

ALLOWED = 'a JSON text, or an object with a text under "text", with "prompt" and "completion", or with "messages"'


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt with its completion; with ``messages``, a conversation instead."""

    place: str
    """The file and the line, in words, for messages."""
    prompt: str = ""
    completion: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """As the chat templates of transformers take them: a mapping with ``role`` and ``content`` each. (Any: JSON.)"""


Document: TypeAlias = bytes | Example
"""A text, all of which is trained, or an example."""


def key_of(document: Document) -> bytes:
    """Return bytes that are equal for equal documents in any file."""
    if isinstance(document, bytes):
        return document
    return json.dumps([document.prompt, document.completion, document.messages], sort_keys=True).encode()


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
    if "messages" in given:
        return Example(place=place, messages=_messages(given["messages"], place))
    if "prompt" in given or "completion" in given:
        prompt, completion = given.get("prompt"), given.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise InvalidInput(
                f'{place} has a "prompt" or a "completion" that is no text, or lacks one of them; allowed are two texts'
            )
        return Example(place=place, prompt=prompt, completion=completion)
    text = given.get("text")
    if not isinstance(text, str):
        raise _refusal(place, shown)
    return text.encode("utf-8", "surrogatepass")


def _refusal(place: str, shown: str) -> InvalidInput:
    return InvalidInput(f"{place} is {shown}; allowed is {ALLOWED}")


def _messages(found: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """Check a conversation. (Any: JSON.)"""
    rows = tuple(found) if isinstance(found, list | tuple) else ()
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not isinstance(row.get("role"), str) or "content" not in row:
            raise InvalidInput(
                f'{place}: message {number} is no object with "role" and "content"; allowed is for example '
                '{"role": "user", "content": "Hello"}'
            )
    if not any(row["role"] == "assistant" for row in rows):
        raise InvalidInput(
            f'{place}: "messages" has nothing of the role "assistant", whose answers are what is trained; allowed is a '
            "list with at least one"
        )
    return rows
