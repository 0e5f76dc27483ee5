"""The nodes that apply LoRAs."""
