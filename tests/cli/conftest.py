from __future__ import annotations

from helpers.cli import folder as folder
