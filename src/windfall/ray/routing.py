"""Which replica a request goes to."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Requests with the same header `X-Session-Id` go to the same replica, or to the next ones if it is full.

    Requests without it go to the less busy of two random replicas.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Groups of replicas, which are tried in this order; in a group, the least busy one is chosen."""
        ranked: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or pending_request.metadata.session_id:
            return ranked
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
