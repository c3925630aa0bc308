"""The methods that are compared: names, the settings each of them has, and the configuration they stand for."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from optimized.calibration import load_weights, weights_file
from reference.api import RheoConfig
from reference.topology import Topology
from reference.weights import Weights

PLAIN, GENERATE, TOP_K = "plain", "generate", "topk"
_SHAPE = ("branching", "depth", "tree_size", "draft_support")
SETTINGS: dict[str, tuple[str, ...]] = {
    PLAIN: (),  # autoregressive decoding in the decoder's own loop
    GENERATE: (),  # transformers' model.generate on the same weights
    TOP_K: _SHAPE,  # EAGLE-2/3: dynamic trees without a probe
    "rheo": ("lead_tokens", "probes", *_SHAPE),
    "rrsw": ("lead_tokens", "probes", *_SHAPE),  # the same trees, siblings verified in their order in the tree
    "calibrated": ("lead_tokens", "probes", *_SHAPE, "weights"),  # rheo, path scores by calibrated weights
    "auto-m": ("probes", *_SHAPE, "weights"),  # and m by what they promise, node by node
    "auto": ("probes", "draft_support", "weights"),  # and the size, at most the default shape, by what pays here
    "chain": ("depth", "draft_support"),  # Leviathan et al., Chen et al.: `depth` sampled tokens in a row
    "static": ("draft_support", "topology"),  # a fixed topology, children sampled without replacement
}
SHORT = {
    "lead_tokens": "m", "probes": "n", "branching": "K", "depth": "D", "tree_size": "R", "draft_support": "S",
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A method with its settings; those it has no use for are None.

    Attributes:
        name: a key of ``SETTINGS``.
        lead_tokens, probes, branching, depth, tree_size, draft_support: as in ``RheoConfig``.
        topology: of a static tree, as ``topology_text`` writes it: a row then says all of its tree.
        weights: file of calibrated weights with its digest, as ``weights_text`` writes it.
    """

    name: str
    lead_tokens: int | None = None
    probes: int | None = None
    branching: int | None = None
    depth: int | None = None
    tree_size: int | None = None
    draft_support: int | None = None
    topology: str | None = None
    weights: str | None = None

    @property
    def settings(self) -> dict[str, int | str]:
        """The settings that it has."""
        return {name: getattr(self, name) for name in SETTINGS[self.name]}

    def label(self, shown: Sequence[str] | None = None) -> str:
        """Its name with the settings, all or only some of them: "rheo m=1 R=60"."""
        parts = [
            f"{SHORT[name]}={value}" if name in SHORT else setting_label(name, value)
            for name, value in self.settings.items()
            if shown is None or name in shown
        ]
        return " ".join([self.name, *parts])

    def config(self) -> RheoConfig | None:
        """How it grows and verifies trees; None for ``plain`` and ``generate``.

        Raises:
            ValueError: a setting is out of its range, or the method is not part of this version.
        """
        if self.name in (PLAIN, GENERATE):
            return None
        shape: dict[str, Any] = self.settings
        match self.name:
            case "topk":
                return RheoConfig(proposal="topk", **shape)
            case "rheo":
                return RheoConfig(**shape)
            case "rrsw":
                return RheoConfig(verification="rrsw", **shape)
            case "calibrated" | "auto-m" | "auto":
                weights = _weights(shape.pop("weights"))
                return RheoConfig(**{"lead_tokens": "auto", "tree_size": "auto", **shape}, weights=weights)
            case "chain":
                return RheoConfig(lead_tokens=0, branching=1, beam=1, tree_size=shape["depth"], **shape)
            case "static":
                return RheoConfig.static(_topology(shape["topology"]), draft_support=shape["draft_support"])
        raise ValueError(f"unknown method {self.name!r}; there are {', '.join(SETTINGS)}")


@dataclass(frozen=True)
class Grid:
    """The values that settings take; every method goes through all combinations of those that it has."""

    lead_tokens: tuple[int, ...] = (1,)
    probes: tuple[int, ...] = (RheoConfig.probes,)
    branching: tuple[int, ...] = (RheoConfig.branching,)
    depth: tuple[int, ...] = (RheoConfig.depth,)
    tree_size: tuple[int, ...] = (RheoConfig().budget,)
    draft_support: tuple[int, ...] = (RheoConfig.draft_support,)
    topology: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()


def methods_of(names: Sequence[str], grid: Grid) -> list[Method]:
    """Every method with every combination of its settings, in the order given, none twice.

    Raises:
        ValueError: no or an unknown name, a setting without values or out of its range.
    """
    if not names:
        raise ValueError(f"there is no method; there are {', '.join(SETTINGS)}")
    found: dict[Method, None] = {}
    for name in names:
        if name not in SETTINGS:
            raise ValueError(f"unknown method {name!r}; there are {', '.join(SETTINGS)}")
        values = {setting: getattr(grid, setting) for setting in SETTINGS[name]}
        empty = [setting for setting, choices in values.items() if not choices]
        if empty:
            raise ValueError(f"method {name} needs a value for {empty[0].replace('_', ' ')}")
        for combination in itertools.product(*values.values()):
            method = Method(name, **dict(zip(values, combination, strict=True)))
            method.config()  # refuses what is out of its range before anything runs
            found[method] = None
    return list(found)


def topology_text(topology: Topology) -> str:
    """A topology in one word: ((0,), (1,), (0, 0)) is "0_1_0.0"."""
    return "_".join(".".join(map(str, path)) for path in topology)


def topology_label(text: str) -> str:
    """A topology's size, and four digits to tell it from others: "24 nodes #1f3a"."""
    return f"{len(_topology(text))} nodes #{zlib.crc32(text.encode()) & 0xFFFF:04x}"


def weights_text(path: Path) -> str:
    """A file of weights and its digest, "weights.json#1f3a9c02": another file of the name is another setting.

    Raises:
        ValueError: it holds no weights.
    """
    load_weights(path)
    return f"{path}#{zlib.crc32(weights_file(path).read_bytes()):08x}"


def setting_label(setting: str, value: object) -> str:
    """A setting's value as tables show it."""
    if setting == "topology":
        return topology_label(str(value))
    if setting == "weights":
        path, _, digest = str(value).rpartition("#")
        return f"{Path(path).stem} #{digest[:4]}"
    return str(value)


@cache
def _weights(text: str) -> Weights:
    path = Path(text.rpartition("#")[0])
    if weights_text(path) != text:
        raise ValueError(f"{path} has changed since its rows were measured ({text}); use another --out")
    return load_weights(path)


def _topology(text: str) -> Topology:
    return tuple(tuple(int(rank) for rank in path.split(".")) for path in text.split("_"))


SETTING_NAMES = tuple(item.name for item in fields(Method))[1:]
