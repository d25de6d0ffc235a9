"""What the papers on adaptive draft trees published: their tables as data, shown beside what was measured here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Published(NamedTuple):
    """One cell of a paper's table."""

    paper: str
    table: str
    model: str
    method: str
    task: str
    temperature: float
    tau: float | None  # tokens per target pass, the target's own token included
    speedup: float | None  # over plain decoding
    tokens_per_second: float | None = None


class Setting(NamedTuple):
    """How a paper measured."""

    hardware: str
    drafter: str
    baseline: str
    note: str = ""


SETTINGS = {
    "SALF & TALF": Setting(
        "one A100 80 GB",
        "EAGLE heads trained by its authors",
        "plain decoding in transformers, batch 1",
        "For DeepSeek, Table 1 gives for EAGLE-2 and HASS what Table 2 gives for optimal trees with their heads.",
    ),
    "DynaTree": Setting("one A100", "Pythia 70M for Pythia 2.8B", "plain decoding in transformers, batch 1"),
    "GT": Setting("four RTX 4090", "Vicuna 68M, or EAGLE heads", "plain decoding in each release, batch 1"),
    "TALON": Setting("one H200", "the published EAGLE-3 heads", "plain decoding, batch 1"),
    "LTD": Setting(
        "one A100",
        "the published EAGLE-3 heads",
        "plain decoding, batch 1, 80 questions a task",
        "Its EAGLE-3 verifies 60 nodes for the 8B models and 50 for the 13B one.",
    ),
}

# Which of our policies does what a method of a paper does. The drafters differ: see SETTINGS.
POLICIES = {
    "EAGLE-2": ("beam",),
    "EAGLE-3": ("beam",),
    "EAGLE-3 + grid search": ("beam",),
    "HASS": ("beam",),
    "SALF & TALF": ("salf",),
    "beam, EAGLE head": ("beam",),
    "beam, HASS head": ("beam",),
    "beam, TALF head": ("beam",),
    "optimal, EAGLE head": ("optimal",),
    "optimal, HASS head": ("optimal",),
    "optimal, TALF head": ("optimal",),
    "SALF, EAGLE head": ("salf",),
    "SALF, HASS head": ("salf",),
    "SALF, TALF head": ("salf",),
    "linear": ("chain",),
    "SD": ("chain",),
    "fixed tree": ("fixed-tree",),
    "DynaTree": ("dynatree",),
    "Sequoia": ("sequoia",),
    "GT, static": ("gt-static",),
    "GT, dynamic": ("gt",),
    "TALON": ("talon",),
    "OPT-Tree": ("opt-tree",),
    "Medusa": ("static", "medusa"),
    "Hydra": ("hydra",),
    "DDD": ("ddd",),
    "SVIP": ("svip",),
    "GammaTune": ("gammatune",),
    "C2T": ("c2t",),
    "DISCO": ("disco",),
    "SpecDec++": ("specdec++", "specdecpp"),
    "LTD": ("ltd",),
}
TASKS = {  # our tasks, without case and punctuation
    "mtbench": "MT-bench",
    "specbenchmt": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "specbenchmath": "GSM8K",
    "alpaca": "Alpaca",
    "cnndm": "CNN/DM",
    "specbenchsummarization": "CNN/DM",
    "naturalquestions": "QA",
    "specbenchqa": "QA",
    "specbenchtranslation": "translation",
    "specbenchrag": "RAG",
    "wikitext2": "WikiText-2",
    "pg19": "PG-19",
    "books": "PG-19",  # both are old books
    "qa": "QA",
    "sum": "CNN/DM",
    "summarization": "CNN/DM",
    "mathreasoning": "GSM8K",
    "translation": "translation",
    "rag": "RAG",
}
MEAN = "mean"  # the paper's own mean over its tasks


def published() -> list[Published]:
    """Every cell of the tables below."""
    return [cell for table in TABLES for cell in _cells(*table)] + list(_dynatree()) + list(_gt_costs())


def of_policy(policy: str, temperature: float | None = None) -> list[Published]:
    """What was published for the method that a policy implements."""
    return [cell for cell in published() if policy in POLICIES[cell.method] and temperature in (None, cell.temperature)]


def task_name(task: str) -> str | None:
    """The papers' name for a task, e.g. "gsm8k" -> "GSM8K"; None where they have no such task."""
    return TASKS.get(bare(task))


def bare(name: str) -> str:
    """Without case and punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def difference(paper: str) -> str:
    """How a paper measured, in a sentence."""
    how = SETTINGS[paper]
    return f"{how.hardware}, drafted by {how.drafter}; the baseline is {how.baseline}. {how.note}".strip()


def _cells(paper: str, table: str, temperature: float, tasks: str, rows: str) -> Iterator[Published]:
    """A row is `model | method | cells`; a cell is speed-up and tau, or the speed-up alone."""
    for row in rows.strip().splitlines():
        model, method, numbers = (part.strip() for part in row.split("|"))
        for task, cell in zip(tasks.split(), numbers.split(), strict=True):
            speedup, _, tau = cell.partition("/")
            yield Published(
                paper,
                table,
                model,
                method,
                task.replace("_", " "),
                temperature,
                float(tau) if tau else None,
                float(speedup),
            )


def _dynatree() -> Iterator[Published]:
    """Tables 1 (tokens/s, speed-up) and 3 (tokens per target pass)."""
    for row in DYNATREE.strip().splitlines():
        task, method, *numbers = (part.strip() for part in row.split("|"))
        speed, speedup, tau = map(float, numbers)
        yield Published("DynaTree", "Tables 1 and 3", "Pythia 2.8B", method, task, 0.0, tau, speedup, speed)


def _gt_costs() -> Iterator[Published]:
    """Table 4: speed by the cost ratio c."""
    for c, speed, length in GT_COSTS:
        yield Published("GT", f"Table 4, c={c}", "Vicuna 7B", "GT, dynamic", "MT-bench", 0.0, length, None, speed)


TABLES: tuple[tuple[str, str, float, str, str], ...] = (
    (
        "SALF & TALF",
        "Table 1",
        0.0,
        "MT-bench HumanEval GSM8K Alpaca CNN/DM mean",
        """
Llama-2-7B-Chat | EAGLE-2 | 2.71 3.09 2.81 2.59 2.26 2.68
Llama-2-7B-Chat | HASS | 2.95 3.39 3.00 2.75 2.51 2.91
Llama-2-7B-Chat | SALF & TALF | 3.11 3.48 3.19 3.02 2.72 3.09
Llama-3.1-8B-Instruct | EAGLE-2 | 2.10 2.44 2.21 2.11 1.82 2.13
Llama-3.1-8B-Instruct | HASS | 2.33 2.89 2.58 2.35 2.05 2.42
Llama-3.1-8B-Instruct | SALF & TALF | 2.79 3.25 2.99 2.81 2.56 2.87
DeepSeek-R1-Distill-Llama-8B | EAGLE-2 | 1.94 2.09 2.11 1.84 1.69 1.93
DeepSeek-R1-Distill-Llama-8B | HASS | 2.02 2.21 2.23 1.91 1.72 2.01
DeepSeek-R1-Distill-Llama-8B | SALF & TALF | 2.48 2.64 2.66 2.40 2.19 2.47
""",
    ),
    (
        "SALF & TALF",
        "Table 1",
        1.0,
        "MT-bench HumanEval GSM8K Alpaca CNN/DM mean",
        """
Llama-2-7B-Chat | EAGLE-2 | 2.52 2.94 2.72 2.42 2.20 2.55
Llama-2-7B-Chat | HASS | 2.78 3.10 2.96 2.76 2.36 2.78
Llama-2-7B-Chat | SALF & TALF | 2.96 3.25 3.19 3.00 2.67 3.01
Llama-3.1-8B-Instruct | EAGLE-2 | 1.54 2.20 1.90 1.73 1.56 1.77
Llama-3.1-8B-Instruct | HASS | 1.68 2.53 2.15 2.00 1.73 2.00
Llama-3.1-8B-Instruct | SALF & TALF | 2.14 2.94 2.65 2.46 2.23 2.47
DeepSeek-R1-Distill-Llama-8B | EAGLE-2 | 1.70 1.94 2.01 1.70 1.58 1.78
DeepSeek-R1-Distill-Llama-8B | HASS | 1.79 2.02 2.09 1.74 1.59 1.84
DeepSeek-R1-Distill-Llama-8B | SALF & TALF | 2.22 2.46 2.54 2.21 2.03 2.28
""",
    ),
    (
        "SALF & TALF",
        "Table 2",
        0.0,
        "MT-bench HumanEval GSM8K Alpaca CNN/DM mean",
        """
DeepSeek-R1-Distill-Llama-8B | beam, EAGLE head | 1.76/3.42 1.91/3.76 1.95/3.80 1.66/3.21 1.51/2.98 1.75/3.44
DeepSeek-R1-Distill-Llama-8B | beam, HASS head | 1.84/3.61 2.03/3.98 2.09/4.04 1.75/3.39 1.55/3.06 1.84/3.62
DeepSeek-R1-Distill-Llama-8B | beam, TALF head | 1.98/3.87 2.16/4.23 2.26/4.42 1.85/3.59 1.66/3.28 1.97/3.88
DeepSeek-R1-Distill-Llama-8B | optimal, EAGLE head | 1.94/3.54 2.09/3.87 2.11/3.88 1.84/3.36 1.69/3.13 1.93/3.56
DeepSeek-R1-Distill-Llama-8B | optimal, HASS head | 2.02/3.70 2.21/4.08 2.23/4.10 1.91/3.47 1.72/3.17 2.01/3.70
DeepSeek-R1-Distill-Llama-8B | optimal, TALF head | 2.19/3.98 2.34/4.30 2.44/4.49 2.04/3.71 1.84/3.40 2.16/3.98
DeepSeek-R1-Distill-Llama-8B | SALF, EAGLE head | 2.31/3.33 2.44/3.68 2.39/3.58 2.26/3.18 2.07/2.93 2.29/3.34
DeepSeek-R1-Distill-Llama-8B | SALF, HASS head | 2.41/3.60 2.55/3.99 2.52/3.96 2.30/3.39 2.12/3.09 2.37/3.61
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.48/3.73 2.64/4.07 2.66/4.16 2.40/3.50 2.19/3.20 2.47/3.73
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.0",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.19/3.98 2.34/4.30 2.44/4.49 2.32/4.26
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.1",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.25/3.99 2.36/4.31 2.46/4.49 2.36/4.26
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.2",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.37/3.97 2.46/4.31 2.56/4.49 2.46/4.26
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.3",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.45/3.94 2.58/4.30 2.63/4.45 2.55/4.23
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.4",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.49/3.90 2.62/4.26 2.64/4.38 2.58/4.18
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.5",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.52/3.82 2.65/4.17 2.69/4.29 2.62/4.10
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.6",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.48/3.73 2.64/4.07 2.66/4.16 2.59/3.99
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.7",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.47/3.59 2.63/3.92 2.65/3.99 2.58/3.83
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.8",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.39/3.38 2.54/3.72 2.59/3.78 2.51/3.63
""",
    ),
    (
        "SALF & TALF",
        "Table 4, th=0.9",
        0.0,
        "MT-bench HumanEval GSM8K mean",
        """
DeepSeek-R1-Distill-Llama-8B | SALF, TALF head | 2.27/3.11 2.43/3.40 2.43/3.44 2.37/3.32
""",
    ),
    (
        "GT",
        "Table 1",
        0.0,
        "MT-bench translation CNN/DM QA GSM8K RAG mean",
        """
Vicuna 7B | Sequoia | 2.07/3.20 1.84/3.35 2.28/3.87 2.39/3.61 2.11/3.34 2.03/3.72 2.12/3.52
Vicuna 7B | GT, static | 2.17/2.96 1.92/3.12 2.32/3.53 2.41/3.29 2.18/3.31 2.11/3.41 2.19/3.27
Vicuna 13B | Sequoia | 1.81/3.07 1.60/2.57 2.14/3.68 1.96/3.18 2.09/3.30 1.94/3.54 1.92/3.23
Vicuna 13B | GT, static | 1.86/3.03 1.71/2.52 2.20/3.69 1.99/3.16 2.12/3.27 1.95/3.52 1.97/3.20
Vicuna 33B | Sequoia | 1.99/2.98 1.87/2.75 2.14/3.35 2.06/3.06 2.01/3.02 1.99/3.32 2.01/3.08
Vicuna 33B | GT, static | 2.01/2.97 1.84/2.70 2.24/3.34 2.16/3.05 2.01/3.02 2.05/3.33 2.05/3.07
Vicuna 7B | EAGLE-2 | 3.06/4.76 1.70/3.22 2.42/3.95 2.35/3.70 2.74/4.88 2.14/3.95 2.40/4.36
Vicuna 7B | GT, dynamic | 3.17/5.09 2.01/3.17 2.57/3.95 2.46/3.74 2.81/5.04 2.23/3.96 2.54/4.52
Vicuna 13B | EAGLE-2 | 2.85/4.80 2.06/3.32 2.54/4.13 2.26/3.52 3.32/4.80 2.30/4.25 2.56/4.43
Vicuna 13B | GT, dynamic | 3.12/5.15 2.10/3.27 2.73/4.18 2.41/3.48 3.27/5.17 2.40/4.13 2.67/4.62
Vicuna 33B | EAGLE-2 | 3.06/4.29 2.06/3.16 2.57/3.81 2.24/3.27 3.26/4.79 2.39/3.64 2.61/4.06
Vicuna 33B | GT, dynamic | 3.11/4.44 2.19/3.13 2.63/3.81 2.33/3.25 3.37/5.06 2.40/3.60 2.68/4.15
""",
    ),
    (
        "TALON",
        "Table 1",
        0.0,
        "Alpaca GSM8K HumanEval MT-bench QA CNN/DM",
        """
Vicuna 13B | EAGLE-3 | 3.78/6.61 3.87/6.74 4.77/8.31 4.05/7.12 3.03/5.24 3.43/6.93
Vicuna 13B | SD | 1.30/2.19 1.19/2.20 1.47/2.86 1.29/2.51 1.20/1.97 1.41/2.63
Vicuna 13B | Medusa | 1.90/2.44 2.05/2.63 2.18/2.78 2.01/2.58 1.62/2.10 1.56/2.09
Vicuna 13B | Hydra | 2.40/3.51 2.53/3.66 2.67/3.87 2.46/3.64 1.95/2.88 1.86/2.82
Vicuna 13B | OPT-Tree | 3.71/6.56 3.65/6.77 4.35/8.21 3.75/6.95 3.10/5.22 3.22/6.91
Vicuna 13B | TALON | 3.94/6.36 3.99/6.80 5.16/9.48 4.27/7.29 3.26/5.03 3.58/7.20
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 | 3.23/5.64 4.24/7.40 3.85/6.70 3.33/5.82 2.86/5.02 2.89/5.03
DeepSeek-R1-Distill-Llama-8B | TALON | 3.46/5.18 4.43/7.46 3.96/6.28 3.56/5.45 3.12/4.66 3.14/4.75
Llama-3.1-8B-Instruct | EAGLE-3 | 3.92/6.93 3.63/6.42 4.05/7.08 3.67/6.38 3.01/5.36 3.06/5.46
Llama-3.1-8B-Instruct | TALON | 4.04/6.51 3.81/6.24 4.20/7.28 3.85/6.22 3.27/5.09 3.30/5.28
Qwen3 8B | EAGLE-3 | 2.08/3.45 2.37/3.92 2.35/3.89 2.20/3.64 2.09/3.46 1.95/3.27
Qwen3 8B | TALON | 2.44/3.39 2.67/3.85 2.69/3.78 2.57/3.60 2.46/3.41 2.30/3.20
Qwen3 32B | EAGLE-3 | 1.83/2.75 2.22/3.36 1.96/2.98 1.90/2.98 1.78/2.66 1.57/2.57
Qwen3 32B | TALON | 2.05/2.72 2.38/3.30 2.15/2.96 2.10/2.94 1.99/2.64 1.72/2.54
""",
    ),
    (
        "TALON",
        "Table 3",
        1.0,
        "Alpaca GSM8K HumanEval MT-bench QA CNN/DM",
        """
Vicuna 13B | EAGLE-3 | 3.15/5.61 3.29/5.95 3.78/6.77 3.21/5.79 2.64/4.72 2.96/6.01
Vicuna 13B | SD | 1.11/1.84 1.08/1.84 1.29/2.27 1.13/2.04 1.05/1.71 1.23/2.21
Vicuna 13B | Medusa | 2.19/2.83 2.20/2.82 2.35/2.97 2.22/2.84 1.92/2.49 1.69/2.26
Vicuna 13B | Hydra | 2.86/4.23 2.73/3.98 2.91/4.18 2.77/4.06 2.25/3.31 2.07/3.15
Vicuna 13B | OPT-Tree | 3.21/5.56 3.25/5.97 3.53/6.47 3.16/5.69 2.77/4.86 2.79/5.84
Vicuna 13B | TALON | 3.28/5.43 3.35/5.82 3.97/7.25 3.38/5.88 2.82/4.63 2.96/5.95
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 | 2.49/4.48 3.58/6.43 3.04/5.47 2.55/4.56 2.25/4.04 2.39/4.32
DeepSeek-R1-Distill-Llama-8B | TALON | 2.75/4.29 3.70/6.44 3.25/5.30 2.81/4.44 2.54/3.91 2.63/4.17
Llama-3.1-8B-Instruct | EAGLE-3 | 2.85/5.19 2.51/4.59 3.46/6.24 2.20/3.96 1.72/3.12 2.42/4.44
Llama-3.1-8B-Instruct | TALON | 3.15/5.21 2.84/4.74 3.56/6.40 2.58/4.13 2.08/3.20 2.62/4.33
Qwen3 8B | EAGLE-3 | 1.95/3.32 2.24/3.81 2.20/3.77 2.02/3.46 1.87/3.17 1.85/3.17
Qwen3 8B | TALON | 2.25/3.28 2.50/3.74 2.51/3.70 2.32/3.41 2.17/3.15 2.11/3.11
Qwen3 32B | EAGLE-3 | 1.67/2.55 2.10/3.22 1.89/2.95 1.75/2.74 1.61/2.44 1.51/2.46
Qwen3 32B | TALON | 1.84/2.53 2.27/3.17 2.07/2.91 1.92/2.71 1.77/2.41 1.64/2.43
""",
    ),
    (
        "LTD",
        "Table 1",
        0.0,
        "MT-bench GSM8K Alpaca QA mean",
        """
Llama-3.1-8B-Instruct | EAGLE-3 | 3.70/6.39 3.58/6.44 4.26/6.93 3.17/5.35 3.68/6.28
Llama-3.1-8B-Instruct | DDD | 3.67/5.41 3.55/5.48 3.97/5.58 3.07/4.21 3.57/5.17
Llama-3.1-8B-Instruct | SVIP | 3.65/6.21 3.47/6.21 4.04/6.73 3.12/4.78 3.57/5.98
Llama-3.1-8B-Instruct | GammaTune | 3.79/5.86 3.64/5.77 4.37/6.49 3.38/4.92 3.80/5.76
Llama-3.1-8B-Instruct | C2T | 3.80/6.39 3.57/6.44 4.19/6.93 3.25/5.36 3.70/6.28
Llama-3.1-8B-Instruct | DISCO | 3.70/6.11 3.56/6.18 4.14/6.51 3.22/5.05 3.66/5.96
Llama-3.1-8B-Instruct | SpecDec++ | 3.82/6.09 3.65/6.08 4.29/6.70 3.28/5.23 3.76/6.03
Llama-3.1-8B-Instruct | EAGLE-3 + grid search | 3.83/6.75 3.78/6.91 4.38/7.42 3.33/5.67 3.83/6.69
Llama-3.1-8B-Instruct | LTD | 3.96/6.74 3.79/6.73 4.53/7.31 3.41/5.44 3.92/6.56
Vicuna 13B | EAGLE-3 | 4.48/7.22 4.36/6.58 4.16/6.47 3.43/5.12 4.11/6.35
Vicuna 13B | DDD | 4.15/6.69 4.25/6.22 3.98/5.50 3.22/4.34 3.90/5.69
Vicuna 13B | SVIP | 4.02/7.74 3.86/6.79 3.77/6.53 3.02/4.96 3.67/6.51
Vicuna 13B | GammaTune | 4.15/6.85 4.07/6.00 3.94/6.09 3.35/4.81 3.88/5.94
Vicuna 13B | C2T | 4.33/7.22 3.97/6.58 3.93/6.47 3.23/5.12 3.87/6.35
Vicuna 13B | DISCO | 4.48/7.08 4.13/6.49 4.02/6.29 3.31/5.05 3.99/6.23
Vicuna 13B | SpecDec++ | 4.25/6.78 4.09/6.16 4.00/6.27 3.21/5.03 3.89/6.06
Vicuna 13B | EAGLE-3 + grid search | 4.53/7.99 4.47/7.27 4.38/7.16 3.51/5.48 4.22/6.98
Vicuna 13B | LTD | 4.64/8.24 4.59/7.38 4.40/7.01 3.66/5.37 4.32/7.00
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 | 3.67/5.82 4.73/7.39 3.65/5.63 3.14/5.02 3.80/5.53
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 + grid search | 3.69/6.42 4.83/8.37 3.54/6.24 3.20/5.55 3.82/6.08
DeepSeek-R1-Distill-Llama-8B | LTD | 4.05/6.32 4.98/8.53 3.98/6.00 3.62/5.37 4.16/6.08
Qwen3 14B | EAGLE-3 + grid search | 2.34/3.40 2.75/3.95 2.15/2.90 1.86/2.65 2.28/3.23
Qwen3 14B | LTD | 2.44/3.34 2.82/3.92 2.24/2.87 1.98/2.62 2.37/3.19
Qwen3 32B | EAGLE-3 + grid search | 1.76/3.30 2.26/4.10 1.75/2.96 1.45/2.67 1.81/3.26
Qwen3 32B | LTD | 2.42/3.17 3.02/3.90 2.38/2.85 2.06/2.60 2.47/3.13
""",
    ),
    (
        "LTD",
        "Table 5",
        1.0,
        "MT-bench GSM8K Alpaca QA mean",
        """
Llama-3.1-8B-Instruct | EAGLE-3 | 2.85/4.11 3.43/5.24 3.38/5.47 2.27/3.06 2.98/4.47
Llama-3.1-8B-Instruct | DDD | 2.89/3.40 3.35/4.09 3.38/4.59 2.36/2.95 3.00/3.76
Llama-3.1-8B-Instruct | SVIP | 2.74/3.41 3.21/4.92 3.19/4.95 2.31/3.20 2.86/4.12
Llama-3.1-8B-Instruct | GammaTune | 2.75/3.54 3.28/4.27 3.51/5.12 2.46/3.24 3.00/4.04
Llama-3.1-8B-Instruct | C2T | 2.78/4.11 3.28/5.24 3.24/5.47 2.27/3.06 2.89/4.47
Llama-3.1-8B-Instruct | DISCO | 2.82/3.82 3.26/5.08 3.30/5.18 2.20/2.88 2.90/4.24
Llama-3.1-8B-Instruct | SpecDec++ | 2.92/4.20 3.33/4.74 3.42/5.51 2.35/3.28 3.01/4.43
Llama-3.1-8B-Instruct | EAGLE-3 + grid search | 2.79/4.08 3.36/5.50 3.46/5.79 2.31/3.40 2.98/4.69
Llama-3.1-8B-Instruct | LTD | 2.85/4.02 3.35/5.09 3.43/5.68 2.39/3.26 3.01/4.51
Vicuna 13B | EAGLE-3 | 3.60/5.55 3.68/5.64 3.40/5.49 3.08/4.64 3.44/5.33
Vicuna 13B | DDD | 3.40/5.05 3.58/5.46 3.43/5.00 2.96/4.11 3.34/4.91
Vicuna 13B | SVIP | 3.18/5.73 3.26/5.78 3.21/5.39 2.61/4.44 3.07/5.34
Vicuna 13B | GammaTune | 3.43/5.36 3.32/5.26 3.39/4.95 2.99/4.44 3.28/5.00
Vicuna 13B | C2T | 3.38/5.66 3.41/5.63 3.27/5.54 2.83/4.65 3.22/5.37
Vicuna 13B | DISCO | 3.48/5.55 3.67/5.74 3.36/5.51 2.88/4.59 3.35/5.35
Vicuna 13B | SpecDec++ | 3.61/5.58 3.64/5.63 3.34/5.39 3.02/4.55 3.40/5.29
Vicuna 13B | EAGLE-3 + grid search | 3.58/6.30 3.81/6.39 3.61/6.01 3.00/4.93 3.50/5.91
Vicuna 13B | LTD | 3.82/6.40 3.75/6.38 3.65/6.20 3.26/4.97 3.62/5.99
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 | 3.07/4.74 3.97/6.89 2.79/4.53 2.44/4.06 3.07/4.66
DeepSeek-R1-Distill-Llama-8B | EAGLE-3 + grid search | 3.05/5.19 4.14/7.64 2.76/4.83 2.33/4.44 3.07/5.03
DeepSeek-R1-Distill-Llama-8B | LTD | 3.18/5.20 4.02/7.95 2.83/4.76 2.57/4.39 3.15/5.09
Qwen3 14B | EAGLE-3 + grid search | 2.05/3.13 2.62/3.83 2.04/2.78 1.68/2.57 2.10/3.08
Qwen3 14B | LTD | 2.16/3.11 2.73/3.85 2.11/2.76 1.82/2.55 2.21/3.07
Qwen3 32B | EAGLE-3 + grid search | 1.56/2.89 2.10/3.95 1.63/2.73 1.33/2.46 1.66/3.01
Qwen3 32B | LTD | 2.17/2.78 2.83/3.76 2.16/2.59 1.88/2.41 2.26/2.89
""",
    ),
)
DYNATREE = """
WikiText-2 | linear | 196.1 | 1.47 | 6.82
WikiText-2 | fixed tree | 200.7 | 1.50 | 6.79
WikiText-2 | DynaTree | 219.5 | 1.64 | 7.08
PG-19 | linear | 144.9 | 1.26 | 4.56
PG-19 | fixed tree | 185.5 | 1.62 | 6.20
PG-19 | DynaTree | 194.9 | 1.70 | 6.17
"""
DYNATREE_ABLATION = (  # Table 4, WikiText-2: tokens/s, speed-up
    ("fixed tree, depth 5, breadth 2", 188.0, 1.42),
    ("+ dynamic breadth and depth", 213.2, 1.61),
    ("+ history", 218.5, 1.65),
)
GT_COSTS = (  # c, tokens/s, tau
    (0.01, 77.6, 5.57),
    (0.05, 89.74, 5.41),
    (0.1, 91.92, 5.29),
    (0.109, 93.92, 5.28),
    (0.11, 95.55, 5.25),
    (0.111, 94.82, 5.23),
    (0.12, 93.55, 5.21),
    (0.15, 91.92, 5.13),
    (0.2, 88.3, 5.06),
    (0.3, 86.97, 4.79),
    (0.4, 83.79, 4.4),
)
TALF_K = (  # SALF & TALF, Table 3: tau on MT-bench, HumanEval, GSM8K
    ("HASS (top-1)", 3.7, 4.08, 4.1),
    ("TALF (top-1)", 3.71, 4.08, 4.31),
    ("TALF (top-2)", 3.83, 4.23, 4.48),
    ("TALF (top-4)", 3.98, 4.3, 4.49),
)
