"""The specification of RheoSampling: NumPy and SciPy, readable, float64 or exact.

``grow_tree`` drafts a tree, ``verify`` walks it. ``reference.exact`` enumerates all of it and computes the law of the
output; ``reference.acceptance`` has the closed forms of a single layer.
"""

from reference.api import DraftLaw, GrowthNoise, Margin, RheoConfig, VerifyNoise, VerifyResult
from reference.growth import grow_tree
from reference.tree import DraftTree
from reference.verification import verify

__all__ = [
    "DraftLaw",
    "DraftTree",
    "GrowthNoise",
    "Margin",
    "RheoConfig",
    "VerifyNoise",
    "VerifyResult",
    "grow_tree",
    "verify",
]
