"""Training.

Data: `sources` reads prompts, `data` lets the target answer them with an engine, `shards` stores the texts.
Heads and small models: `heads` and `lm` are the two jobs (`jobs`); `trainer` is the loop, `recipe` its settings,
`teacher` the target's states, `objectives` the losses (`losses`, `unroll`, `block_memory`), `new_heads` and `new_block`
untrained heads (`target_layers`).
Learned policies of papers: `classifiers` (disco, specdecpp, c2t) and `rl` (LTD).
"""
