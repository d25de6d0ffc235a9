"""Builds the Ray Serve application from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click
import torch
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig

from windfall.checkpoints.packed import check_weights
from windfall.core.errors import InputError
from windfall.engine.loading import choose_policy
from windfall.engine.service import MAX_REQUESTS_CPU, MAX_REQUESTS_GPU, checked_requests
from windfall.ray.options import BUSY_SHARE, Options
from windfall.ray.replica import PROBE_SECONDS, Replica
from windfall.ray.routing import SessionRouter
from windfall.serve.policies import offered

NAME = "windfall"  # of the deployment
RETRY_AFTER_SECONDS = 1
HEALTH_PERIOD_SECONDS = 10.0


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application with these options; those that are not given come from the environment.

    Ray's command line calls this, and shows a click.UsageError in one line.
    """
    try:
        options = completed(Options.read(args))
        check(options)
    except InputError as error:
        raise click.UsageError(str(error)) from None
    made: serve.Application = serve.deployment(**deployment(options))(serve.ingress()(Replica)).bind(options)
    return made


def completed(options: Options) -> Options:
    """The same options, with values where the machine decides."""
    gpus = options.gpus
    if gpus is None:
        gpus = float(torch.cuda.is_available() and options.device != "cpu")
    usual = MAX_REQUESTS_GPU if gpus else MAX_REQUESTS_CPU
    return replace(options, gpus=gpus, max_requests=checked_requests(options.max_requests) or usual)


def check(options: Options) -> None:
    """Refuse what no replica could use, before Ray starts one."""
    check_weights(options.weights)
    choose_policy(options.policy, options.policy_options, options.preset)
    offered(options.request_policies)
    _ = options.settings
    if options.max_replicas is not None and options.max_replicas < options.min_replicas:
        raise InputError(f"max_replicas is {options.max_replicas}, less than min_replicas, {options.min_replicas}")
    if options.max_replicas is None and options.min_replicas == 0:
        raise InputError("min_replicas=0 starts replicas on demand; it needs max_replicas")


def deployment(options: Options) -> dict[str, Any]:
    """How Ray runs the replicas. A file for `serve deploy` can override each of these for the deployment."""
    slots = options.max_requests or MAX_REQUESTS_CPU
    return {
        "name": NAME,
        **_replicas(options, slots),
        "max_ongoing_requests": slots + options.max_queue,
        "max_queued_requests": options.max_queued_requests,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_SECONDS),
        "ray_actor_options": {"num_cpus": options.cpus} | ({"num_gpus": options.gpus} if options.gpus else {}),
        "request_router_config": RequestRouterConfig(request_router_class=SessionRouter),
        "health_check_period_s": HEALTH_PERIOD_SECONDS,
        "health_check_timeout_s": PROBE_SECONDS + 10,
        "graceful_shutdown_timeout_s": options.drain_seconds,
    }


def _replicas(options: Options, slots: int) -> dict[str, Any]:
    """The number of replicas: fixed, or by the number of requests that are being answered or wait."""
    if options.max_replicas in (None, options.min_replicas):
        return {"num_replicas": options.min_replicas}
    scaling = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=max(1.0, BUSY_SHARE * slots),
    )
    return {"autoscaling_config": scaling}
