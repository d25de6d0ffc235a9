"""The policies that a request may choose instead of the server's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from windfall import registry
from windfall.serve.errors import ApiError

if TYPE_CHECKING:
    from windfall.policies.base import TreePolicy

PLAIN = "none"  # plain decoding, which every request may choose


def offered(names: Iterable[str]) -> dict[str, TreePolicy]:
    """Plain decoding and the policies with these names; an InputError if there is no such policy."""
    return {name: registry.policy(name) for name in dict.fromkeys((PLAIN, *names))}


def chosen(policies: Collection[str], name: str | None) -> str | None:
    """The policy that a request names, if it is offered; None: the server's."""
    if name is not None and name not in policies:
        message = f"the policy '{name}' is not offered to requests; this server offers {', '.join(policies)}"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="policy", code="policy_not_offered")
    return name
