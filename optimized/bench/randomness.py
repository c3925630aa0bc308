"""Seeds of a benchmark: one per request, made of the run's seed and of what is asked."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: object) -> int:
    """A seed in [0, 2**64) that depends on all parts: the first 64 bits of their SHA-256.

    With the run's seed alone, all prompts would share their random numbers, and their errors would not be independent.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
