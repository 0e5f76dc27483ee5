"""The node that encodes prompts in one batch."""
