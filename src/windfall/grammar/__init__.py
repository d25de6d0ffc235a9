"""Structured output: which tokens may follow a text, so that it stays within a schema, a pattern or a grammar.

`compile` compiles a constraint once per tokenizer, with the first library that supports all of it. A `Guide` keeps one
text within the grammar:

- Draft: new nodes that are not legal get the probability 0. They are not expanded, and not verified.
- Forced text: if all legal tokens are beginnings of one text, the longest of them becomes a node. It is added after the
  policy has chosen its nodes, and calibrators learn from the cycle without it (`Step.of_policy`). The libraries have
  functions for forced text too, but these may run forever, for example for a grammar whose texts never end.
- Draws: bias, penalties, processors, mask, temperature, filters, in this order.
- End: the walk ends at an end-of-text token. A text to which nothing can be added ends without one.
"""
