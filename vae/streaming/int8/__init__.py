"""Which convolutions of a VAE run in int8: the measurement, the choice, and the setting."""
