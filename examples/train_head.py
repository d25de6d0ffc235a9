"""Train a draft head in Python: the target answers prompts, and the head learns from the answers and then drafts.

The example uses far too little data and time for a good head, so windfall will warn that it rarely agrees with the
target. It shows all steps of a real training.

python examples/train_head.py FOLDER [PROMPTS.jsonl]
"""

import json
import sys
from pathlib import Path

import windfall
from windfall.bench.tasks import builtin
from windfall.train.data import Settings, make_data
from windfall.train.heads import HeadJob, train_head
from windfall.train.recipe import Recipe

if len(sys.argv) < 2:
    sys.exit(__doc__)
folder = Path(sys.argv[1])
if (folder / "data").exists():
    sys.exit(f"'{folder}' contains the data of an earlier run; choose another folder")
folder.mkdir(parents=True, exist_ok=True)
prompts = folder / "prompts.jsonl"
if len(sys.argv) > 2:
    prompts = Path(sys.argv[2])
else:
    prompts.write_text("".join(json.dumps({"turns": each.turns}) + "\n" for each in builtin()[::5]))

writer = windfall.load(policy="none")  # of the embedded model; or give a folder, hub id, model object
make_data(writer, [str(prompts)], folder / "data", Settings(max_new_tokens=32, held_out=0.3))

job = HeadJob(folder / "data", folder / "head", method="ttt", light=True, shape={"vocabulary": 4096})
recipe = Recipe(steps=6, batch_tokens=512, max_length=128, validate_every=3, validation_batches=1)
for event in train_head(job, recipe, writer.target):
    print(f"step {event.step}: loss {event.loss:.2f}", *(f"{hit:.2f}" for hit in event.hits))

engine = windfall.load(writer.target, drafter=str(folder / "head" / "best"), policy="beam")
print(f"{engine.generate('Name three rivers.', max_new_tokens=24).stats.tau:.2f} tokens per pass")
