"""Use a tokenizer of transformers in a folder, with its chat template.

[Note: answers]
In a conversation the answers are trained: what the assistant's messages add to the text. A template with ``{%
generation %}`` marks says itself what that is. With another template two texts are compared. The first is the
conversation up to the answer. The second is the conversation before it with the prompt for an answer. The answer is
what the first has beyond the second, so its end mark is included. Both are texts of the template, and the whole text
has to begin with them. The whole text is cut into tokens once, so the tokens are those of other texts. A token that
begins before an answer is no part of it. Where a line tells prompt and completion apart, all of the completion is the
answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ps_core._errors import InvalidInput
from ps_models.train._import_transformers import transformers_for

_PROBE = "a"
_MARK = re.compile(r"{%-?\s*generation\b")


class FolderTokenizer:
    """A tokenizer that ``AutoTokenizer`` reads from a folder."""

    def __init__(self, folder: Path, option: str) -> None:
        """Read the tokenizer; ``option``: the option that names the folder, for messages."""
        library = transformers_for(option, folder)
        try:
            # Any, as for all of transformers. It raises whatever its parts raise.
            self.tokenizer: Any = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise InvalidInput(
                f"{option}: cannot read the tokenizer in {str(folder)!r}: {' '.join(str(error).split())}; allowed is a "
                "folder that save_pretrained of a tokenizer has written"
            ) from None
        if self.tokenizer.eos_token_id is None:
            raise InvalidInput(
                f"{option}: the tokenizer in {str(folder)!r} has no token that ends a text; allowed is one with an "
                "eos_token"
            )
        self.end: int = self.tokenizer.eos_token_id
        self.mask: int | None = self.tokenizer.mask_token_id
        self.first: int | None = self.tokenizer.cls_token_id
        self.vocabulary: int = max(len(self.tokenizer), self.end + 1)
        self.start = self._start()
        self.digest = self._digest()
        self._type = torch.int16 if self.vocabulary <= 2**15 else torch.int32

    def _start(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text, such as ``<s>``."""
        bare = self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        whole = self.tokenizer(_PROBE)["input_ids"]
        places = range(len(whole) - len(bare) + 1)
        at = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
        return tuple(whole[:at])

    def _digest(self) -> str:
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        tokens = json.dumps(self.tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str()
        told = [tokens, self.tokenizer.chat_template, self.end, self.start]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def encode(self, document: bytes) -> Tensor:
        """Encode a document; see `Tokenizer`."""
        text = document.decode("utf-8", "replace")
        # A text longer than the model's longest is cut into sequences later.
        return torch.tensor(
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=self._type
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; see `Tokenizer`."""
        text: str = self.tokenizer.decode([token for token in tokens if token not in (self.end, *self.start)])
        return text

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], asked: int = 0, template: Mapping[str, Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Encode a conversation; see `Tokenizer`, and [Note: answers]."""
        found = self.tokenizer.chat_template
        if found is None:
            raise ValueError("the tokenizer has no chat template; allowed is one with a template (chat_template.jinja)")
        messages, more = _without_lone_surrogates(messages), _without_lone_surrogates(template or {})
        write = partial(self._text, more)
        try:
            _check_contents(messages, write)
            if not asked and isinstance(found, str) and _MARK.search(found):
                return self._marked(messages, more)
            text, spans = write(messages), list(_answers(messages, asked, write))
        except ValueError:
            raise
        except Exception as error:  # jinja's, and what templates raise themselves
            raise ValueError(f"the chat template refuses it: {' '.join(str(error).split())}") from None
        if not self.tokenizer.is_fast:
            raise ValueError(
                "where answers begin is known of fast tokenizers only; allowed is one with a tokenizer.json, or a "
                "template with {% generation %} marks"
            )
        coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        answers = [any(start <= at < end for start, end in spans) for at, _ in coded["offset_mapping"]]
        return list(coded["input_ids"]), answers

    def _marked(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        coded = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template
        )
        return list(coded["input_ids"]), [bool(each) for each in coded["assistant_masks"]]

    def _text(self, template: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
        """Return the template's text; ``asks``: with the prompt for an answer at the end."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=asks, **template
        )
        return text


def _check_contents(messages: Sequence[Mapping[str, Any]], write: Callable[..., str]) -> None:
    """Raise `ValueError` if a list of parts would be trained as Python prints it, for the template takes texts."""
    for number, message in enumerate(messages, 1):
        content = message["content"]
        if isinstance(content, list | dict) and str(content) in write(messages):
            raise ValueError(
                f"the chat template takes no parts for the content of message {number}; allowed is a text, as in "
                '{"role": "user", "content": "Hello"}'
            )


def _answers(messages: Sequence[Mapping[str, Any]], asked: int, write: Callable[..., str]) -> Iterator[tuple[int, int]]:
    """Yield where each answer begins and ends in the text; ``write`` returns the text of messages."""
    whole = write(messages)
    for number in [asked] if asked else range(len(messages)):
        if not asked and messages[number]["role"] != "assistant":
            continue
        before = write(messages[:number], asks=True) if number else ""
        after = whole if asked else write(messages[: number + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                f"the chat template writes message {number + 1} otherwise once others follow, so where it begins "
                "is not known; allowed is a template with {% generation %} marks, or conversations with one answer"
            )
        yield len(before), len(after)


def _without_lone_surrogates(found: Any) -> Any:
    """Replace lone surrogates, which JSON can hold and no tokenizer takes. (Any: JSON.)"""
    if isinstance(found, str):
        return found.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(found, Mapping):
        return {key: _without_lone_surrogates(value) for key, value in found.items()}
    return [_without_lone_surrogates(each) for each in found] if isinstance(found, list | tuple) else found
