"""Answer a prompt with draft trees and without: the same text, and how many tokens each pass of the model gave.

python examples/generate.py "Name three rivers."
"""

import sys

import windfall

prompt = " ".join(sys.argv[1:]) or "Name three rivers."
engine = windfall.load()  # the embedded model and its own draft head
answer = engine.generate(prompt, max_new_tokens=64)
print(answer.text)
print(f"{answer.stats.tokens} tokens, {answer.stats.tau:.2f} per pass, {answer.stats.seconds:.1f} s")

plain = windfall.load(policy="none").generate(prompt, max_new_tokens=64)
print("the same text as plain decoding:", plain.token_ids == answer.token_ids)
