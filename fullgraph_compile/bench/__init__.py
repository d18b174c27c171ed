"""What ``fgc bench`` and ``fgc ladder`` do: models by shape, ways to run them, and the limit of the machine."""
