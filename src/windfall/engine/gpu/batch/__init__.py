"""Several requests at a time on a GPU: a KV cache in pages, and rounds of draft passes and one shared verify pass.

Every row of a pass belongs to one request, its owner, and every request has a page table. Committed keys and values lie
in the pages of their request. Rows of trees are staged after all pages, and accepted ones are copied into the pages. So
pages never hold rejected rows, and requests whose texts begin alike can share pages.

`runner` launches rounds and collects their results one round later. A budget fixes the sizes of a round before it
starts, from the results of earlier rounds. `round` is the work of one round, `round_graphs` its CUDA graphs, `state`
what the device knows of each request, `page_pool` which pages are free or known. `target`, `drafters` and `sampler` run
the passes. `prefill` and `chunks` process prompts: while texts run, a few waiting rows share verify passes, and longer
prompts get passes of their own, one between two rounds. `results` makes Steps when they are read, and `learning` uses
the time in which the host would wait. `rehearsal` captures and measures the usual rounds before the first request.

Requests that need the host in every cycle run in the host loop, on the same KV cache (`paged_cache`): `paged_target`
verifies the trees of all of them in one pass.

The last token of a known beginning is computed again, because the drafter needs the target's state there. When weights
change, all known pages are dropped.
"""
