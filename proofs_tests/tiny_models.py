"""What the tests of targets and drafters share: how a tiny random model is made."""

import torch


def spread(model):
    """Larger weights than the default initialisation, so that attention really depends on what is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2.0 / parameter.shape[-1] ** 0.5)
    return model.eval()
