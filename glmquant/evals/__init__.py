"""Evals of two checkpoints: run through lm-eval, kept per question, compared with a margin chosen before."""
