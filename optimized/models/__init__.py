"""Target and draft models, and the cache they share."""

from optimized.models.causal_drafter import CausalDrafter, check_same_tokenizer
from optimized.models.drafter import Drafter
from optimized.models.eagle3 import Eagle3Drafter, Eagle3Head
from optimized.models.kv_cache import TreeCache
from optimized.models.loading import load_drafter, load_target, load_tokenizer
from optimized.models.target import TargetModel

__all__ = [
    "CausalDrafter",
    "Drafter",
    "Eagle3Drafter",
    "Eagle3Head",
    "TargetModel",
    "TreeCache",
    "check_same_tokenizer",
    "load_drafter",
    "load_target",
    "load_tokenizer",
]
