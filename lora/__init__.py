"""LoRA files on models of any framework: keys, merging, restoring. Needs torch and safetensors."""
