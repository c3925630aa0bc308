"""Evidence of losslessness that anybody can produce again: what ``rheo verify`` runs.

- ``exact``: the law of the output on rational laws, enumerated; total variation must be exactly 0.
- ``batched``: the decoder's own parts on toy models, sampled and compared with the exact law.
- ``pair``: a target and a draft of one's own, sampled and compared with the target's probabilities.

Nothing here prints or asks; ``optimized.cli.verify`` does.
"""
