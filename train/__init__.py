"""Training: the tiny target's pretraining, regeneration of data by the target, and distillation of draft heads."""
