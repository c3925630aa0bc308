"""RheoSampling for production: ``RheoDecoder`` and the batched tree and verification functions behind it."""

from optimized.decoder import RheoDecoder
from optimized.growth import grow_trees
from optimized.outputs import GenerationError, GenerationResult, Metrics, StreamEvent, TokenLogprobs
from optimized.sampling_params import SamplingParams
from optimized.trees import TreeBatch
from optimized.verification import verify_trees
from reference.api import RheoConfig

__all__ = [
    "GenerationError",
    "GenerationResult",
    "Metrics",
    "RheoConfig",
    "RheoDecoder",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprobs",
    "TreeBatch",
    "grow_trees",
    "verify_trees",
]
