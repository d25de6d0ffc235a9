"""Print an answer while it is generated, with `|` after the tokens of each forward pass of the model.

python examples/stream.py "Tell me about rivers."
"""

import sys

import windfall

prompt = " ".join(sys.argv[1:]) or "Tell me about rivers."
engine = windfall.load()
passes = accepted = 0
for step in engine.stream(prompt, temperature=0.8, seed=7, max_new_tokens=64):
    print(step.text, end="|", flush=True)
    passes, accepted = passes + 1, accepted + step.accepted
print(f"\n{passes} passes, {accepted} drafted tokens accepted")
