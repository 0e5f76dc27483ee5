"""Shards: one video over the processes of `torch.distributed`, a part of every frame on each."""
