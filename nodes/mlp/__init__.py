"""The node that fuses gated MLPs."""
