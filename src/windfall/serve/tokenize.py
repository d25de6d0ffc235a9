"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from windfall.core.errors import InputError
from windfall.engine.engine import Engine, size_of
from windfall.serve.admission import Admission
from windfall.serve.calls import read
from windfall.serve.messages import messages_for, tools_for
from windfall.serve.protocol import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest


def tokenize_routes(admission: Admission) -> APIRouter:
    routes, engine = APIRouter(), admission.engine

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Tokenized:
        asked = await read(request, admission, TokenizeRequest)
        characters = size_of(asked.model_dump(include={"prompt", "messages", "tools"}))
        return await admission.prompts.run(characters, _tokenize, engine, asked)

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Detokenized:
        asked = await read(request, admission, DetokenizeRequest)
        return await asyncio.to_thread(_detokenize, engine, asked.tokens)

    return routes


def _tokenize(engine: Engine, asked: TokenizeRequest) -> Tokenized:
    messages, special = asked.messages, asked.add_special_tokens
    if messages is None:
        tokens = engine.tokenize(asked.prompt, raw=True, special=special)
    else:
        given, tools = messages_for(engine.target, messages), tools_for(engine.target, asked.tools)
        how = (asked.add_generation_prompt, asked.chat_template_kwargs)
        tokens = engine.tokenize(given, False, tools, special, *how)
    return Tokenized(
        count=len(tokens),
        max_model_len=engine.target.context,
        tokens=tokens,
        token_strs=engine.target.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None,
    )


def _detokenize(engine: Engine, tokens: list[int]) -> Detokenized:
    tokenizer, vocabulary = engine.target.tokenizer, engine.target.vocab_size
    if tokenizer is None:
        raise InputError("detokenize needs a tokenizer; this model has none")
    if not all(0 <= token < vocabulary for token in tokens):
        raise InputError(f"token ids must be between 0 and {vocabulary - 1}")
    return Detokenized(prompt=tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
