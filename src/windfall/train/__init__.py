"""Training.

Data: `sources` reads prompts, `data` lets the target answer them with an engine, `shards` stores the texts.
Heads and small models: `heads` and `lm` are the two jobs (`jobs`); `trainer` is the loop, `recipe` its settings,
`teacher` the target's states, `objectives` what is trained (`unroll`, `block_memory`), `new_heads` and `new_block`
untrained heads (`target_layers`), `tree_tau` the tokens per pass of a head.
Losses: `row_losses` compares distributions, `coupling` draws noise for that, `mixtures` parses names and weights,
`losses` fuses them with the vocabulary, `block_losses` with that of block heads, `step_weights` weighs draft steps.
Learned policies of papers: `classifiers` (disco, specdecpp, c2t) and `rl` (LTD).
"""
