"""Answer a prompt with and without draft trees, and check that both texts are the same.

python examples/generate.py "Name three rivers."
"""

import sys

import windfall

prompt = " ".join(sys.argv[1:]) or "Name three rivers."
engine = windfall.load()  # the embedded model and its draft head
answer = engine.generate(prompt, max_new_tokens=64)
print(answer.text)
print(f"{answer.stats.tokens} tokens, {answer.stats.tau:.2f} per pass, {answer.stats.seconds:.1f} s")

plain = windfall.load(policy="none").generate(prompt, max_new_tokens=64)
print("same text as plain decoding:", plain.token_ids == answer.token_ids)
