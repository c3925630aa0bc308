"""Slots of a level on a CPU: draft logits to leads, probes and fills, one node after the other.

A node is a few hundred numbers, and what it takes there are the calls: one here, some forty in Torch. All in float64
and in the specification's order, so that ``reference.slots`` gives the same, up to the last bits of an exp or a log.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from optimized.kernels.cpu.jit import FLAG, INTEGER, NUMBER, SINGLE, array, jit

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

LEAD, PROBE, FILL = 0, 1, 2  # a request's curves
AUTO = -1  # as ``lead_tokens``
GROUPS_PER_PLACE = 4
LOWEST = np.finfo(np.float32).min
LOW_WORD = 0xFFFFFFFF


class Shape(NamedTuple):
    """What the slots of all nodes have in common.

    Attributes:
        lead_tokens: m; ``AUTO`` chooses it node by node.
        most_leads: the largest m that is then considered.
        branching: K.
        support: how many of the largest logits make a law.
        draws: the most probes of a node; 0 for none.
        greedy_below: temperatures below it are greedy.
        least_score: logarithm of the path score that a slot must reach; -inf for none.
    """

    lead_tokens: int
    most_leads: int
    branching: int
    support: int
    draws: int
    greedy_below: float
    least_score: float


class Curves(NamedTuple):
    """Calibrated weights of one request.

    Attributes:
        used: whether there are any; otherwise weights are q, and nothing else is read.
        values: [1, 6, segments], where leads, probes and fills start in each segment, and how much they rise in it.
        shares: [1, draws], of each probe of a node.
        knots: [3, segments], where each segment ends and begins, and its width.
        least: the least chance there is.
        probe_first: whether a probe may rank above the leads.
        price: the path score that earns a place in the tree, for ``AUTO``.
        tie: what counts as equal among sums of promises.
    """

    used: bool
    values: Floats
    shares: Floats
    knots: Floats
    least: float
    probe_first: bool
    price: float
    tie: float


class Slots(NamedTuple):
    """What a level offers, as ``optimized.slots.LevelSlots``; a padded or failed node offers nothing.

    Attributes:
        token_ids, log_scores, is_probe: [batch, beam, branching]; 0, -inf and False where there is no slot.
        law_ids, law: [batch, beam, support]; 0 behind the ranked tokens.
        failed: [batch, beam].
        masses: [batch, beam, support], what curves are read at; [batch, beam, 0] without.
    """

    token_ids: Ints
    log_scores: Floats
    is_probe: Flags
    law_ids: Ints
    law: Floats
    failed: Flags
    masses: Floats


@jit()
def rank(logits: NDArray[np.float32], kept: Floats, ids: Ints) -> int:
    """The largest logits, best first, ties by lower id, into ``kept`` and ``ids``.

    The k-th largest of the maxima of some groups is a bound below which nothing can be among the k largest; with four
    groups to a place it leaves little more than those.

    Returns:
        How many there are above -inf; 0 where one is NaN or +inf.
    """
    vocab, support = logits.size, kept.size
    groups = GROUPS_PER_PLACE * support
    bound = np.float32(LOWEST)
    if vocab >= 2 * groups:
        maxima = logits[:groups].copy()
        for first in range(groups, vocab - groups + 1, groups):
            for group in range(groups):
                logit = logits[first + group]
                maxima[group] = logit if logit > maxima[group] else maxima[group]
        bound = max(bound, np.partition(maxima, groups - support)[groups - support])
    usable, found = True, 0
    keys = np.empty(vocab, np.int64)
    bits = logits.view(np.int32)
    for token in range(vocab):
        if not logits[token] < bound:
            usable &= logits[token] < np.inf
            word = np.int64(bits[token])
            if word < 0:  # ordered as the floats are; -0.0 becomes 0
                word = -(word & 0x7FFFFFFF)
            keys[found] = (word << 32) + (LOW_WORD - token)
            found += 1
    if not usable:
        return 0
    best = np.sort(keys[:found])[::-1]
    count = min(found, support)
    for place in range(count):
        ids[place] = LOW_WORD - (best[place] & LOW_WORD)
        kept[place] = logits[ids[place]]
    return count


@jit()
def softmax(logits: Floats, first: int, end: int, divisor: float, law: Floats) -> None:
    """The law of the logits in ``first`` .. ``end - 1``, largest first, over the divisor, into the same places."""
    top, total = logits[first] / divisor, 0.0
    for place in range(first, end):
        law[place] = np.exp(logits[place] / divisor - top)
        total += law[place]
    for place in range(first, end):
        law[place] /= total


@jit()
def positive(law: Floats, count: int) -> int:
    """How many of the first so many, largest first, are positive."""
    while law[count - 1] <= 0:
        count -= 1
    return count


@jit()
def contains(places: Ints, count: int, place: int) -> bool:
    """Whether a place is among the first so many."""
    found = False
    for index in range(count):
        found |= places[index] == place
    return found


@jit()
def draw_probes(
    curves: Curves,
    law: Floats,
    q: Floats,
    masses: Floats,
    m: int,
    ranked: int,
    room: int,
    uniforms: Floats,
    places: Ints,
    proxies: Floats,
) -> int:
    """Draw without replacement: each probe from what the earlier ones left of q~.

    Args:
        curves: the request's.
        law: q~, over the places m .. ranked - 1.
        q, masses: of all places.
        m, ranked, room: leads, ranked tokens, slots for probes.
        uniforms: one per probe.
        places, proxies: what is found.

    Returns:
        How many probes there are.
    """
    left = law.copy()
    if curves.used:
        ceiling = 1.0 if curves.probe_first or m == 0 else chance(curves, LEAD, masses[m - 1])
    else:
        ceiling = q[max(m, 1) - 1]
    drawn = 0
    for draw in range(min(places.size, room)):
        total, mass, likeliest = 0.0, 0.0, -1
        for place in range(m, ranked):
            if not contains(places, drawn, place):
                total += left[place]
                mass += q[place]
                likeliest = place if likeliest < 0 else likeliest
        if not total > 0:
            break
        point, cumulative, chosen, last = uniforms[draw] * total, 0.0, -1, likeliest
        for place in range(m, ranked):
            cumulative += left[place]
            if left[place] > 0:
                last = place
            if cumulative > point:
                chosen = place
                break
        if curves.used:
            ceiling = min(ceiling, probe_chance(curves, masses, m, draw))
        else:  # the mass of its tail, between the best token there and the slot before
            ceiling = max(q[likeliest], min(ceiling, mass))
        places[drawn] = chosen if chosen >= 0 else last
        proxies[drawn] = ceiling
        left[places[drawn]] = 0.0
        drawn += 1
    return drawn


@jit()
def chance(curves: Curves, kind: int, mass: float) -> float:
    """A curve's value at a mass; ``reference.weights.Curve``."""
    segment, last = 0, curves.knots.shape[1] - 1
    while segment < last and curves.knots[0, segment] < mass:
        segment += 1
    share = min((mass - curves.knots[1, segment]) / curves.knots[2, segment], 1.0)
    return max(curves.values[0, kind, segment] + curves.values[0, kind + 3, segment] * share, curves.least)


@jit()
def probe_chance(curves: Curves, masses: Floats, m: int, probe: int) -> float:
    """Of a probe behind m leads, counted from 0; ``reference.weights.Curves.probes``."""
    first, behind = chance(curves, PROBE, masses[m]), chance(curves, PROBE, masses[m + probe])
    return curves.shares[0, probe] * (2 * first * behind / (first + behind))


@jit()
def lead_count(curves: Curves, masses: Floats, drawable: int, num_slots: int, most_leads: int, score: float) -> int:
    """The m whose slots promise most above the price; ``reference.weights.lead_count``."""
    leads = np.zeros(num_slots + 1)  # what so many of them promise
    for place in range(num_slots):
        leads[place + 1] = leads[place] + promise(curves, score, chance(curves, LEAD, masses[place]))
    best, most = num_slots, leads[num_slots]
    for m in range(min(most_leads, num_slots - 1, drawable - 1), -1, -1):
        drawn, total, probe = min(curves.shares.shape[1], num_slots - m, drawable - m), leads[m], 0.0
        for index in range(drawn):
            probe = probe_chance(curves, masses, m, index)
            total += promise(curves, score, probe)
        for place in range(m, num_slots - drawn):
            fill = min(probe, chance(curves, FILL, masses[place]))
            total += promise(curves, score, fill)
        if total >= most - curves.tie:
            best, most = m, max(total, most)
    return best


@jit()
def promise(curves: Curves, score: float, weight: float) -> float:
    """What a slot's path score has above the price."""
    return max(score * weight - curves.price, 0.0)


@jit()
def node_slots(
    shape: Shape,
    curves: Curves,
    logits: NDArray[np.float32],
    score: float,
    temperature: float,
    uniforms: Floats,
    vocab_map: Ints,
    slots: Slots,
    b: int,
    node: int,
) -> None:
    """The slots of one node, written to their places."""
    ids, law, masses = slots.law_ids[b, node], slots.law[b, node], slots.masses[b, node]
    kept = np.empty(ids.size)
    count = rank(logits, kept, ids)
    if count == 0:
        slots.failed[b, node] = True
        return
    if vocab_map.size:
        for place in range(count):
            ids[place] = vocab_map[ids[place]]
    q = np.zeros(ids.size)
    softmax(kept, 0, count, 1.0, q)
    ranked = positive(q, count)
    sampled = temperature >= shape.greedy_below
    divisor = temperature if sampled else 1.0
    num_slots, m = min(shape.branching, ranked), shape.lead_tokens
    if curves.used:
        softmax(kept, 0, ranked, divisor, masses)
        if m == AUTO:
            m = lead_count(curves, masses, positive(masses, ranked), num_slots, shape.most_leads, np.exp(score))
    drawn = 0
    places, proxies = np.empty(shape.draws, np.int64), np.empty(shape.draws)
    if shape.draws > 0 and sampled and num_slots > m:
        softmax(kept, m, ranked, divisor, law)
        drawn = draw_probes(curves, law, q, masses, m, ranked, num_slots - m, uniforms, places, proxies)
    following = m
    for slot in range(num_slots):
        if slot < m or drawn == 0:
            place = slot
            weight = chance(curves, LEAD, masses[place]) if curves.used else q[place]
        elif slot < m + drawn:
            place, weight = places[slot - m], proxies[slot - m]
            slots.is_probe[b, node, slot] = True
        else:
            while contains(places, drawn, following):
                following += 1
            place, weight = following, q[following]
            following += 1
            if curves.used:
                weight = min(chance(curves, FILL, masses[place]), proxies[drawn - 1])
        slots.token_ids[b, node, slot] = ids[place]
        reached = score + np.log(weight)
        if reached >= shape.least_score:
            slots.log_scores[b, node, slot] = reached


@jit(
    array(SINGLE, 3),
    array(NUMBER, 2),
    array(NUMBER, 1),
    array(NUMBER, 3),
    array(INTEGER, 1),
    *[INTEGER] * 5,
    *[NUMBER] * 2,
    array(NUMBER, 3),
    *[array(NUMBER, 2)] * 2,
    NUMBER,
    FLAG,
    *[NUMBER] * 2,
)
def level_slots(
    logits: NDArray[np.float32],
    parent_scores: Floats,
    temperatures: Floats,
    uniforms: Floats,
    vocab_map: Ints,
    lead_tokens: int,
    most_leads: int,
    branching: int,
    support: int,
    draws: int,
    greedy_below: float,
    least_score: float,
    values: Floats,
    shares: Floats,
    knots: Floats,
    least: float,
    probe_first: bool,
    price: float,
    tie: float,
) -> Slots:
    """Slots of every node of a level.

    Args:
        logits: [batch, beam, draft vocab].
        parent_scores: [batch, beam] logarithm of the nodes' path scores; a node at -inf is padding.
        temperatures: [batch].
        uniforms: [batch, beam, draws or more] in [0, 1).
        vocab_map: [draft vocab] target ids, increasing; empty where they are the draft's.
        lead_tokens, most_leads, branching, support, draws, greedy_below, least_score: see ``Shape``.
        values, shares, knots, least, probe_first, price, tie: see ``Curves``, with a row per request; without
            weights ``values`` is empty.
    """
    batch, beam, vocab = logits.shape
    support = min(support, vocab)
    used = values.size > 0
    shape = Shape(lead_tokens, most_leads, branching, support, draws, greedy_below, least_score)
    slots = Slots(
        np.zeros((batch, beam, shape.branching), np.int64),
        np.full((batch, beam, shape.branching), -np.inf),
        np.zeros((batch, beam, shape.branching), np.bool_),
        np.zeros((batch, beam, support), np.int64),
        np.zeros((batch, beam, support)),
        np.zeros((batch, beam), np.bool_),
        np.zeros((batch, beam, support if used else 0)),
    )
    for b in range(batch):
        curves = Curves(used, values[b : b + 1], shares[b : b + 1], knots, least, probe_first, price, tie)
        for node in range(beam):
            if parent_scores[b, node] > -np.inf:
                node_slots(
                    shape,
                    curves,
                    logits[b, node],
                    parent_scores[b, node],
                    temperatures[b],
                    uniforms[b, node],
                    vocab_map,
                    slots,
                    b,
                    node,
                )
    return slots
