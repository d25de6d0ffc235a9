"""Turns prompts into token ids. This module does not import torch before it is given a tensor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any, Protocol

from jinja2 import TemplateError

from windfall.core.errors import InputError
from windfall.core.fewest_tokens import FewestTokens, fewest_tokens
from windfall.core.files import is_unicode
from windfall.core.wording import counted, first_line

TEMPLATE_INPUTS = ("messages", "conversations", "self")  # of a chat template, besides the tokenizer's parameters
LONG_TEXT = 65_536  # characters from which tokenizing a text takes long
Prompt = Any  # text, chat messages ({"role", "content"}), or token ids


class ModelInfo(Protocol):
    """What is known of a model without running it. A Target has it."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def context(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> tuple[int, ...]: ...


class PromptEncoder:
    """The prompts of a model."""

    def __init__(self, model: ModelInfo):
        self.model = model

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """See `Engine.encode`."""
        how: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs, "limited": True}
        ids = self.tokenize(prompt, raw, tools, **how) if _is_text(prompt) else _as_ids(prompt)
        vocabulary = self.model.vocab_size
        if not ids:
            raise InputError("the prompt is empty")
        self._check_length(len(ids))
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise InputError(f"token ids must be between 0 and {vocabulary - 1}")
        return ids

    def tokenize(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        special: bool | None = None,
        generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limited: bool = False,
    ) -> list[int]:
        """See `Engine.tokenize`."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise InputError("this target has no tokenizer; give the prompt as token ids")
        own = _checked_variables(tokenizer, chat_template_kwargs or {})
        try:
            if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
                if limited:
                    self._check_size(prompt)
                return list(tokenizer(prompt, add_special_tokens=special is not False).input_ids)
            if not tokenizer.chat_template:
                raise InputError(f"{self.model.name} has no chat template; give the prompt as text")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            how = {"add_generation_prompt": generation_prompt, **({"tools": tools} if tools else {})}
            chat = partial(tokenizer.apply_chat_template, messages, **how, **own)
            if limited and size_of([messages, tools]) > LONG_TEXT:
                self._check_size(chat(tokenize=False))
            return list(tokenizer(chat(tokenize=False)).input_ids if special else chat(return_dict=False))
        except TypeError as error:
            reason = "the prompt is not valid Unicode text"
            if not isinstance(prompt, str) and all(is_unicode(str(message.get("content"))) for message in prompt):
                reason = f"a chat message is {{'role': text, 'content': text}}; the template says: {first_line(error)}"
            raise InputError(reason) from None
        except TemplateError as error:
            raise InputError(f"the chat template of {self.model.name} refuses these messages: {error}") from None
        except (ValueError, KeyError, AttributeError) as error:
            if not chat_template_kwargs:
                raise
            reason = (
                f"the chat template of {self.model.name} cannot use these chat_template_kwargs: {first_line(error)}"
            )
            raise InputError(reason) from None

    def _check_size(self, text: str) -> None:
        """Refuse a text that surely has too many tokens: to tokenize it would take seconds."""
        if len(text) > LONG_TEXT and self._fewest is not None:
            self._check_length(self._fewest.of(text), "at least ")

    def _check_length(self, tokens: int, about: str = "") -> None:
        """Refuse a prompt with this number of tokens if the target takes fewer."""
        context = self.model.context
        if context is not None and tokens >= context:
            has = f"{about}{counted(tokens, 'token')}"
            raise InputError(f"the prompt has {has}; {self.model.name} takes {context - 1} at most")

    @cached_property
    def _fewest(self) -> FewestTokens | None:
        return fewest_tokens(self.model.tokenizer)


def _checked_variables(tokenizer: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of a chat template, without the names of what the engine gives it, and of settings of the tokenizer."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if taken := [name for name in given if name in own or name in TEMPLATE_INPUTS]:
        raise InputError(f"chat_template_kwargs cannot set '{taken[0]}'")
    return given


def size_of(part: Any) -> int:
    """The characters of a text, or of all texts in messages and tools; token ids have none."""
    if isinstance(part, str):
        return len(part)
    if isinstance(part, dict):
        return sum(map(size_of, part.values()))
    return sum(map(size_of, part)) if isinstance(part, list | tuple) and not isinstance((*part[:1], "")[0], int) else 0


def _is_text(prompt: Prompt) -> bool:
    """Whether this is text or chat messages."""
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(m, dict) for m in prompt)


def _as_ids(prompt: Prompt) -> list[int]:
    """Token ids as a list, from a list or tensor of one prompt."""
    if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and not prompt):
        raise InputError("the prompt is empty")
    if isinstance(prompt, list) and set(map(type, prompt)) == {int}:
        return list(prompt)  # a tensor of them takes longer
    import torch

    try:
        ids = torch.as_tensor(prompt)
        whole = ids.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        found: list[int] = ids.flatten().tolist() if ids.numel() == ids.shape[-1] else []
    except (TypeError, ValueError, RuntimeError, IndexError):
        whole = False
    if not whole or not found:
        raise InputError("a prompt is text, a list of chat messages, or the token ids of one prompt")
    return found
