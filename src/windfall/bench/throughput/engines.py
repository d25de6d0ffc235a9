"""The engines of the methods: they share weights, and keep their KV caches and graphs as far as the memory goes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from windfall.bench import provenance
from windfall.bench.memory import clear
from windfall.bench.methods import PLAIN, DrafterSpec, Method
from windfall.bench.runner import PROFILE_KEYS, Case, NoDrafter
from windfall.bench.throughput.workload import Settings
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.drafters.head_drafter import HeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine import profiling
from windfall.engine.engine import Engine
from windfall.model.target import Target

SPARE_TOKENS = 128  # per request: rounds in flight, and the rest of the last page
KV_SHARE = 0.6  # of the free memory that all engines together may use for KV caches


class Engines:
    """Makes the engine of a method when it is needed. Those that were not used for longest make room for others."""

    def __init__(self, target: Target, default: DrafterSpec, settings: Settings, trust_remote_code: bool = False):
        self.target, self.default, self.settings = target, default, settings
        self.trust_remote_code = trust_remote_code
        self._tokens = 0  # that an engine's KV cache has room for
        self.profiles: dict[str, Any] = {}  # costs of passes by drafter, as far as policies use them
        self.about: dict[str, Any] = {}  # the provenance of engines by drafter
        self._drafters: dict[str, Drafter] = {}  # loaded, but not attached to an engine
        self._alive: OrderedDict[str, tuple[int, Engine]] = OrderedDict()
        self._numbers = itertools.count(1)

    def expect(self, cases: Sequence[Case]) -> None:
        """Make room for the longest of these, as many as may run at once."""
        lengths = sorted(len(case.ids) for case in cases)[-max(self.settings.concurrency) :]
        self._tokens = sum(lengths) + len(lengths) * (self.settings.max_new_tokens + SPARE_TOKENS)

    def get(self, method: Method) -> tuple[int, Engine]:
        """The engine of a method, and its number: another one is new, and has to be warmed up."""
        if method.label not in self._alive:
            self._alive[method.label] = next(self._numbers), self._make(method)
        self._alive.move_to_end(method.label)
        return self._alive[method.label]

    def close(self) -> None:
        """End all requests, and free the memory."""
        while self._alive:
            self._drop_oldest()

    def label(self, method: Method) -> str:
        """The name of a method's drafter."""
        return PLAIN if method.plain else (method.drafter or self.default).label

    def _make(self, method: Method) -> Engine:
        drafter, own = self._drafter(method), Target(self.target.model, self.target.tokenizer, self.target.name)
        label, policy, requests, memory = self.label(method), method.make(), max(self.settings.concurrency), None
        if own.device.type == "cuda":
            drafter.attach(own)
            memory = self._tokens * (own.decoder.row_bytes + drafter.row_bytes)
            while self._alive and (len(self._alive) + 1) * memory > KV_SHARE * self._bytes(memory):
                self._drop_oldest()
        options = self.settings.coupled, self.settings.gpu_options
        made = Engine(own, drafter, policy, *options, max_requests=requests, kv_memory=memory)
        if policy.uses_costs:
            made.online_costs = OnlineCosts(self._costs(label, made))
        made.prepare(self.settings.temperatures)
        if label not in self.about:
            self.about[label] = provenance.describe({label: made}, own, (), ())
        return made

    def _bytes(self, used: int) -> int:
        """Bytes for KV caches: the free ones, and those of the engines that are alive."""
        return int(torch.cuda.mem_get_info(self.target.device)[0]) + len(self._alive) * used

    def _drop_oldest(self) -> None:
        _, (_, engine) = self._alive.popitem(last=False)
        engine.close()
        del engine
        if self.target.device.type == "cuda":
            clear(self.target.device)

    def _drafter(self, method: Method) -> Drafter:
        """A new drafter; its weights are loaded once."""
        if method.plain:
            return NoDrafter()
        spec = method.drafter or self.default
        if spec.label not in self._drafters:
            self._drafters[spec.label] = loaded(spec.make(self.trust_remote_code), self.target)
        return replace(self._drafters[spec.label])

    def _costs(self, label: str, engine: Engine) -> Costs:
        if label not in self.profiles:
            found = profiling.load_or_measure(engine).as_dict()
            self.profiles[label] = {name: found[name] for name in PROFILE_KEYS if name in found}
        return Costs.of_dict(self.profiles[label]["costs"])


def loaded(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its model in memory, if it has one that copies of the drafter can share."""
    if isinstance(drafter, HeadDrafter):
        return replace(drafter, model=drafter.find_head(target))
    if isinstance(drafter, LMDrafter):
        drafter.attach(target)
        return replace(drafter, model=drafter.decoder.model)
    return drafter
