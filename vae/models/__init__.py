"""The networks: what each family is made of, and what a checkpoint calls it."""
