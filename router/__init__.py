"""The control plane: membership, placement, replacement. It decides, and is never on the token path."""
