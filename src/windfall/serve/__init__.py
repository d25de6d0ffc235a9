"""The OpenAI API over an engine: `make_app` returns an ASGI application, `windfall serve` runs it.

A request passes the middleware (`request_log`, `errors`, `guard`) and reaches its route (`chat`, `completions`,
`tokenize`), which reads it with `protocol`. `backend` says what they need of an engine. `admission` is the backend in
the process of the engine: it submits texts, or refuses them if too many wait (`places`). `workers` runs the application
in processes of its own. `texts` follows the texts, and `streaming` writes server-sent events.

The event loop never waits for a model: texts are awaited, prompts are tokenized in other threads (`prompt_threads`),
and grammars of clients are compiled on trial in another process (`grammars`). With many texts, Steps that arrive within
a short pause are sent together, because sending every Step would take longer than generating it.

`tools`, `tool_calls`, `tool_parser` and `tool_stream` handle tool calls, `structured` and `grammars` structured output,
`logprobs` log-probabilities. `metrics`, `health` and `live` read the engine's counters. The live page in `page/` is
plain HTML, CSS and JavaScript without a build step; `app.js` connects its parts.
"""
