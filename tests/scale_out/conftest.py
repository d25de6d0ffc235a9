from __future__ import annotations

import warnings
from importlib.util import find_spec

if find_spec("ray") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's use of pydantic is not ours to change
        import ray.serve  # noqa: F401
