"""One pass of a model at a time: a pass changes the model's configuration, and hooks keep what they see.

Engines with the same model, in different threads, share all of this.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_adding = threading.Lock()


def pass_lock(model: nn.Module) -> Any:
    """The RLock that is held during passes of this model, and while its attention implementation is set."""
    found = _locks.get(model)
    if found is None:
        with _adding:
            found = _locks.setdefault(model, threading.RLock())
    return found
