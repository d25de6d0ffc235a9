"""Markdown tables from the results of benchmarks. `tables.py` puts them into the documentation.

A renderer takes results by name; some may be missing. It returns lines of Markdown, and notes about the measurement.
This module needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Result = Any  # the content of a JSON file
Results = dict[str, Result]
Body = tuple[list[str], str]  # lines of Markdown, and a sentence about the measurement, or nothing

PLAIN, AUTO = "none", "auto"
OURS = "windfall"
ENGINES = ("transformers", "vLLM", OURS)  # in the order of a table
WIDENED = "8B cost: "  # before rows of models that are zero-padded to the size of an 8B model
PRODUCT_ROWS = ("1", "4", "16", "32", "64", "128", "320")  # shown if more than MAX_COLUMNS were measured
MAX_COLUMNS = 8
SHAPES = {
    "smollm2-135m": "SmolLM2-135M",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "gemma-3-4b": "Gemma-3-4B",
}
BEFORE, NOW = "chunks of 128 rows", "now"  # how prompts are processed
LOOPS = {"HF generate": "transformers `generate`", "HF continuous": "transformers continuous batching"}
ARRIVALS = {"batch": "requests are submitted together", "stream": "a request is submitted whenever one ends"}
CANCELLED, DEADLINE = "cancelled", "deadline"  # finish reasons
PRICES = {"": "exact-price", WIDENED: "exact-price-8b"}  # results by the mark of their rows
DRAFT_PHASES = {"": "draft-phase", WIDENED: "draft-phase-8b"}
TEXTS = (  # results and modes of benchmarks/exact.py, in the order of the table
    ("exact-texts", "exact"),
    ("exact-texts-fp16", "exact"),
    ("exact-price", "exact"),
    ("exact-price-8b", "exact"),
    ("exact-price", "fast"),
    ("exact-price-8b", "fast"),
)
BATCH_TEMPERATURES = 2  # benchmarks/batch_texts.py generates each prompt greedily and at temperature 1


# ---- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A table whose first `left` columns are text, and all others numbers."""
    rule = "|" + "|".join("---" if place < left else "---:" for place in range(len(head))) + "|"
    return [line(head), rule, *map(line, rows)]


def line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return "".join(f"| {cell} " if cell else "| " for cell in escaped) + "|"


def code(name: str) -> str:
    return f"`{name}`"


def number(value: float | None, form: str = ".2f", factor: float = 1) -> str:
    """A number, or nothing if it is not known."""
    return "" if value is None else f"{factor * value:,{form}}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return number(value, ".1f" if value is not None and value < 99.95 else ".0f")


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def regime(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def in_order(policies: Iterable[str]) -> list[str]:
    """Each once: plain decoding first, `auto` last."""
    return sorted(dict.fromkeys(policies), key=lambda name: (name == AUTO) - (name == PLAIN))


# ---- exact passes


def exact_price(found: Results) -> Body:
    """Tokens per second of exact and of fast passes (benchmarks/exact.py)."""
    sizes = {mark: found[name]["rows"] for mark, name in PRICES.items() if name in found}
    temperatures = sorted({row["temperature"] for rows in sizes.values() for row in rows})
    head = [""]
    for temperature in temperatures:
        head += [f"{regime(temperature)}: exact", "`--fast`", "ratio"]
    lines = []
    for mark, rows in sizes.items():
        known = {(row["policy"], row["temperature"], row["mode"]): row for row in rows}
        for policy in in_order(row["policy"] for row in rows):
            cells = [f"{mark}{code(policy)}"]
            for temperature in temperatures:
                exact, fast = (known.get((policy, temperature, mode), {}) for mode in ("exact", "fast"))
                cells += [rate(each.get("tokens_per_second")) for each in (exact, fast)]
                cells.append(number(exact.get("of_fast")))
            lines.append(cells)
    tokens = listed(list(dict.fromkeys(f"{found[name]['tokens']:,}" for name in PRICES.values() if name in found)))
    losses = [_losses(mark, rows) for mark, rows in sizes.items()]
    cycles = _longer_cycles([row for rows in sizes.values() for row in rows])
    return table(head, lines), " ".join(filter(None, [*losses, cycles, f"Texts have up to {tokens} new tokens."]))


def _longer_cycles(rows: list[dict[str, Any]]) -> str:
    """A sentence: how much longer cycles take, and what the rest of the difference is."""
    shares = [row["cycle_of_fast"] for row in rows if row["mode"] == "exact" and "cycle_of_fast" in row]
    if not shares:
        return ""
    longest = max(round(100 * (1 / min(shares) - 1)), 0)
    return (
        f"A cycle takes up to {longest}% longer in exact passes. The rest of a difference comes from the "
        "texts: those that differ with `--fast` may be easier or harder to draft."
    )


def _losses(mark: str, rows: list[dict[str, Any]]) -> str:
    """A sentence: how much speed exact passes cost each policy."""
    parts = []
    for policy in in_order(row["policy"] for row in rows):
        own = [row for row in rows if (row["policy"], row["mode"]) == (policy, "exact")]
        lost = sorted(max(round(100 * (1 - row["of_fast"])), 0) for row in own if "of_fast" in row)
        if lost:
            share = f"{lost[0]}%" if lost[0] == lost[-1] else f"{lost[0]} to {lost[-1]}%"
            name = "plain decoding" if policy == PLAIN else code(policy)
            parts.append(f"{name} {share}" if parts else f"{name} loses {share}")
    if not parts:
        return ""
    return f"At 8B cost, {listed(parts)}." if mark else f"Compared with `--fast`, {listed(parts)}."


def exact_texts(found: Results) -> Body:
    """Texts that differ from plain decoding's (benchmarks/exact.py, benchmarks/batch_texts.py)."""
    lines = []
    for name, mode in TEXTS:
        cells = _compared(found[name], mode) if name in found else None
        repeats = (name, mode) == ("exact-price", "exact") and "exact-texts" in found  # some prompts of the first row
        if cells is not None and (not repeats or cells[-1] != "0"):
            lines.append(cells)
    batches = found.get("batch-texts", {"rows": []})
    for way in dict.fromkeys(row["way"] for row in batches["rows"]):
        own = [row for row in batches["rows"] if row["way"] == way]
        lines.append(_texts_row(way, batches["dtype"], own[0]["texts"] // BATCH_TEMPERATURES, own))
    head = ("", "dtype", "policies", "prompts", "texts", "different")
    about = "Texts of batches are compared with texts that were generated alone." if "batch-texts" in found else ""
    return table(head, lines, left=3), about


def _compared(result: Result, mode: str) -> list[str] | None:
    """The row of a mode of benchmarks/exact.py; None if it was not run."""
    own = [row for row in result["rows"] if row["mode"] == mode and row["policy"] != PLAIN]
    if not own:
        return None
    name = "`--fast`" if mode == "fast" else "exact passes"
    return _texts_row(f"{name}, 8B cost" if result.get("widened_to") else name, result["dtype"], own[0]["texts"], own)


def _texts_row(name: str, dtype: str, prompts: int, rows: list[dict[str, Any]]) -> list[str]:
    policies = ", ".join(code(policy) for policy in dict.fromkeys(row["policy"] for row in rows))
    counts = (sum(row[key] for row in rows) for key in ("texts", "different"))
    return [name, dtype.removeprefix("torch."), policies, f"{prompts:,}", *(f"{count:,}" for count in counts)]


# ---- kernels and passes


def products(found: Results) -> Body:
    """Times of matrix products relative to cuBLAS (benchmarks/products.py)."""
    rows = found["products"]["products"]
    sizes = list(rows[0]["ratio"])
    if len(sizes) > MAX_COLUMNS:
        sizes = [size for size in sizes if size in PRODUCT_ROWS]
    lines = [
        [
            *(row["model"], row["product"], f"{row['outputs']:,} x {row['inputs']:,}"),
            *(number(row["ratio"].get(size)) for size in sizes),
        ]
        for row in rows
    ]
    return table(("model", "product", "outputs x inputs", *sizes), lines, left=3), ""


def shapes(found: Results) -> Body:
    """Exact passes of models with random weights (benchmarks/shapes.py)."""
    result = found["shapes"]
    sizes = [size for size in result["shapes"][0]["exact"]["verify_us"] if size != "1"]
    head = ["shape", "weights of a step, GB", "floor, ms", "step, ms", "over floor"]
    head += [size if place else f"pass over {size} rows, ms" for place, size in enumerate(sizes)]
    lines = []
    for row in result["shapes"]:
        own = row["exact"]
        cells = [
            SHAPES.get(row["name"], row["name"]),
            number(row["bytes"], ".1f", 1e-9),
            number(row["floor_us"], factor=1e-3),
        ]
        cells += [number(own["step_us"], factor=1e-3), number(own["of_floor"])]
        lines.append([*cells, *(number(own["verify_us"].get(size), factor=1e-3) for size in sizes)])
    about = f"Passes come after {result['length']:,} tokens. A large copy reaches {result['bandwidth_tb_s']:.2f} TB/s."
    return table(head, lines), about


def first_token(found: Results) -> Body:
    """Milliseconds to the first token by the length of the prompt (benchmarks/first_token.py)."""
    now, before = found["first-token"], found.get("first-token-before")
    lengths = list(next(iter(now["milliseconds"].values())))
    lines = []
    for policy, times in now["milliseconds"].items():
        for label, own in ((BEFORE, (before or {}).get("milliseconds", {}).get(policy)), (NOW, times)):
            if own is not None:
                name = f"{code(policy)}, {label}" if before else code(policy)
                lines.append([name, *(number(own.get(length), ".1f") for length in lengths)])
    rounds = listed(list(dict.fromkeys(str(each["rounds"]) for each in (before, now) if each)))
    about = f"Medians of {rounds} different prompts of each length."
    return table(("prompt tokens", *(f"{int(length):,}" for length in lengths)), lines), about


def draft_phase(found: Results) -> Body:
    """Milliseconds of the draft passes of a cycle (benchmarks/draft_phase.py)."""
    sizes = {mark: found[name] for mark, name in DRAFT_PHASES.items() if name in found}
    temperatures = sorted({row["temperature"] for result in sizes.values() for row in result["rows"]})
    result = next(iter(sizes.values()))
    head = ["drafter"]
    for temperature in temperatures:
        head += [f"{regime(temperature)}: first pass", f"all {result['passes']}", "verify pass"]
    lines = []
    for mark, own in sizes.items():
        known = {(row["drafter"], row["temperature"]): row for row in own["rows"]}
        for drafter in dict.fromkeys(row["drafter"] for row in own["rows"]):
            parts = [known.get((drafter, temperature), {}) for temperature in temperatures]
            times = [number(part.get(key), ".3f") for part in parts for key in ("first_ms", "draft_ms", "verify_ms")]
            lines.append([f"{mark}{drafter}", *times])
    about = f"Passes come after {result['length']:,} tokens. Blocks have {result['block']} rows."
    return table(head, lines), about


# ---- many requests


def throughput(found: Results) -> Body:
    """Tokens per second of all requests together, and speed-ups (windfall bench throughput)."""
    (result,) = found.values()
    lines: list[str] = []
    groups = list(dict.fromkeys((row["temperature"], row["arrivals"]) for row in result["rows"]))
    for temperature, arrivals in groups:
        own = [row for row in result["rows"] if (row["temperature"], row["arrivals"]) == (temperature, arrivals)]
        if len(groups) > 1:
            lines += [f"*{regime(temperature).capitalize()}; {ARRIVALS[arrivals]}:*", ""]
        lines += [*_throughput_tables(own), ""]
    settings, notes = result["settings"], []
    for method, reason in dict.fromkeys((row["method"], row["fallback"]) for row in result["rows"] if row["fallback"]):
        notes.append(f"{code(method)} ran on the host loop: {reason}.")
    notes += [_left_out(method, result) for method in dict.fromkeys(each["method"] for each in result["skipped"])]
    ours = [row for row in result["rows"] if row["runner"] != "transformers"]
    texts, same = (sum(row[key] or 0 for row in ours) for key in ("texts", "same_texts"))
    how = f"{regime(groups[0][0])}, {ARRIVALS[groups[0][1]]}, " if len(groups) == 1 else ""
    prompts = f"{counted(settings['limit'], 'prompt')} of each of {counted(len(settings['tasks']), 'task')}"
    about = (
        f"Setting: {how}{prompts}, {_new_tokens(settings)}, medians of {counted(settings['rounds'], 'round')}. "
        f"The shortest run took {min(row['seconds'] / row['rounds'] for row in ours):.2f} s. "
        f"{same:,} of {texts:,} texts are those of plain decoding."
    )
    return lines[:-1], " ".join([about, *notes])


def _left_out(method: str, result: Result) -> str:
    """Why a loop of transformers was left out, and at which numbers of requests if it ran at others."""
    own = [each for each in result["skipped"] if each["method"] == method]
    counts = sorted({each["concurrency"] for each in own})
    where = f" with {listed([f'{count:,}' for count in counts])} requests" if _ran(method, result) else ""
    return f"{LOOPS.get(method, method)} was left out{where}: {own[0]['reason'].rstrip('.')}."


def _ran(method: str, result: Result) -> bool:
    return any(row["method"] == method for row in result["rows"])


def _new_tokens(settings: dict[str, Any], key: str = "max_new_tokens") -> str:
    return f"{'' if settings['ignore_eos'] else 'up to '}{settings[key]:,} new tokens"


def _throughput_tables(rows: list[dict[str, Any]]) -> list[str]:
    """Tokens per second, and speed-ups over plain decoding, by method and number of requests."""
    speeds: dict[str, dict[int, float | None]] = {}
    for row in sorted(rows, key=lambda row: row["runner"] == "transformers"):
        name = LOOPS.get(row["method"]) or code(row["method"])
        speeds.setdefault(name, {})[row["concurrency"]] = row["tokens_per_second"]
    counts = sorted({count for own in speeds.values() for count in own})
    lines = _speed_table(speeds, counts)
    base = speeds.get(code(PLAIN), {})
    gains = [
        [name, *(number(own[n] / base[n]) if own.get(n) and base.get(n) else "" for n in counts)]
        for name, own in speeds.items()
        if name != code(PLAIN)
    ]
    return [*lines, "", *table(("speed-up by requests", *(f"{count:,}" for count in counts)), gains)]


def _speed_table(speeds: dict[str, dict[int, float | None]], counts: list[int]) -> list[str]:
    """Tokens per second by name and number of requests."""
    rows = ([name, *(rate(own.get(count)) for count in counts)] for name, own in speeds.items())
    return table(("tokens/s by requests", *(f"{count:,}" for count in counts)), rows)


def one_request(found: Results) -> Body:
    """One request with an earlier version and with this one (benchmarks/one_request.py)."""
    (result,) = found.values()
    head = ("method", "temperature", "before, tokens/s", "now, tokens/s", "now / before")
    lines = []
    for row in result["rows"]:
        speeds = rate(row["before"]), rate(row["after"]), number(row["after"] / row["before"])
        lines.append([code(row["method"]), f"{row['temperature']:g}", *speeds])
    settings = result["settings"]
    prompts = f"{counted(settings['limit'], 'prompt')} of each of {counted(len(settings['tasks']), 'task')}"
    rounds = counted(settings["rounds"], "round")
    return table(head, lines), f"{prompts}, up to {settings['tokens']:,} new tokens, medians of {rounds}."


def host_requests(found: Results) -> Body:
    """Requests that need the host in every cycle, together and one after the other (benchmarks/host_requests.py)."""
    (result,) = found.values()
    head = ("requests", "at once", "in turn, tokens/s", "together, tokens/s", "together / in turn")
    lines = []
    for row in result["rows"]:
        speeds = row["tokens_per_second"]
        one, other = speeds["in turn"], speeds["together"]
        lines.append([row["kind"], f"{row['requests']}", rate(one), rate(other), number(other / one)])
    settings = result["settings"]
    prompts = f"{counted(settings['limit'], 'prompt')} of each of {counted(len(settings['tasks']), 'task')}"
    different = sum(row["different"] for row in result["rows"])
    return table(head, lines), (
        f"{code(settings['policy'])}, greedy, {prompts}, up to {settings['tokens']:,} new tokens, medians of "
        f"{counted(settings['rounds'], 'round')}; {counted(different, 'text')} differed."
    )


# ---- other engines


def peers(found: Results) -> Body:
    """Tokens per second beside transformers and vLLM, and where `auto` is slower (benchmarks/peers.py)."""
    lines, notes = [], []
    for result in found.values():
        speeds: dict[str, dict[int, float | None]] = {}
        for row in sorted(result["rows"], key=lambda row: ENGINES.index(row["engine"])):
            speeds.setdefault(_peer(row, result), {})[row["requests"]] = row["tokens_per_second"]
        counts = sorted({count for own in speeds.values() for count in own})
        title = f"{result['target']}, {result['dtype']}"
        lines += [f"*{title}:*", "", *_speed_table(speeds, counts), ""]
        notes += [f"{title}:", *_faster_than_auto(speeds, counts), *_peer_notes(result)]
    return lines[:-1], " ".join(notes)


def _peer(row: dict[str, Any], result: Result) -> str:
    """The name of a way in a table."""
    way = row["way"]
    if row["engine"] == OURS:
        return f"windfall, {code(way)}"
    if row["engine"] == "transformers":
        helper = result["settings"].get("assistant")
        names = {"assisted": f"assisted generation{f' with {helper}' if helper else ''}"}
        return f"transformers, {names.get(way) or (way if ' ' in way else code(way))}"
    method, _, tokens = way.partition("-")
    drafts = {"ngram": "n-grams", "eagle3": "EAGLE-3 with windfall's head"}
    return f"{row['engine']}, " + (f"{drafts[method]}, {tokens} tokens" if method in drafts else way)


def _faster_than_auto(speeds: dict[str, dict[int, float | None]], counts: list[int]) -> list[str]:
    """Sentences: what is faster than windfall's default policy, the fastest first, by number of requests."""
    found, own = [], speeds.get(f"windfall, {code(AUTO)}", {})
    for count in counts:
        base = own.get(count)
        gains = {name: (each.get(count) or 0) / base for name, each in speeds.items()} if base else {}
        faster = sorted((name for name, gain in gains.items() if gain > 1), key=lambda name: -gains[name])
        if faster:
            named = listed([f"{name} ({gains[name]:.2f}x)" for name in faster])
            found.append(f"With {counted(count, 'request')}, faster than {code(AUTO)}: {named}.")
    return found or [f"Nothing in this table is faster than windfall's {code(AUTO)}."]


def _peer_notes(result: Result) -> list[str]:
    """Setting, texts, what was left out, and where vLLM ran."""
    settings, rows = result["settings"], result["rows"]
    prompts = f"three prompts for each request at once, and at least {settings['alone']}"
    tasks = f"of {counted(len(settings['tasks']), 'task')} in turn"
    how = f"{regime(settings['temperature'])}, {prompts}, {tasks}, {_new_tokens(settings, 'tokens')}"
    notes = [f"Setting: {how}, prefill included, medians of up to {counted(settings['rounds'], 'round')}."]
    for ours, whose in ((True, "windfall's"), (False, "the other engines'")):
        known = [row for row in rows if row["same_texts"] is not None and (row["engine"], row["way"]) != (OURS, PLAIN)]
        own = [row for row in known if (row["engine"] == OURS) is ours]
        texts, same = (sum(row[key] for row in own) for key in ("texts", "same_texts"))
        notes += [f"{same:,} of {texts:,} of {whose} texts are those of windfall's plain decoding."] if texts else []
    left_out: dict[tuple[str, str], list[int]] = {}
    for each in result["skipped"]:
        counts = left_out.setdefault((_peer(each, result), each["reason"].rstrip(".")), [])
        counts += [each["requests"]] if each["requests"] else []
    for (name, reason), counts in left_out.items():
        where = f" with {listed([f'{count:,}' for count in counts])} requests" if counts else ""
        notes.append(f"{name} was left out{where}: {reason}.")
    if "vllm" in result:
        notes.append(f"For vLLM: {origin(result['vllm'])}.".replace("Measured", "measured"))
    return notes


def serve(found: Results) -> Body:
    """The server beside the bare engine (benchmarks/serve_overhead.py)."""
    head = ["machine", "method", "clients", "HTTP processes", "engine, tokens/s", "server, tokens/s", "overhead"]
    head += [f"{name} p{share}, ms" for name in ("TTFT", "TPOT") for share in (50, 90, 99)]
    lines, notes = [], []
    for result in found.values():
        rows, settings = result["rows"], result["settings"]
        where = hardware(result) if result["device"].startswith("cuda") else "CPU"
        where += f", at the cost of {settings['widen']}" if settings.get("widen") else ""
        for row in rows:
            server = row["server"]
            cells = [where, code(row["method"]), f"{row['clients']:,}", str(row["http_processes"])]
            cells += [rate(row[side]["tokens_per_second"]) for side in ("engine", "server")]
            cells.append(f"{100 * row['overhead']:.1f}%")
            for name, form in (("ttft", ".0f"), ("tpot", ".2f")):
                cells += [number((server[name] or {}).get(f"p{share}"), form, 1000) for share in (50, 90, 99)]
            lines.append(cells)
        model = f"{result['target']} in {result['dtype']}"
        notes.append(
            f"{where}: {model}, greedy, {settings['tokens']:,} new tokens, medians of {settings['rounds']} rounds."
        )
        if failed := sum(row["errors"] for row in rows):
            notes.append(f"{counted(failed, 'request')} of the server failed.")
    return table(head, lines, left=2), " ".join(notes)


def soak(found: Results) -> Body:
    """Many random requests (benchmarks/soak.py)."""
    head = (
        "machine",
        "KV caches in pages",
        "policy",
        "requests",
        "at once",
        "whole texts",
        "cancelled",
        "late",
        "preempted",
    )
    lines = []
    for result in found.values():
        ends = dict(result["ends"])
        stopped = [ends.pop(reason, 0) for reason in (CANCELLED, DEADLINE)]
        where = hardware(result) if result["device"].startswith("cuda") else "CPU"
        counts = (result["requests"], result["max_requests"], sum(ends.values()), *stopped, result["preempted"])
        lines.append(
            [
                *(where, "yes" if result["runs_on"] == "gpu" else "no", code(result["policy"])),
                *(f"{count:,}" for count in counts),
                *(f"{len(result['wrong']):,}", f"{100 * result['memory_growth']:.1f}%"),
            ]
        )
    targets = dict.fromkeys(result["target"] for result in found.values() if "target" in result)
    about = f"Target on the CPU: {listed(list(targets))}." if targets else ""
    return table((*head, "wrong texts", "memory growth"), lines, left=3), about


# ---- where results come from


def hardware(result: dict[str, Any]) -> str:
    """The GPU that a result names, or else the CPU."""
    machine = result.get("machine", {})
    gpu = result.get("gpu") or machine.get("gpu")
    if gpu:
        return str(gpu)
    name = machine.get("cpu", "an unknown machine")
    return f"{counted(machine['cores'], 'core')} of {name}" if machine.get("cores") else str(name)


def origin(result: dict[str, Any]) -> str:
    """Hardware, versions and date of a result."""
    about = {**result, **result.get("provenance", {})}
    versions = {name: version for name, version in about.get("versions", {}).items() if name != "python"}
    libraries = listed([f"{name} {version}" for name, version in versions.items()])
    one = "one " if about.get("gpu") or about.get("machine", {}).get("gpu") else ""
    where = f"Measured on {one}{hardware(about)}"
    return (
        where + (f" with {libraries}" if libraries else "") + (f", {about['date'][:10]}" if about.get("date") else "")
    )


def sources(files: dict[str, Result]) -> str:
    """Hardware, versions and date of each file, and its `note`; files with the same origin share a sentence."""
    by_origin: dict[str, list[str]] = {}
    notes = []
    for file, result in files.items():
        for each in result if isinstance(result, list) else [result]:
            own = by_origin.setdefault(origin(each), [])
            if file not in own:
                own.append(file)
            notes += [each["note"]] if "note" in each else []
            notes += [f"The run of `{file}` was stopped before its end."] if each.get("finished") is False else []
    links = {file: f"[{file}](../benchmarks/results/{file})" for file in files}
    named = (f"{text} ({', '.join(links[file] for file in own)})." for text, own in by_origin.items())
    return " ".join([*named, *dict.fromkeys(notes)])
