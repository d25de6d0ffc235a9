"""Generate many texts at once, and print one of them while it is generated."""

import windfall

with windfall.load() as engine:
    rivers = [engine.submit(f"Name a river in {place}.", max_new_tokens=32) for place in ("Asia", "Africa", "Europe")]
    story = engine.submit("Tell a story.", temperature=0.8, max_new_tokens=64, deadline=60)
    for step in story:  # as it is generated, together with the others
        print(step.text, end="", flush=True)
    print(f"\nseed {story.seed}, ended by {story.result().finish_reason}")
    for handle in rivers:
        print(handle.result().text)
