"""The server in several processes: one has the engine, and the others answer HTTP requests.

The engine's thread and an event loop in one process share Python's interpreter lock, so a fast engine waits for HTTP.
With `windfall serve --http-processes N`, N processes run the application. They tokenize prompts and decode texts. The
process of the engine only generates.

Each HTTP process has a connection to the process of the engine, a pair of sockets with pickled `messages`, over a
`channel`. After a round, one message has the Steps of all texts of an HTTP process.

| module | what it does |
|---|---|
| `hub`, `link` | the engine's side: submits texts, sends Steps; its thread sleeps until a message arrives |
| `client`, `remote_text` | the side of an HTTP process: the backend of its application, and its texts |
| `process` | the main function of an HTTP process. It does not import torch |
| `pool` | starts, restarts and ends the processes |
"""
