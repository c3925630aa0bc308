"""RheoSampling for production: ``RheoDecoder`` and the batched tree and verification functions behind it.

Names are imported when they are first used, so that ``rheo --help`` need not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimized.decoder import RheoDecoder
    from optimized.growth import grow_trees
    from optimized.outputs import (
        GenerationError,
        GenerationResult,
        Metrics,
        StreamEvent,
        TokenLogprobs,
        TracedStep,
    )
    from optimized.sampling_params import SamplingParams
    from optimized.trees import TreeBatch
    from optimized.verification import verify_trees
    from reference.api import RheoConfig

if find_spec("optimized.kernels") is None:  # a checkout that is not installed: the folder lies beside this one
    __path__.append(str(Path(__file__).parents[1]))

_MODULES = {
    "GenerationError": "optimized.outputs",
    "GenerationResult": "optimized.outputs",
    "Metrics": "optimized.outputs",
    "RheoConfig": "reference.api",
    "RheoDecoder": "optimized.decoder",
    "SamplingParams": "optimized.sampling_params",
    "StreamEvent": "optimized.outputs",
    "TokenLogprobs": "optimized.outputs",
    "TracedStep": "optimized.outputs",
    "TreeBatch": "optimized.trees",
    "grow_trees": "optimized.growth",
    "verify_trees": "optimized.verification",
}

__all__ = [
    "GenerationError",
    "GenerationResult",
    "Metrics",
    "RheoConfig",
    "RheoDecoder",
    "SamplingParams",
    "StreamEvent",
    "TokenLogprobs",
    "TracedStep",
    "TreeBatch",
    "grow_trees",
    "verify_trees",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'optimized' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
