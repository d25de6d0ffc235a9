"""Texts by the thousand: a fixed number of slots decode together without a pause, and whoever ends makes room."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.sampling import GOLDEN, mix, shift, signed
from windfall.core.types import MIN_TEMPERATURE, InputError
from windfall.model.decoder import tree_attention
from windfall.model.target import Target
from windfall.train.slots import NAME, Bounds, Slots

ON_GPU, ON_CPU = 1024, 16  # slots, unless somebody says otherwise
SHARE = 0.6  # of the free device memory that the slots may take
STEPS = 16  # of decoding between two looks at what was written
PREFILL = 32768  # prompt tokens in a pass at the most
BUCKET = 32  # padded lengths are multiples of this
ENDS = 32  # token ids that may end a text
PROBE = (3, 40, 17, 70)  # lengths of the texts that the self-check compares


@dataclass(frozen=True)
class Job:
    """A text to be continued. What comes depends on these alone, not on what runs beside it."""

    key: Any  # whatever tells the caller which one this is
    prompt: list[int]
    limit: int  # new tokens at the most
    temperature: float = 0.0
    seed: int = 0


class Answer(NamedTuple):
    """A finished job."""

    job: Job
    tokens: list[int]  # what was written, the end-of-text token included
    finish: str  # "stop" or "length"


@dataclass
class Work:
    """A job in its slot."""

    job: Job
    end: int  # length of prompt and answer at the most
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.job.prompt) + len(self.tokens)


class Chunk(NamedTuple):
    """Steps on their way: what they write, and when it can be read."""

    ring: Tensor  # [STEPS, B] on the host; -1 where a slot had ended
    ready: Any  # a CUDA event, or None


class State:
    """What a decode step reads and writes, at fixed addresses on the device."""

    def __init__(self, batch: int, steps: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens = zeros(batch, 1)  # the last one of each slot, not yet fed
        self.positions = zeros(batch)  # of that token
        self.limits = zeros(batch)  # length at which a text ends
        self.seeds = zeros(batch)  # hashed
        self.temperatures = zeros(batch, dtype=torch.float32)
        self.live = zeros(batch, dtype=torch.bool)
        self.used = torch.ones(batch, dtype=torch.int32, device=device)  # rows that attention reads
        self.ends = torch.full((ENDS,), -1, device=device)
        self.ring = zeros(steps, batch)
        self.cursor = zeros(1)
        self.slots = torch.arange(batch, device=device)

    def advance(self, drawn: Tensor) -> None:
        """Write down what was drawn [B], end what has ended, and move on."""
        self.ring.index_copy_(0, self.cursor, torch.where(self.live, drawn, -1)[None])
        self.cursor += 1
        ended = (drawn[:, None] == self.ends).any(-1) | (self.positions + 2 >= self.limits)
        self.live &= ~ended
        self.tokens.copy_(torch.where(self.live, drawn, self.tokens[:, 0])[:, None])
        self.positions += self.live


class BulkGenerator:
    """Slots that decode together. On CUDA a step is one captured graph, draws included, and the host reads what was
    written only now and then; half-precision models attend with each slot's own length."""

    def __init__(
        self,
        target: Target,
        batch: int | None = None,
        capacity: int = 2048,
        say: Callable[[str], None] = lambda _: None,
    ):
        if target.decoder.windows:
            raise InputError(f"{target.name} has sliding windows, with which answers cannot be written in bulk")
        self.target, self.model, self.say = target, target.model, say
        self.capacity = min(filter(None, (capacity, target.context)))
        self.device = target.device
        self.batch = batch or fitting(target, self.capacity)
        on_gpu = self.device.type == "cuda"
        self.steps, self.lag = (STEPS, 1) if on_gpu else (1, 0)
        self.patience = self.batch // 32 if on_gpu else 1  # slots that wait for company before they are filled
        self.packed = False  # prompts back to back, attention by length; otherwise padding and masks
        self.fixed = False  # whether a step has the same shapes always, as a graph needs it
        self.graph: Any = None
        self._draw = draw
        self._work: dict[int, Work] = {}
        with torch.inference_mode():
            self.state = State(self.batch, self.steps, self.device)
            self.marks = token_marks(target.vocab_size, self.device)
            self.cache = Slots(target.decoder.config.num_hidden_layers, self.batch, self.capacity)
            cuts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
            self.bounds = Bounds(cuts, cuts * self.capacity, (1, self.capacity), self.state.used)
            self._prepare()

    # ---- the loop

    def run(self, queue: deque[Job], eos: tuple[int, ...] | None = None) -> Iterator[Answer]:
        """Answers as they end. More jobs may be put into the queue while this runs; `eos`: None takes the model's."""
        ends = frozenset(self.target.eos if eos is None else eos)
        self._clear(ends)
        flying: deque[Chunk] = deque()
        with self._attention():
            while queue or self._work or flying:
                self._refill(queue)
                if self._work:
                    flying.append(self._launch())
                if len(flying) > (self.lag if self._work else 0):
                    yield from self._collect(flying.popleft(), ends)

    @torch.inference_mode()
    def _clear(self, ends: frozenset[int]) -> None:
        if len(ends) > ENDS:
            raise InputError(f"a text may end with {ENDS} different tokens at most, not {len(ends)}")
        self._work = {}
        self.state.live.zero_()
        self.state.ends.copy_(torch.tensor(sorted(ends) + [-1] * (ENDS - len(ends))))

    @torch.inference_mode()
    def _refill(self, queue: deque[Job]) -> None:
        """Give free slots to waiting jobs, once enough of them are free to be worth a pass."""
        free = [slot for slot in range(self.batch) if slot not in self._work]
        if not queue or (self._work and len(free) < min(self.patience, len(queue))) or not free:
            return
        jobs = {slot: queue.popleft() for slot in free[: len(queue)]}
        for slot, job in jobs.items():
            room = self.capacity - len(job.prompt)
            if not job.prompt or room < 1:
                raise InputError(f"a prompt must have 1 to {self.capacity - 1} tokens, not {len(job.prompt)}")
            self._work[slot] = Work(job, len(job.prompt) + min(job.limit, room))
        self._fill({slot: job.prompt[:-1] for slot, job in jobs.items()})
        self._seat(list(jobs))

    def _seat(self, slots: list[int]) -> None:
        """Tell the device about new work; the last token of a prompt is left to the first step."""
        works, state = [self._work[slot] for slot in slots], self.state
        seeds = mix(torch.tensor([signed(work.job.seed) for work in works]))
        told = [[work.job.prompt[-1], len(work.job.prompt) - 1, work.end] for work in works]
        table = self._send(torch.cat([torch.tensor(slots)[:, None], torch.tensor(told), seeds[:, None]], 1))
        where, tokens, positions, limits, hashed = table.unbind(1)
        state.tokens[where] = tokens[:, None]
        state.positions[where], state.limits[where], state.seeds[where] = positions, limits, hashed
        state.temperatures[where] = self._send(torch.tensor([work.job.temperature for work in works]))
        state.live.index_fill_(0, where, True)

    @torch.inference_mode()
    def _launch(self) -> Chunk:
        """Some steps; on a GPU this returns before they are done."""
        self.state.cursor.zero_()
        for _ in range(self.steps):
            if self.graph:
                self.graph.replay()
            else:
                self._step()
        if self.device.type != "cuda":
            return Chunk(self.state.ring.cpu().clone(), None)
        ring = torch.empty(self.state.ring.shape, dtype=torch.long, pin_memory=True)
        ring.copy_(self.state.ring, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self.device))
        return Chunk(ring, ready)

    def _collect(self, chunk: Chunk, ends: frozenset[int]) -> list[Answer]:
        """Read what some steps wrote and free the slots of what has ended."""
        if chunk.ready is not None:
            chunk.ready.synchronize()
        columns, done = chunk.ring.T.tolist(), []
        for slot, work in list(self._work.items()):
            work.tokens += [token for token in columns[slot] if token >= 0]
            stopped = bool(work.tokens) and work.tokens[-1] in ends
            if stopped or work.length >= work.end:
                done.append(Answer(work.job, work.tokens, "stop" if stopped else "length"))
                del self._work[slot]
        return done

    # ---- passes

    def _step(self) -> None:
        """One token for every slot."""
        state = self.state
        logits = self._forward()
        if self.graph is None and self.device.type == "cpu" and not self._sampling:
            drawn = logits.argmax(-1)
        else:
            drawn = self._draw(logits, state.seeds, state.positions + 1, state.temperatures, self.marks)
        state.advance(drawn)

    @property
    def _sampling(self) -> bool:
        return any(work.job.temperature > 0 for work in self._work.values())

    def _forward(self) -> Tensor:
        """Logits [B, V] after the last token of every slot."""
        state, cache = self.state, self.cache
        cache.goal = state.slots * self.capacity + state.positions
        cache.width = self.capacity if self.packed or self.fixed else self._width()
        cache.filling, cache.bounds = False, self.bounds
        state.used.copy_(state.positions + 1)
        outputs = self.model(
            input_ids=state.tokens,
            position_ids=state.positions[:, None],
            attention_mask=None if self.packed else self._mask(cache.width),
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _width(self) -> int:
        """Rows that a masked step has to read: as many as the longest slot may have by now."""
        longest = max((work.length for work in self._work.values()), default=1)
        return min(self.capacity, longest + self.steps * (self.lag + 1) - 1)

    def _mask(self, width: int) -> Tensor:
        """[B, 1, 1, width]: each slot sees its own rows; boolean for sdpa, while eager attention adds it."""
        seen = torch.arange(width, device=self.device) <= self.state.positions[:, None]
        if self.model.config._attn_implementation != "sdpa":
            dtype = self.target.decoder.dtype
            seen = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return seen[:, None, None]

    def _fill(self, prompts: dict[int, list[int]]) -> None:
        """Compute the rows of these slots' prompts."""
        prompts = {slot: tokens for slot, tokens in prompts.items() if tokens}
        for group in _grouped(prompts, self.packed):
            table = _packed(group) if self.packed else _padded(group, min(_padding(group), self.capacity))
            tokens, positions, slots = self._send(table)  # [b, n] each
            self.cache.goal = (slots * self.capacity + positions).flatten()
            self.cache.filling, self.cache.bounds = True, self._cuts(group)
            self.model.base_model(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True)

    def _cuts(self, group: dict[int, list[int]]) -> Bounds:
        lengths = torch.tensor([0, *map(len, group.values())])
        cuts = self._send(lengths.cumsum(0).int())
        return Bounds(cuts, cuts, (int(lengths.max()), int(lengths.max())), causal=True)

    def _send(self, table: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        if self.device.type != "cuda":
            return table.to(self.device)
        return table.pin_memory().to(self.device, non_blocking=True)

    # ---- making ready

    def _prepare(self) -> None:
        """On CUDA: attention by length if it agrees with the masked one, draws compiled, the step captured."""
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            if self.target.decoder.dtype in (torch.bfloat16, torch.float16):
                self._try_packed()
            self._try_compiled()
            self._try_graph()

    def _try_packed(self) -> None:
        try:
            wanted, found = self._probe(False), self._probe(True)
            gap, scale = float((found - wanted).abs().max()), float(wanted.abs().max())
            problem = "" if gap <= 0.05 * max(scale, 1e-3) else f"its logits differ by {gap:.3g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel may not like
            problem = first_line(error)
        self.packed = not problem
        if problem:
            self.say(f"attention by length does not work here ({problem}); the masked one is slower")

    def _probe(self, packed: bool) -> Tensor:
        """Logits after a few texts of different lengths, in fp32."""
        lengths = [min(length, self.capacity - 1) for length in PROBE[: self.batch]]
        texts = [[(7 * place + length) % self.target.vocab_size for place in range(length)] for length in lengths]
        self._work = {slot: Work(Job(None, text, 1), len(text) + 1) for slot, text in enumerate(texts)}
        self.packed = packed
        try:
            with self._attention():
                self._fill({slot: text[:-1] for slot, text in enumerate(texts)})
                self._seat(list(self._work))
                return self._forward()[: len(texts)].float()
        finally:
            self._work = {}
            self.state.live.zero_()

    def _try_compiled(self) -> None:
        """One kernel for hash, noise and argmax instead of a score of them over [B, V]."""
        state, dtype = self.state, self.target.decoder.dtype
        logits = torch.randn(self.batch, self.target.vocab_size, device=self.device, dtype=dtype)
        given = logits, state.slots * GOLDEN, state.slots, torch.ones_like(state.temperatures), self.marks
        try:
            compiled = torch.compile(draw, dynamic=False)
            if not torch.equal(compiled(*given), draw(*given)):
                raise RuntimeError("its draws differ")
            self._draw = compiled
        except Exception as error:
            self.say(f"draws are not compiled ({first_line(error)}), which is slower")

    def _try_graph(self) -> None:
        self.fixed = True
        try:
            with self._attention():
                side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                side.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self._step()
                torch.cuda.current_stream(self.device).wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):  # torch's own is one for all devices
                    self._step()
            self.graph = graph
        except Exception as error:
            self.fixed = False
            self.say(f"a step cannot be captured ({first_line(error)}), which is slower")
        self.state.cursor.zero_()

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """The model attends by length while this lasts."""
        if not self.packed:
            with tree_attention(self.model):
                yield
            return
        before = self.model.config._attn_implementation
        Slots.running = self.cache
        self.model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
            Slots.running = None


def token_marks(size: int, device: torch.device) -> Tensor:
    """What a token's number adds to the hash of its noise, [V] long."""
    return (torch.arange(size, device=device) + 1) * GOLDEN


def draw(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, marks: Tensor) -> Tensor:
    """The next token of each row [n]: the likeliest at temperature 0, else the one that `sampling.Sampler` draws.

    logits [n, V]; seeds [n] hashed; positions [n] of the drawn tokens; temperatures [n]; marks [V].
    """
    if logits.device.type == "mps":  # has no fp64
        on_host = (x.cpu() for x in (logits, seeds, positions, temperatures, marks))
        return draw(*on_host).to(logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    bits = mix(mix(seeds + (positions + 1) * GOLDEN)[:, None] + marks)
    noise = -torch.log(-torch.log((shift(bits, 12).double() + 0.5) * 2.0**-52))  # as in sampling.gumbel
    sampled = (temperatures >= MIN_TEMPERATURE)[:, None]
    warmed = logits / torch.where(sampled, temperatures[:, None], 1.0) + noise.float()
    return torch.where(sampled, warmed, logits).argmax(-1)


def fitting(target: Target, capacity: int) -> int:
    """How many slots this device has room for."""
    if target.device.type != "cuda":
        return ON_CPU
    config, decoder = target.decoder.config, target.decoder
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * heads * width * decoder.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(target.device)
    room = int(SHARE * free / (capacity * row + 64 * target.vocab_size))
    return max(1, min(ON_GPU, room // 8 * 8))


def _padding(group: dict[int, list[int]]) -> int:
    return -(-max(map(len, group.values())) // BUCKET) * BUCKET


def _grouped(prompts: dict[int, list[int]], packed: bool) -> Iterator[dict[int, list[int]]]:
    """Prompts that are computed together: back to back whatever their lengths, or padded to one length."""
    buckets: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for slot, tokens in prompts.items():
        buckets[0 if packed else _padding({slot: tokens})].append((slot, tokens))
    for bucket in buckets.values():
        group: dict[int, list[int]] = {}
        for slot, tokens in bucket:
            grown = {**group, slot: tokens}
            size = sum(map(len, grown.values())) if packed else len(grown) * _padding(grown)
            if group and size > PREFILL:
                yield group
                grown = {slot: tokens}
            group = grown
        yield group


def _packed(group: dict[int, list[int]]) -> Tensor:
    """Tokens, positions and slots, [3, 1, total]."""
    tokens = torch.tensor([token for prompt in group.values() for token in prompt])
    lengths = torch.tensor([len(prompt) for prompt in group.values()])
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    slots = torch.tensor(list(group)).repeat_interleave(lengths)
    return torch.stack([tokens, torch.arange(len(tokens)) - starts, slots])[:, None]


def _padded(group: dict[int, list[int]], width: int) -> Tensor:
    """Tokens, positions and slots, [3, b, width]; padding comes last, where no real token sees it."""
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in group.values()])
    positions = torch.arange(width).expand_as(tokens)
    return torch.stack([tokens, positions, torch.tensor(list(group))[:, None].expand_as(tokens)])
