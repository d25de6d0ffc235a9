"""Bulk generation with continuous batching: slots decode together, and finished slots are refilled."""

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
from windfall.train.slot_cache import ATTENTION_NAME, Bounds, SlotCache

MAX_SLOTS_GPU, DEFAULT_SLOTS_CPU = 1024, 16
CACHE_MEMORY_SHARE = 0.6  # of the free device memory
STEPS_PER_LAUNCH = 16  # decode steps on a GPU between two reads of their output
MAX_PREFILL_TOKENS = 32768  # in one pass
PADDING_MULTIPLE = 32  # padded prompt lengths are multiples of this
MAX_STOP_TOKENS = 32
CHECK_LENGTHS = (3, 40, 17, 70)  # of the sequences with which packed attention is checked


@dataclass(frozen=True)
class Request:
    """A prompt to complete. The completion depends on these fields only, not on the other requests in the batch."""

    key: Any  # the caller's identifier
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Completion(NamedTuple):
    """A finished request."""

    request: Request
    tokens: list[int]  # new tokens, the stop token included
    finish: str  # "stop" or "length"


@dataclass
class Running:
    """A request in its slot."""

    request: Request
    max_length: int  # of prompt and completion
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class Launched(NamedTuple):
    """Output of launched decode steps, which may still be running."""

    output: Tensor  # [steps, slots] on the host; -1 where the slot had finished before
    ready: Any  # a CUDA event, or None


class DecodeState:
    """What a decode step reads and writes, at fixed addresses on the device."""

    def __init__(self, batch: int, steps: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.tokens = zeros(batch, 1)  # the last token of each slot, not yet in the cache
        self.positions = zeros(batch)  # of that token
        self.max_lengths = zeros(batch)
        self.seeds = zeros(batch)  # hashed
        self.temperatures = zeros(batch, dtype=torch.float32)
        self.live = zeros(batch, dtype=torch.bool)
        self.used = torch.ones(batch, dtype=torch.int32, device=device)  # cache rows that attention reads
        self.stop_tokens = torch.full((MAX_STOP_TOKENS,), -1, device=device)
        self.output = zeros(steps, batch)
        self.step = zeros(1)  # the next row of `output`
        self.slots = torch.arange(batch, device=device)

    def advance(self, drawn: Tensor) -> None:
        """Append the drawn tokens [slots] and mark finished slots."""
        self.output.index_copy_(0, self.step, torch.where(self.live, drawn, -1)[None])
        self.step += 1
        finished = (drawn[:, None] == self.stop_tokens).any(-1) | (self.positions + 2 >= self.max_lengths)
        self.live &= ~finished
        self.tokens.copy_(torch.where(self.live, drawn, self.tokens[:, 0])[:, None])
        self.positions += self.live


class BulkGenerator:
    """Completes requests in a fixed number of slots.

    On CUDA a decode step, sampling included, is one CUDA graph, and the host reads the output every few steps.
    Half-precision models use packed attention, in which each slot has its own length.
    """

    def __init__(
        self, target: Target, batch: int, capacity: int, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        """`batch` slots of `capacity` tokens each; `notify` gets messages about slower fallbacks."""
        if target.decoder.windows:
            raise InputError(f"{target.name} has sliding windows, which bulk generation does not support")
        self.target, self.model, self.notify = target, target.model, notify
        self.batch, self.capacity, self.device = batch, capacity, target.device
        on_gpu = self.device.type == "cuda"
        self.steps, self.lag = (STEPS_PER_LAUNCH, 1) if on_gpu else (1, 0)
        self.min_refill = self.batch // 32 if on_gpu else 1  # free slots that make a prefill pass worthwhile
        self.packed = False  # prompts back to back and attention by length; otherwise padding and masks
        self.static_shapes = False  # as a CUDA graph needs them
        self.graph: Any = None
        self._sample = sample
        self._running: dict[int, Running] = {}
        with torch.inference_mode():
            self.state = DecodeState(self.batch, self.steps, self.device)
            self.token_hashes = token_hashes(target.vocab_size, self.device)
            self.cache = SlotCache(target.decoder.config.num_hidden_layers, self.batch, self.capacity)
            cuts = torch.arange(self.batch + 1, dtype=torch.int32, device=self.device)
            self.bounds = Bounds(cuts, cuts * self.capacity, (1, self.capacity), self.state.used)
            self._prepare()

    # ---- the loop

    def run(self, queue: deque[Request], eos: tuple[int, ...] | None = None) -> Iterator[Completion]:
        """Yield completions as they finish. Requests may be added to the queue meanwhile; `eos`: None: the model's."""
        stop_tokens = frozenset(self.target.eos if eos is None else eos)
        self._clear(stop_tokens)
        launched: deque[Launched] = deque()
        with self._attention():
            while queue or self._running or launched:
                self._refill(queue)
                if self._running:
                    launched.append(self._launch())
                if len(launched) > (self.lag if self._running else 0):
                    yield from self._collect(launched.popleft(), stop_tokens)

    @torch.inference_mode()
    def _clear(self, stop_tokens: frozenset[int]) -> None:
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise InputError(f"at most {MAX_STOP_TOKENS} different tokens may end a text, not {len(stop_tokens)}")
        self._running = {}
        self.state.live.zero_()
        padding = [-1] * (MAX_STOP_TOKENS - len(stop_tokens))
        self.state.stop_tokens.copy_(torch.tensor(sorted(stop_tokens) + padding))

    @torch.inference_mode()
    def _refill(self, queue: deque[Request]) -> None:
        """Give free slots to waiting requests, once enough slots are free for a prefill pass."""
        free = [slot for slot in range(self.batch) if slot not in self._running]
        if not queue or (self._running and len(free) < min(self.min_refill, len(queue))) or not free:
            return
        requests = {slot: queue.popleft() for slot in free[: len(queue)]}
        for slot, request in requests.items():
            room = self.capacity - len(request.prompt)
            if not request.prompt or room < 1:
                raise InputError(f"a prompt must have 1 to {self.capacity - 1} tokens, not {len(request.prompt)}")
            self._running[slot] = Running(request, len(request.prompt) + min(request.max_new_tokens, room))
        self._prefill({slot: request.prompt[:-1] for slot, request in requests.items()})
        self._load(list(requests))

    def _load(self, slots: list[int]) -> None:
        """Copy new requests to the device. The last prompt token is left to the first decode step."""
        added, state = [self._running[slot] for slot in slots], self.state
        seeds = mix(torch.tensor([signed(each.request.seed) for each in added]))
        rows = [[each.request.prompt[-1], len(each.request.prompt) - 1, each.max_length] for each in added]
        table = self._send(torch.cat([torch.tensor(slots)[:, None], torch.tensor(rows), seeds[:, None]], 1))
        where, tokens, positions, max_lengths, hashed = table.unbind(1)
        state.tokens[where] = tokens[:, None]
        state.positions[where], state.max_lengths[where], state.seeds[where] = positions, max_lengths, hashed
        state.temperatures[where] = self._send(torch.tensor([each.request.temperature for each in added]))
        state.live.index_fill_(0, where, True)

    @torch.inference_mode()
    def _launch(self) -> Launched:
        """Launch some decode steps. On a GPU this returns before they finish."""
        self.state.step.zero_()
        for _ in range(self.steps):
            if self.graph:
                self.graph.replay()
            else:
                self._step()
        if self.device.type != "cuda":
            return Launched(self.state.output.cpu().clone(), None)
        output = torch.empty(self.state.output.shape, dtype=torch.long, pin_memory=True)
        output.copy_(self.state.output, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self.device))
        return Launched(output, ready)

    def _collect(self, launched: Launched, stop_tokens: frozenset[int]) -> list[Completion]:
        """Read the output of some steps and free the slots of finished requests."""
        if launched.ready is not None:
            launched.ready.synchronize()
        columns, done = launched.output.T.tolist(), []
        for slot, each in list(self._running.items()):
            each.tokens += [token for token in columns[slot] if token >= 0]
            stopped = bool(each.tokens) and each.tokens[-1] in stop_tokens
            if stopped or each.length >= each.max_length:
                done.append(Completion(each.request, each.tokens, "stop" if stopped else "length"))
                del self._running[slot]
        return done

    # ---- forward passes

    def _step(self) -> None:
        """Decode one token for every slot."""
        state = self.state
        logits = self._forward()
        if self.graph is None and self.device.type == "cpu" and not self._sampling:
            drawn = logits.argmax(-1)
        else:
            drawn = self._sample(logits, state.seeds, state.positions + 1, state.temperatures, self.token_hashes)
        state.advance(drawn)

    @property
    def _sampling(self) -> bool:
        return any(each.request.temperature > 0 for each in self._running.values())

    def _forward(self) -> Tensor:
        """Logits [slots, V] after the last token of every slot."""
        state, cache = self.state, self.cache
        cache.write_rows = state.slots * self.capacity + state.positions
        cache.width = self.capacity if self.packed or self.static_shapes else self._width()
        cache.prefilling, cache.bounds = False, self.bounds
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
        """Cache rows that a masked step must read: the longest length that a slot may have reached."""
        longest = max((each.length for each in self._running.values()), default=1)
        return min(self.capacity, longest + self.steps * (self.lag + 1) - 1)

    def _mask(self, width: int) -> Tensor:
        """[slots, 1, 1, width]: each slot attends to its own rows. Boolean for sdpa, additive for eager attention."""
        seen = torch.arange(width, device=self.device) <= self.state.positions[:, None]
        if self.model.config._attn_implementation != "sdpa":
            dtype = self.target.decoder.dtype
            seen = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)
        return seen[:, None, None]

    def _prefill(self, prompts: dict[int, list[int]]) -> None:
        """Compute the cache rows of these slots' prompts."""
        prompts = {slot: tokens for slot, tokens in prompts.items() if tokens}
        for group in _prefill_groups(prompts, self.packed):
            table = _packed(group) if self.packed else _padded(group, min(_padded_length(group), self.capacity))
            tokens, positions, slots = self._send(table)  # [b, n] each
            self.cache.write_rows = (slots * self.capacity + positions).flatten()
            self.cache.prefilling, self.cache.bounds = True, self._prompt_bounds(group)
            self.model.base_model(input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True)

    def _prompt_bounds(self, group: dict[int, list[int]]) -> Bounds:
        lengths = torch.tensor([0, *map(len, group.values())])
        cuts = self._send(lengths.cumsum(0).int())
        return Bounds(cuts, cuts, (int(lengths.max()), int(lengths.max())), causal=True)

    def _send(self, table: Tensor) -> Tensor:
        """Copy to the device without waiting for it."""
        if self.device.type != "cuda":
            return table.to(self.device)
        return table.pin_memory().to(self.device, non_blocking=True)

    # ---- preparation on CUDA

    def _prepare(self) -> None:
        """On CUDA: packed attention if it agrees with the masked one, compiled sampling, a captured decode step."""
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            if self.target.decoder.dtype in (torch.bfloat16, torch.float16):
                self._try_packed()
            self._try_compiled()
            self._try_graph()

    def _try_packed(self) -> None:
        try:
            wanted, found = self._check_logits(False), self._check_logits(True)
            gap, scale = float((found - wanted).abs().max()), float(wanted.abs().max())
            problem = "" if gap <= 0.05 * max(scale, 1e-3) else f"its logits differ by {gap:.3g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kernels raise many kinds
            problem = first_line(error)
        self.packed = not problem
        if problem:
            self.notify(f"packed attention does not work here ({problem}); using masked attention, which is slower")

    def _check_logits(self, packed: bool) -> Tensor:
        """Logits after a few sequences of different lengths, in fp32."""
        lengths = [min(length, self.capacity - 1) for length in CHECK_LENGTHS[: self.batch]]
        texts = [[(7 * place + length) % self.target.vocab_size for place in range(length)] for length in lengths]
        self._running = {slot: Running(Request(None, text, 1), len(text) + 1) for slot, text in enumerate(texts)}
        self.packed = packed
        try:
            with self._attention():
                self._prefill({slot: text[:-1] for slot, text in enumerate(texts)})
                self._load(list(self._running))
                return self._forward()[: len(texts)].float()
        finally:
            self._running = {}
            self.state.live.zero_()

    def _try_compiled(self) -> None:
        """Compile hashing, noise and argmax into one kernel; they are about twenty over [slots, V] otherwise."""
        state, dtype = self.state, self.target.decoder.dtype
        logits = torch.randn(self.batch, self.target.vocab_size, device=self.device, dtype=dtype)
        given = logits, state.slots * GOLDEN, state.slots, torch.ones_like(state.temperatures), self.token_hashes
        try:
            compiled = torch.compile(sample, dynamic=False)
            if not torch.equal(compiled(*given), sample(*given)):
                raise RuntimeError("its samples differ")
            self._sample = compiled
        except Exception as error:
            self.notify(f"sampling is not compiled ({first_line(error)}), which is slower")

    def _try_graph(self) -> None:
        self.static_shapes = True
        try:
            with self._attention():
                side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                side.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self._step()
                torch.cuda.current_stream(self.device).wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):  # torch's default stream is shared by all devices
                    self._step()
            self.graph = graph
        except Exception as error:
            self.static_shapes = False
            self.notify(f"the decode step cannot be captured ({first_line(error)}), which is slower")
        self.state.step.zero_()

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Use the attention implementation that fits the cache, then restore the model's own."""
        if not self.packed:
            with tree_attention(self.model):
                yield
            return
        before = self.model.config._attn_implementation
        SlotCache.running = self.cache
        self.model.set_attn_implementation(ATTENTION_NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)
            SlotCache.running = None


def token_hashes(size: int, device: torch.device) -> Tensor:
    """What each token adds to the hash of its noise, [V] long."""
    return (torch.arange(size, device=device) + 1) * GOLDEN


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, hashes: Tensor) -> Tensor:
    """The next token of each row [n]: the argmax at temperature 0, otherwise the token that `sampling.Sampler` draws.

    logits [n, V]; seeds [n] hashed; positions [n] of the drawn tokens; temperatures [n]; hashes [V].
    """
    if logits.device.type == "mps":  # has no fp64
        on_host = (x.cpu() for x in (logits, seeds, positions, temperatures, hashes))
        return sample(*on_host).to(logits.device)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    bits = mix(mix(seeds + (positions + 1) * GOLDEN)[:, None] + hashes)
    noise = -torch.log(-torch.log((shift(bits, 12).double() + 0.5) * 2.0**-52))  # as in sampling.gumbel
    sampled = (temperatures >= MIN_TEMPERATURE)[:, None]
    perturbed = logits / torch.where(sampled, temperatures[:, None], 1.0) + noise.float()
    return torch.where(sampled, perturbed, logits).argmax(-1)


def slots_that_fit(target: Target, capacity: int) -> int:
    """The number of slots of this capacity that the device has memory for."""
    if target.device.type != "cuda":
        return DEFAULT_SLOTS_CPU
    config, decoder = target.decoder.config, target.decoder
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * heads * width * decoder.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(target.device)
    slots = int(CACHE_MEMORY_SHARE * free / (capacity * row + 64 * target.vocab_size))
    return max(1, min(MAX_SLOTS_GPU, slots // 8 * 8))


def _padded_length(group: dict[int, list[int]]) -> int:
    return -(-max(map(len, group.values())) // PADDING_MULTIPLE) * PADDING_MULTIPLE


def _prefill_groups(prompts: dict[int, list[int]], packed: bool) -> Iterator[dict[int, list[int]]]:
    """Prompts of one prefill pass: packed back to back, or of one padded length."""
    buckets: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for slot, tokens in prompts.items():
        buckets[0 if packed else _padded_length({slot: tokens})].append((slot, tokens))
    for bucket in buckets.values():
        group: dict[int, list[int]] = {}
        for slot, tokens in bucket:
            grown = {**group, slot: tokens}
            size = sum(map(len, grown.values())) if packed else len(grown) * _padded_length(grown)
            if group and size > MAX_PREFILL_TOKENS:
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
    """Tokens, positions and slots, [3, b, width]; padding is on the right, where no real token attends to it."""
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in group.values()])
    positions = torch.arange(width).expand_as(tokens)
    return torch.stack([tokens, positions, torch.tensor(list(group))[:, None].expand_as(tokens)])
