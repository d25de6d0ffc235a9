"""Sample prompts, one for each kind of task."""

SAMPLES = (
    "Write a short poem about rain on a tin roof.",
    "Explain step by step how to work out 17 times 24 without a calculator.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "Correct the spelling and change nothing else: The quik brown fox jumpd over the lazy dog. The dog was not amuzed.",
    "List five things to check before a long bicycle ride, each with one sentence of advice.",
    "What is the difference between weather and climate?",
)
