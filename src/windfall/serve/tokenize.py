"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from windfall.core.errors import InputError
from windfall.engine.prompts import ModelInfo, size_of
from windfall.serve.backend import Backend
from windfall.serve.calls import read
from windfall.serve.messages import messages_for, tools_for
from windfall.serve.protocol import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest


def tokenize_routes(backend: Backend) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Tokenized:
        asked = await read(request, backend, TokenizeRequest)
        characters = size_of(asked.model_dump(include={"prompt", "messages", "tools"}))
        return await backend.prompts.run(characters, _tokenize, backend, asked)

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Detokenized:
        asked = await read(request, backend, DetokenizeRequest)
        return await asyncio.to_thread(_detokenize, backend.model, asked.tokens)

    return routes


def _tokenize(backend: Backend, asked: TokenizeRequest) -> Tokenized:
    model, encoder = backend.model, backend.encoder
    messages, special = asked.messages, asked.add_special_tokens
    if messages is None:
        tokens = encoder.tokenize(asked.prompt, raw=True, special=special)
    else:
        given, tools = messages_for(model, messages), tools_for(model, asked.tools)
        how = (asked.add_generation_prompt, asked.chat_template_kwargs)
        tokens = encoder.tokenize(given, False, tools, special, *how)
    return Tokenized(
        count=len(tokens),
        max_model_len=model.context,
        tokens=tokens,
        token_strs=model.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None,
    )


def _detokenize(model: ModelInfo, tokens: list[int]) -> Detokenized:
    tokenizer, vocabulary = model.tokenizer, model.vocab_size
    if tokenizer is None:
        raise InputError("detokenize needs a tokenizer; this model has none")
    if not all(0 <= token < vocabulary for token in tokens):
        raise InputError(f"token ids must be between 0 and {vocabulary - 1}")
    return Detokenized(prompt=tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
